"""Answer blocks of the Responses and Messages APIs: reasoning, text and tool calls, in order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from logitless.engine.requests import TokenProb
from logitless.models.chat.tool_calls.deltas import CallArguments, CallBegin, Content, Delta

REASONING, TEXT, CALL = "reasoning", "text", "call"
BEGIN, MORE, END = "begin", "more", "end"


@dataclass(slots=True)
class AnswerBlock:
    """One block; `id` and `name` are a call's. `cut`: it ended before it was whole."""

    kind: str
    index: int
    id: str = ""
    name: str = ""
    text: str = ""
    cut: bool = False
    logprobs: list[TokenProb] = field(default_factory=list)  # of the tokens of a text
    custom: bool = False  # a call to a custom tool, whose text is free
    n_told: int = 0  # of them, in a stream


Step = tuple[str, AnswerBlock, str]
"""(BEGIN, MORE or END, the block, the text that MORE adds)."""


def is_json(text: str) -> bool:
    """True if a call's arguments are whole."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(slots=True)
class Blocks:
    """Puts deltas together to blocks, and says when each begins, grows and ends."""

    blocks: list[AnswerBlock] = field(default_factory=list)
    _open: bool = False

    def add(self, deltas: Iterable[Delta]) -> list[Step]:
        """Blocks' steps that these deltas make."""
        steps: list[Step] = []
        for delta in deltas:
            if isinstance(delta, CallBegin):
                steps += self._begin(AnswerBlock(CALL, len(self.blocks), delta.id, delta.name, custom=delta.custom))
                continue
            kind = CALL if isinstance(delta, CallArguments) else TEXT if isinstance(delta, Content) else REASONING
            if kind != CALL and (not self._open or self.blocks[-1].kind != kind):
                steps += self._begin(AnswerBlock(kind, len(self.blocks)))
            block = self.blocks[-1]
            block.text += delta.text
            steps.append((MORE, block, delta.text))
        return steps

    def finish(self, *, cut: bool = False) -> list[Step]:
        """The end of the last block. `cut`: the generation ended inside it, at its limit."""
        if not self._open:
            return []
        self._open = False
        block = self.blocks[-1]
        block.cut = not is_json(block.text) if block.kind == CALL and not block.custom else cut
        return [(END, block, "")]

    def _begin(self, block: AnswerBlock) -> list[Step]:
        steps = self.finish()
        self.blocks.append(block)
        self._open = True
        return [*steps, (BEGIN, block, "")]
