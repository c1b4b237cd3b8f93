"""Tracing: OpenTelemetry spans of a request and its phases, by the standard environment variables.

Nothing of OpenTelemetry is imported unless one of them asks for traces. No span has a text."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from aiohttp import web

from logitless.engine.loading.options import OptionConflict
from logitless.engine.requests import CompletionRequest, Finished, Timings
from logitless.frontend.timing import PARTS, measured

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

    from logitless.server.observing.record import Record

T = TypeVar("T")
_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_EXPORTERS = {
    "otlp": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "OTLPSpanExporter"),
    "console": ("opentelemetry.sdk.trace.export", "ConsoleSpanExporter"),
}
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PATIENCE = 2.0  # seconds for the last spans at the server's end
_OPERATIONS = {"messages": "chat", "chat": "chat", "responses": "chat"}  # GenAI's names by a part of the route


def variable() -> str:
    """The environment variable that asks for traces; "": none does."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return ""
    return next((name for name in _VARIABLES if os.environ.get(name)), "")


def start() -> Tracing | None:
    """Tracing as the environment says; None: it asks for no traces. OptionConflict: it cannot be done."""
    name = variable()
    if not name:
        return None
    kind = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if kind not in _EXPORTERS:
        raise OptionConflict(f"OTEL_TRACES_EXPORTER={kind}: must be otlp, console or none")
    protocol = next((name for name in _PROTOCOLS if os.environ.get(name)), "")
    if kind == "otlp" and protocol and os.environ[protocol] != "http/protobuf":
        raise OptionConflict(f"{protocol}={os.environ[protocol]}: must be http/protobuf")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        module, exporter = _EXPORTERS[kind]
        built = getattr(import_module(module), exporter)()
    except ImportError:
        raise OptionConflict(f"{name} is set, and traces need pip install 'logitless[otel]'") from None
    own = {"service.version": version("logitless")}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        own["service.name"] = "logitless"
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(built))
    return Tracing(provider)


