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
    """Call number `index` begins. `custom`: it is one to a custom tool."""

    index: int
    id: str
    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of the arguments of call `index`, or of the free text for a custom tool."""

    index: int
    text: str
    custom: bool = False


Delta = Content | Reasoning | CallBegin | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON text, or a custom tool's free text, cut short if the answer was."""

    id: str
    name: str
    arguments: str = ""
    custom: bool = False


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
                self.calls.append(ToolCall(delta.id, delta.name, custom=delta.custom))
            else:
                self.calls[delta.index].arguments += delta.text
        return self
