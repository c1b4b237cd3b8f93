"""Times of the parts of a request's parsing, which a trace shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PARTS: ContextVar[list[tuple[str, float, float]] | None] = ContextVar("parts", default=None)


@contextmanager
def measured(name: str) -> Iterator[None]:
    """Note the time of a part of a request's parsing, if the request is traced."""
    parts = PARTS.get()
    began = time.perf_counter()
    try:
        yield
    finally:
        if parts is not None:
            parts.append((name, began, time.perf_counter()))
