"""Status line: a line on the terminal that the next one replaces."""

from __future__ import annotations

import contextlib
import os
import sys


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
