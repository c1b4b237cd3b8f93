"""What can be wrong with a grammar, or with a generation under it."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar that cannot be used, or a state that it cannot go on from; the text is one line that says where."""

    def __init__(self, problem: str) -> None:
        text = " ".join(problem.split())
        super().__init__(text if len(text) <= 300 else text[:297] + "...")
