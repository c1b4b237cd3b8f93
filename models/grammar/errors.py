"""Errors of grammars, and of generations under a grammar."""

from __future__ import annotations

import re

_STOPPED = {
    "NoExtension": "allows no text",
    "NoExtensionBias": "allows no text",
    "ParserTooComplex": "too complex",
    "LexerTooComplex": "too complex",
}
_ONE_OF = "oneOf constraints are not supported"


class GrammarError(ValueError):
    """A grammar that cannot be used, or a state that cannot continue. The text is one line that names the place."""

    def __init__(self, problem: str) -> None:
        text = " ".join(problem.split())
        super().__init__(text if len(text) <= 300 else text[:297] + "...")


class NotEnforceable(GrammarError):
    """A valid grammar with a part that this engine cannot enforce."""


def placed(message: str, source: str, at: int) -> str:
    """A message about a place in a source: its line and column, and the text there."""
    line, column = source.count("\n", 0, at) + 1, at - source.rfind("\n", 0, at)
    near = source[at : at + 20].split("\n")[0]
    return f"line {line}, column {column}: {message}" + (f" at {near!r}" if near else " at the end")


def reason(error: str) -> str:
    """llguidance's message in one line, without its own positions."""
    lines = error.splitlines()
    why = next((i for i, line in enumerate(lines) if line.startswith("error: ")), 0)
    if why >= 2:  # a regex, below it a caret, below that the problem
        column = lines[why - 1].find("^") - 3
        return f"regex {lines[why - 2].strip()!r}, column {max(1, column)}: {lines[why].removeprefix('error: ')}"
    first = next((line.strip() for line in lines if line.strip()), "cannot be used")
    if first in _STOPPED:
        return _STOPPED[first]
    first = re.sub(r"^at \d+\(\d+\): ", "", first)
    first = first.removeprefix("failed to compile JSON schema: ")
    return "oneOf whose alternatives may overlap cannot be enforced; anyOf can" if first.startswith(_ONE_OF) else first
