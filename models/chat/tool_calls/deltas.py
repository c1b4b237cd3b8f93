"""What a parser of a model's answer says: pieces of a message, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call number `index` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A call as a whole; `arguments` is JSON text (cut short where the answer was)."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """An answer as a whole: all of its deltas put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> Message:
        """Put more deltas to it; returns itself."""
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
