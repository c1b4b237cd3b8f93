"""Record of one request: its id, tokens and times, and its access line."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import getrandbits
from typing import Any, Final, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from logitless.engine.requests import Event, Failed, Finished, StopType, Timings, Token
from logitless.engine.stats import Histogram
from logitless.server.routes import polled

log = logging.getLogger("logitless.access")
REQUEST_ID: Final = "X-Request-Id"
CLIENT_LEFT: Final = 499  # nginx's status of a request whose client closed the connection
_ID = re.compile(r"[!-~]{1,128}")
_LONGEST_PATH = 200  # characters of a path in the log
PROBES = frozenset(("/health", "/v1/health", "/metrics"))  # logged with -v only, while they succeed, and never traced
_REASONS: dict[StopType, str] = {"eos": "stop", "word": "stop", "limit": "length"}  # vLLM's words
_PLAIN = re.compile(r"[!#-~]+")  # a value that needs no quotes


def request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-Id if it is 1 to 128 printable ASCII characters without spaces, else a new one."""
    value = headers.get(REQUEST_ID, "")
    return value if value and _ID.fullmatch(value) else f"req_{getrandbits(96):024x}"


class Trace(Protocol):
    """Trace of a request (tracing.RequestTrace)."""

    def embeds(self, model: str, /) -> None: ...

    def finished(self, index: int, event: Finished, /) -> None: ...

    def end(self) -> None: ...


class Record:
    """One request, from its arrival to the end of its answer."""

    __slots__ = (
        *("id", "method", "path", "route", "model", "began", "status", "seconds"),
        *("ttft", "n_prompt", "n_cached", "n_generated", "reasons", "_n_running", "_n_alike", "_last", "trace"),
        "skipped_tools",
    )

    def __init__(self, request: web.Request, route: str) -> None:
        """`route`: the declared path, "" if there is none for the request's."""
        self.id = request_id(request.headers)
        self.method, self.route, self.model = request.method, route, ""
        self.path = request.rel_url.raw_path[:_LONGEST_PATH]  # escaped, so that it stays one line; no query
        self.began = time.perf_counter()
        self.status, self.seconds = 0, 0.0
        self.ttft: float | None = None  # seconds to the first token
        self.n_prompt: int | None = None  # tokens, cached ones included
        self.n_cached = self.n_generated = 0
        self.reasons: list[str] = []  # of the generations that ended: stop, length, error, abort
        self._n_running, self._n_alike = 0, 1
        self._last: dict[int, Timings] = {}  # of the last token of each generation that has not finished
        self.trace: Trace | None = None
        self.skipped_tools: tuple[str, ...] = ()  # types, for a header of the answer

    def generates(self, model: str, n: int, n_alike: int) -> None:
        """`n` generations begin; `n_alike` in a row have the same prompt, which counts once."""
        self.model, self.n_prompt = model, 0
        self._n_running, self._n_alike = n, n_alike

    def embeds(self, model: str, n_tokens: int) -> None:
        """Texts of so many tokens are evaluated."""
        self.model, self.n_prompt = model, n_tokens
        if self.trace is not None:
            self.trace.embeds(model)

    def answers(self) -> None:
        """The first token, or the first part of a passed-on stream, is there."""
        if self.ttft is None:
            self.ttft = time.perf_counter() - self.began

    def take(self, events: Iterable[tuple[int, Event]]) -> None:
        """Count events of the generations."""
        for index, event in events:
            if isinstance(event, Token):
                if self.ttft is None:
                    self.answers()
                if event.timings is not None:
                    self._last[index] = event.timings
            elif isinstance(event, Finished):
                self._n_running -= 1
                self.reasons.append(_REASONS[event.stop_type])
                if self.trace is not None:
                    self.trace.finished(index, event)
                self._last.pop(index, None)
                self._count(index, event.n_prompt, event.n_cached, event.n_predicted)
            elif isinstance(event, Failed):
                self._n_running -= 1
                self.reasons.append("error")

    def _count(self, index: int, n_prompt: int, n_cached: int, n_generated: int) -> None:
        """Count the tokens of a generation that has ended."""
        self.n_generated += n_generated
        if index % self._n_alike == 0:
            self.n_prompt = (self.n_prompt or 0) + n_prompt
            self.n_cached += n_cached

    def end(self, status: int) -> None:
        """The answer is complete, or the client has left."""
        self.status, self.seconds = status, time.perf_counter() - self.began
        for index, last in self._last.items():
            self._count(index, last.cache_n + last.prompt_n, last.cache_n, last.predicted_n)
        self._last.clear()
        if self._n_running > 0:
            self.reasons.append("error" if status >= 500 else "abort")
        if self.trace is not None:
            self.trace.end()

    @property
    def level(self) -> int:
        """Level of the access line."""
        polls = self.route in polled() and self.method in ("GET", "HEAD") and self.status < 400
        return logging.DEBUG if polls else logging.INFO

    @property
    def is_logged(self) -> bool:
        """True if the log takes the access line."""
        return log.isEnabledFor(self.level)

    def write_line(self) -> None:
        """Write the access line."""
        fields = self._fields()
        answer = " ".join([f"{name}={_quoted(value)}" for name, value in fields.items()])
        line = f"{self.method} {self.path} {self.status} {answer}"
        entry = logging.LogRecord(log.name, self.level, "", 0, line, None, None)  # looks at no stack
        lines = {"message": "request", "method": self.method, "path": self.path, "status": self.status}
        entry.fields = lines | fields
        log.handle(entry)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"request_id": self.id}
        if self.model:
            fields["model"] = self.model
        if self.n_prompt is not None:
            fields |= {"prompt_tokens": self.n_prompt, "cached_tokens": self.n_cached}
            fields["completion_tokens"] = self.n_generated
        if self.ttft is not None:
            fields["ttft_s"] = round(self.ttft, 4)
        fields["total_s"] = round(self.seconds, 4)
        if self.reasons:
            fields["finish"] = ",".join(dict.fromkeys(self.reasons))
        return fields


class FileAnswer(web.FileResponse):
    """A file, or a part of it, or 304, 404 or 416: the status is known when it is sent."""

    def __init__(self, path: Path, content_type: str = "") -> None:
        super().__init__(path, headers={"Content-Type": content_type} if content_type else None)
        self.sent: Callable[[int], None] = lambda _: None  # called with the status

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        status = CLIENT_LEFT
        try:
            writer = await super().prepare(request)
            status = self.status
            return writer
        finally:
            self.sent(status)


def _quoted(value: Any) -> str:
    text = str(value)
    if type(value) is not str:
        return text
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def log_refused(status: int) -> None:
    """The access line of what is no HTTP request, or of one that no route may see."""
    log.info("- - %d", status, extra={"fields": {"message": "request", "status": status}})


RECORD: web.RequestKey[Record] = web.RequestKey("record", Record)  # set by the guard


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
