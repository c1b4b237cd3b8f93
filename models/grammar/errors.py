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
