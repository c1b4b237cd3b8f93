"""Deltas of a parsed answer: pieces of a message, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call number `index` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of the arguments of call `index`."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text, cut short if the answer was."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole answer: the sum of its deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> Message:
        """Add deltas; returns the message."""
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, CallBegin):
                self.calls.append(ToolCall(delta.id, delta.name))
            else:
                self.calls[delta.index].arguments += delta.text
        return self
