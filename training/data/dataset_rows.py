"""Dataset rows: training examples of any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Messages = tuple[dict[str, Any], ...]
MEDIUM = "row_medium"  # type of a part whose field of this name is a RowMedium


@dataclass(frozen=True)
class RowMedium:
    """An image or a sound in a message, as the value of its part: a data URI, the path of a file, or
    the id of an uploaded one. `where`: the part, for messages."""

    source: str
    is_id: bool = False
    is_sound: bool = False  # by the type of its part; the bytes of a file decide
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class RowAnswer:
    """A judged answer, a text or messages. `value`: 1 good, −1 bad."""

    text: str = ""
    messages: Messages = ()
    value: float = 0.0


@dataclass(frozen=True)
class DatasetRow:
    """One row: texts, each with a flag whether it is learned, or a conversation for the chat
    template (with both, the texts are for models without one). With `answers` the text or the
    conversation is the prompt. `format`: its name in messages."""

    line: int
    parts: tuple[tuple[str, bool], ...] = ()
    messages: Messages = ()
    tools: tuple[dict[str, Any], ...] = ()
    answers: tuple[RowAnswer, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    unused: tuple[str, ...] = field(default=(), compare=False)  # names of fields that change nothing
    format: str = field(default="", compare=False)
    item: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the row itself, for graders

    @property
    def is_prompt(self) -> bool:
        """True for a prompt that waits for an answer."""
        if self.answers:
            return False
        if self.messages:
            return bool(self.messages[-1]["role"] != "assistant")
        return not any(learned for _, learned in self.parts)

    @property
    def has_answer(self) -> bool:
        """True if there is something to imitate."""
        reply = (m["role"] == "assistant" and m.get("weight") != 0 for m in self.messages)
        return any(learned for _, learned in self.parts) or any(reply)

    @property
    def media(self) -> list[RowMedium]:
        """The images and sounds of the messages, in their order."""
        return [medium for message in self.messages for medium in media_of(message)]

    def answered(self, answer: RowAnswer) -> DatasetRow:
        """The prompt with an answer, of which only the answer is learned."""
        parts = (*self.parts, (answer.text, True)) if self.parts else ()
        if not self.messages:
            return replace(self, parts=parts, answers=())
        prompt = tuple({**m, "weight": 0} if m["role"] == "assistant" else m for m in self.messages)
        reply = answer.messages or ({"role": "assistant", "content": answer.text},)
        return replace(self, parts=parts, messages=prompt + reply, answers=())


def media_of(message: dict[str, Any]) -> list[RowMedium]:
    """The images and sounds of a message, in their order."""
    content = message.get("content")
    return [part[MEDIUM] for part in content if MEDIUM in part] if isinstance(content, list) else []
