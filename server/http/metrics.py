"""GET /metrics: llama-server's names, and ours for what it does not tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from server.errors import NotSupported
from server.http.context import CONTEXT, Context


async def metrics(request: web.Request) -> web.Response:
    """The metrics as Prometheus text."""
    context = request.app[CONTEXT]
    if not context.config.metrics:
        raise NotSupported("this server has no metrics; start it with --metrics")
    _ = context.served
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Server(context))
    return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"})


class _Server(Collector):
    """Reads the counters where they are."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterable[Metric]:
        latency = self._context.service.latency
        yield from _scheduler_metrics(self._context.served.scheduler)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", latency.first_token),
            ("inter_token_seconds", "Between two tokens of one request.", latency.inter_token),
            ("queue_seconds", "What a request waited for others.", latency.queue),
            ("step_seconds", "One step of the engine.", latency.step),
        ):
            yield HistogramMetricFamily(f"logitless:{name}", text, histogram.cumulative(), histogram.total)


def _one(name: str, kind: str, text: str, value: float) -> Metric:
    metric = Metric(name, text, kind)
    metric.add_sample(name, {}, value)
    return metric


def _scheduler_metrics(scheduler: Any) -> Iterable[Metric]:
    yield _one("llamacpp:x", "gauge", "x", 0)
