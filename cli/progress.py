"""Progress on a terminal: status lines, kernels compiled at a first start, results of a batch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType

WIDTH = 30  # characters of a bar
INTERVAL = 0.1  # seconds between two drawings


class StatusLine:
    """A line on stderr, never wider than the terminal: wrapped lines cannot be replaced."""

    def __init__(self) -> None:
        self._n = 0  # characters of the line that is shown

    def show(self, text: str, rest: str = "") -> None:
        """Replace the line. Where both do not fit, `text` is cut before `rest`."""
        room = columns() - 1
        if len(text) + len(rest) > room:
            text = text[: max(0, room - len(rest) - 1)] + "…"
        line = (text + rest)[:room]
        self._write(f"\r{line:<{self._n}}")
        self._n = len(line)

    def end(self, text: str = "") -> None:
        """Leave the line as it is, or replace it by a last one of any length."""
        if text:
            self._write(f"\r{text:<{self._n}}")
        if text or self._n:
            self._write("\n")
        self._n = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed, or nobody reads it
            sys.stderr.write(text)
            sys.stderr.flush()


def columns() -> int:
    """The width of the terminal that stderr is; 80 if unknown."""
    try:
        return max(20, os.get_terminal_size(sys.stderr.fileno()).columns)
    except (OSError, ValueError):
        return 80


class CompileProgress:
    """One line that counts kernels on a terminal; elsewhere a line at the first kernel and then every five seconds."""

    def __init__(self) -> None:
        self.n_kernels = 0
        self.happened = False  # in this process, at any time
        self._began = 0.0
        self._shown_at = float("-inf")
        self._line = StatusLine()

    def __call__(self, kernel: str, n_waiting: int) -> None:
        """A kernel is about to be compiled; `n_waiting` more wait."""
        if not self.n_kernels:
            self._began = time.monotonic()
        self.n_kernels += 1
        self.happened = True
        line = f"compiling kernels for this machine, once: {self.n_kernels} of {self.n_kernels + n_waiting}"
        with contextlib.suppress(OSError):  # stderr is closed
            if sys.stderr.isatty():
                self._line.show(line)
            elif time.monotonic() - self._shown_at >= 5:
                self._shown_at = time.monotonic()
                print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line: no kernel is being compiled."""
        if self.n_kernels:
            self._line.end()
            print(f"compiled {self.n_kernels} in {time.monotonic() - self._began:.0f} s", file=sys.stderr)
        self.n_kernels = 0


COMPILING = CompileProgress()


def show_compiling() -> CompileProgress:
    """Show compiled kernels from now on."""
    from logitless.backends.registry import on_compile

    on_compile(COMPILING)
    return COMPILING


@contextlib.contextmanager
def compile_progress() -> Iterator[None]:
    """Show the kernels that are compiled within the block."""
    show_compiling()
    try:
        yield
    finally:
        COMPILING.end()


class ProgressBar:
    """A bar on stderr that counts to `total`; `shown` False: nothing is written."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        self._title, self._total, self._shown_at, self._line = title, total, shown, StatusLine()
        self._done, self._drawn, self._began = 0, float("-inf"), time.monotonic()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        now = time.monotonic()
        if self._shown_at and (now - self._drawn >= INTERVAL or self._done == self._total):
            self._drawn = now
            full = WIDTH * self._done // self._total
            rate = self._done / max(1e-9, now - self._began)
            bar = "█" * full + "·" * (WIDTH - full)
            self._line.show(f"{self._title} {bar} {self._done}/{self._total} ({rate:.1f}/s)")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.end()
