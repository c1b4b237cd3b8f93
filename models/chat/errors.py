"""Errors of chat templates."""

from __future__ import annotations


class ChatTemplateError(ValueError):
    """A chat template that cannot be parsed, or that refuses or fails on these messages; the text is one line."""

    def __init__(self, problem: str) -> None:
        super().__init__(" ".join(problem.split()))


class ExceededBounds(ChatTemplateError):
    """A chat template that ran too long, or needed too much memory, for its process."""
