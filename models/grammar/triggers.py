"""Trigger patterns of lazy grammars, searched by RE2 in linear time."""

from __future__ import annotations

from typing import Any

from logitless.models.grammar.errors import GrammarError

_MAX_MEMORY = 8 << 20


class Pattern:
    """A regular expression (RE2's dialect) over bytes."""

    def __init__(self, source: str) -> None:
        import re2

        options = re2.Options()
        options.log_errors = False
        options.max_mem = _MAX_MEMORY
        options.dot_nl = True
        try:
            self._compiled: Any = re2.compile(source.encode("utf-8"), options)
        except re2.error as error:
            problem = error.args[0] if error.args else error
            text = problem.decode("utf-8", "replace") if isinstance(problem, bytes) else str(problem)
            raise GrammarError(f"pattern {source[:80]!r}: {text}") from None

    def search(self, text: bytes) -> int:
        """Start of the first group that matched some text, else of the whole match; -1: no match."""
        match = self._compiled.search(text)
        if match is None:
            return -1
        groups = [match.start(i) for i in range(1, match.re.groups + 1) if match.end(i) > match.start(i) >= 0]
        return int(groups[0] if groups else match.start())
