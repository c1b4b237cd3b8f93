"""Prompts of reinforcement learning: token ids to go on from, and their rows for graders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from logitless.models.chat.template import ChatTemplate, ChatTemplateError
from logitless.models.tokenizer import Tokenizer
from logitless.training.data.dataset_rows import DatasetRow
from logitless.training.data.tokenize_rows import I32
from logitless.training.errors import TrainingError


@dataclass(frozen=True)
class Prompts:
    """Prompts by index."""

    tokens: tuple[I32, ...]
    items: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sizes(self) -> I32:
        """Tokens of each prompt."""
        return np.array([len(ids) for ids in self.tokens], np.int32)

    @property
    def begins(self) -> I32:
        sizes = self.sizes
        return np.cumsum(sizes, dtype=np.int32) - sizes

    def joined(self, other: Prompts) -> Prompts:
        return Prompts(self.tokens + other.tokens, self.items + other.items)


def prompts_of(
    records: Iterable[DatasetRow], tokenizer: Tokenizer, template: ChatTemplate | None, name: str, **variables: Any
) -> Prompts:
    """The prompts of rows. `variables`: of the chat template. TrainingError: a row is none, or the
    template refuses it."""
    tokens, items = [], []
    for record in records:
        where = f"{name}: line {record.line}"
        if not record.is_prompt:
            raise TrainingError(
                f"{where}: is {record.format}; reinforcement learns from prompts: 'messages' that end with the "
                "user's, or 'prompt', with fields for the grader"
            )
        if record.media:
            raise TrainingError(f"{where}: has images; reinforcement learns from prompts of text")
        tokens.append(_ids(record, tokenizer, template, where, variables))
        items.append(record.item)
    if not tokens:
        raise TrainingError(f"{name}: has no prompts")
    return Prompts(tuple(tokens), tuple(items))


def _ids(
    record: DatasetRow, tokenizer: Tokenizer, template: ChatTemplate | None, where: str, variables: Mapping[str, Any]
) -> I32:
    if record.messages:
        if template is None:
            raise TrainingError(f"{where}: the model has no chat template")
        try:
            text = template.render(
                list(record.messages), tools=list(record.tools) or None, **{**variables, **record.variables}
            )
        except ChatTemplateError as error:
            raise TrainingError(f"{where}: {' '.join(str(error).split())}") from None
    else:
        text = "".join(part for part, _ in record.parts)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if bos is not None:
        text = text.removeprefix(tokenizer.piece(bos).decode("utf-8", "replace"))
    ids = tokenizer.encode(text, add_special=False)
    ids = ids if bos is None else [bos, *ids]
    if not ids:
        raise TrainingError(f"{where}: the prompt is empty")
    return np.array(ids, np.int32)
