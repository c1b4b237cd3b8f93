"""Progress on a terminal: compiled kernels of a first start, results of a batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType

from logitless.cli.status_line import StatusLine

WIDTH = 30  # characters of a bar
INTERVAL = 0.1  # seconds between two drawings


class Progress:
    """A bar on stderr that counts to `total`; `shown` False: nothing is written."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        self._title, self._total, self._shown, self._line = title, total, shown, StatusLine()
        self._done, self._drawn, self._began = 0, float("-inf"), time.monotonic()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        now = time.monotonic()
        if self._shown and (now - self._drawn >= INTERVAL or self._done == self._total):
            self._drawn = now
            full = WIDTH * self._done // self._total
            rate = self._done / max(1e-9, now - self._began)
            bar = "█" * full + "·" * (WIDTH - full)
            self._line.show(f"{self._title} {bar} {self._done}/{self._total} ({rate:.1f}/s)")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.end()


@contextlib.contextmanager
def compile_progress(shown: bool) -> Iterator[None]:
    """Count the kernels that are compiled meanwhile, where `shown`."""
    if not shown:
        yield
        return
    from logitless.cli.progress import compile_progress as on_terminal

    with on_terminal():
        yield