class Tracing:
    """Tracer of one application."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("logitless", version("logitless"))

    def begin(self, request: web.Request, record: Record) -> RequestTrace:
        """The trace of a request, as a part of the client's, if it has one."""
        return RequestTrace(self._tracer, request, record)

    async def close(self, _: web.Application) -> None:
        """Send the last spans, within `PATIENCE`: the collector may be gone."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        Thread(target=shut_down, daemon=True, name="last spans").start()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await done.wait()


class TracedReply(Protocol):
    """Reply of a request."""

    id: str
    model: str
    parse_seconds: float  # of finding tool calls in it, so far


class RequestTrace:
    """Spans of one request: the server's, the model's operation in it, and their phases."""

    def __init__(self, tracer: Tracer, request: web.Request, record: Record) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator = TraceContextTextMapPropagator()
        self._tracer, self._record = tracer, record
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._parts: list[tuple[str, float, float]] = []
        self._server = tracer.start_span(
            f"{record.method} {record.route}".rstrip(),
            self._propagator.extract(request.headers),
            SpanKind.SERVER,
            {
                "http.request.method": record.method,
                "http.route": record.route,
                "url.path": record.path,
                "url.scheme": request.scheme,
                "logitless.request.id": record.id,
            },
            start_time=self._at(record.began),
        )
        self._context = set_span_in_context(self._server)
        self._operation: Any = None  # span of the model's work
        self._name, self._submitted = "", 0.0
        self._reply: TracedReply | None = None
        self._seconds_of_calls = False

    @property
    def headers(self) -> dict[str, str]:
        """Headers that let a server behind this one add to the trace."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._context)
        return carrier

    def timing(self, work: Callable[[], T]) -> Callable[[], T]:
        """`work` with spans of its parts."""

        def timed() -> T:
            token = PARTS.set(self._parts)
            try:
                with measured("parse"):
                    return work()
            finally:
                PARTS.reset(token)

        return timed

    def generates(self, body: CompletionRequest, reply: TracedReply, *, n: int, stream: bool, has_tools: bool) -> None:
        """`n` generations like `body` are submitted."""
        route = self._record.route
        operation = next((name for part, name in _OPERATIONS.items() if part in route), "text_completion")
        sampling = body.sampling
        fields = {
            "gen_ai.request.max_tokens": body.n_predict if body.n_predict >= 0 else None,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.choice.count": n if n > 1 else None,
            "gen_ai.request.stream": stream,
            "gen_ai.response.id": reply.id,
        }
        self._begin(operation, reply.model, {name: value for name, value in fields.items() if value is not None})
        self._reply, self._seconds_of_calls = reply, has_tools

    def embeds(self, model: str) -> None:
        """Texts are evaluated, and nothing is generated."""
        self._begin("embeddings", model, {})

    def _begin(self, operation: str, model: str, fields: dict[str, Any]) -> None:
        self._submitted = time.perf_counter()
        named = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "logitless"}
        models = {"gen_ai.request.model": model, "gen_ai.response.model": model}
        start = self._at(self._submitted)
        attributes = {**named, **models, **fields}
        self._operation = self._tracer.start_span(
            f"{operation} {model}", self._context, attributes=attributes, start_time=start
        )

    def finished(self, index: int, event: Finished) -> None:
        """A generation has ended: its phases, backwards from now by its own clock."""
        if not self._server.is_recording():
            return
        timings: Timings = event.timings
        end = time.perf_counter()
        decode = max(self._submitted, end - timings.predicted_ms / 1000)
        prefill = max(self._submitted, decode - timings.prompt_ms / 1000)
        number = {"logitless.generation": index}
        self._phase("queue", self._submitted, prefill, number)
        cached = {"gen_ai.usage.cache_read.input_tokens": event.n_cached, "gen_ai.usage.input_tokens": event.n_prompt}
        self._phase("prefill", prefill, decode, number | cached)
        drafts = {
            "logitless.draft_tokens": timings.draft_n,
            "logitless.draft_tokens.accepted": timings.draft_n_accepted,
        }
        self._phase("decode", decode, end, number | {"gen_ai.usage.output_tokens": event.n_predicted} | drafts)

    def _phase(self, name: str, start: float, end: float, fields: dict[str, Any], *, of_server: bool = False) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = self._context if of_server else set_span_in_context(self._operation)
        span = self._tracer.start_span(name, parent, attributes=fields, start_time=self._at(start))
        span.end(self._at(end))

    def end(self) -> None:
        """The answer is complete, or the client has left."""
        from opentelemetry.trace import Status, StatusCode

        record, now = self._record, time.perf_counter()
        failed = record.status >= 500 or "error" in record.reasons
        if self._server.is_recording():
            for name, start, end in self._parts:
                self._phase(name, start, end, {}, of_server=True)
            if self._reply is not None and self._seconds_of_calls:
                start = max(self._submitted, now - self._reply.parse_seconds)
                self._phase("tool parse", start, now, {})
        if self._operation is not None:
            self._operation.set_attributes(self._usage())
            if failed:
                self._operation.set_status(Status(StatusCode.ERROR))
            self._operation.end(self._at(now))
        self._server.set_attribute("http.response.status_code", record.status)
        if failed:
            self._server.set_attribute("error.type", str(record.status) if record.status >= 500 else "error")
            self._server.set_status(Status(StatusCode.ERROR))
        self._server.end(self._at(now))

    def _usage(self) -> dict[str, Any]:
        record = self._record
        fields: dict[str, Any] = {"gen_ai.usage.input_tokens": record.n_prompt or 0}
        if self._reply is not None:
            fields["gen_ai.usage.output_tokens"] = record.n_generated
            fields["gen_ai.usage.cache_read.input_tokens"] = record.n_cached
            fields["gen_ai.response.finish_reasons"] = tuple(record.reasons)
            if record.ttft is not None:
                fields["gen_ai.response.time_to_first_chunk"] = record.ttft
        return fields

    def _at(self, seconds: float) -> int:
        """Nanoseconds since 1970 of a time of this process's clock."""
        return int(seconds * 1e9) + self._offset


TRACE: web.RequestKey[RequestTrace] = web.RequestKey("trace", RequestTrace)  # missing: the request is not traced
TRACING: Final = web.AppKey("tracing", Tracing)  # missing: nobody asked for traces
