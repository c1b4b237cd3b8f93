"""Traffic of a server: counts of requests and generations by bounded labels, and their latency."""

from __future__ import annotations

from collections import Counter
from typing import Final

from aiohttp import web

from logitless.engine.stats import Histogram
from logitless.server.observing.record import Record

OTHER: Final = "other"  # label of what is not known
MAX_MODELS: Final = 100  # names of models that are told apart: the first ones
_METHODS = frozenset(("GET", "HEAD", "POST", "DELETE", "OPTIONS"))


class Traffic:
    """Requests that have ended. Labels are methods, declared routes and known models: no client makes new ones."""

    def __init__(self, own: str = "") -> None:
        """`own`: the model without a label; "": each has one."""
        self.requests: Counter[tuple[str, str, str, str]] = Counter()  # by method, route, status, model
        self.generations: Counter[tuple[str, str, str]] = Counter()  # by route, reason, model
        self.latency: dict[str, Histogram] = {}  # of requests that evaluated tokens, by model
        self._own, self._models = own, set[str]()

    def count(self, record: Record) -> None:
        """Count a request that has ended."""
        method = record.method if record.method in _METHODS else OTHER
        self.requests[method, record.route or OTHER, str(record.status), self._label(record.model)] += 1
        self.count_generations(record)

    def count_generations(self, record: Record) -> None:
        """Count what a request generated."""
        route, model = record.route or OTHER, self._label(record.model)
        for reason in record.reasons:
            self.generations[route, reason, model] += 1
        if record.n_prompt is not None:
            self.latency.setdefault(model, Histogram()).observe(record.seconds)

    def _label(self, model: str) -> str:
        if model == self._own:
            return ""
        if len(self._models) < MAX_MODELS:
            self._models.add(model)
        return model if model in self._models else OTHER


TRAFFIC: web.AppKey[Traffic] = web.AppKey("traffic", Traffic)
