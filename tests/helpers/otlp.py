"""OTLP receiver: a collector of traces over HTTP, which reads them with OpenTelemetry's own messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.helpers.asgi_hosts import hosted


class Collector:
    """Spans that have come, as plain dictionaries."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.resources: list[dict[str, Any]] = []

    async def take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for group in message.resource_spans:
            self.resources.append(_plain(group.resource.attributes))
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        {
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "kind": span.kind,
                            "start": span.start_time_unix_nano,
                            "end": span.end_time_unix_nano,
                            "failed": span.status.code == 2,
                            "state": span.trace_state,
                            **_plain(span.attributes),
                        }
                    )
        return web.Response(body=b"", content_type="application/x-protobuf")

    def named(self, name: str) -> dict[str, Any]:
        """The only span of this name."""
        (span,) = [span for span in self.spans if span["name"] == name]
        return span


def _plain(attributes: Any) -> dict[str, Any]:
    plain = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        plain[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return plain


@asynccontextmanager
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A collector to which applications made in the block send their traces; they do so at their end."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with hosted(app, "aiohttp") as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield collector
