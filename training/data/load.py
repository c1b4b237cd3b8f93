"""Training data loader: text or rows → datasets, by tokenizer, chat template and training method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from logitless.models.chat.template import ChatTemplate
from logitless.models.tokenizer import Tokenizer
from logitless.training.config import TrainingConfig
from logitless.training.data.dataset_rows import DatasetRow, RowAnswer
from logitless.training.data.formats import of_one_format, parse_row
from logitless.training.data.media import MediaReader
from logitless.training.data.packing import (
    Dataset,
    Examples,
    Groups,
    PackedExamples,
    StridedSamples,
    TextSamples,
    find_samples,
)
from logitless.training.data.sources import is_rows, rows_of
from logitless.training.data.tokenize_rows import I32, Example, answer_of, examples_of
from logitless.training.errors import TrainingError
from logitless.training.methods.objective import Group, Objective

Rows = Iterable[Mapping[str, Any]]
LEAST_CONTEXT = 128  # tokens of a window that follows the data


@dataclass(frozen=True)
class Reader:
    """Makes token rows of rows with a vocabulary, a chat template and the training method (None:
    supervised learning)."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    objective: Objective | None = None
    media: MediaReader | None = None  # None: rows may have none

    def examples(self, records: Iterable[DatasetRow], name: str) -> Iterator[Group]:
        """Token rows of each example. TrainingError names the line at fault."""
        if self.objective is None:
            return ((example,) for example in examples_of(records, self.tokenizer, self.template, name, self.media))

        def encode(record: DatasetRow, answer: RowAnswer) -> Example:
            return answer_of(record, answer, self.tokenizer, self.template, name, self.media)

        return self.objective.groups(records, encode, name)

    def by_example(self, records: Iterable[DatasetRow], name: str, n_ctx: int) -> Examples | Groups:
        """Examples to be packed batch by batch, with at most `n_ctx` tokens a row."""
        if self.objective is not None:
            return Groups(self.examples(records, name), n_ctx, name=name)
        return Examples((example for (example,) in self.examples(records, name)), n_ctx, name=name)

    def lengths(self, records: Iterable[DatasetRow], name: str) -> Lengths:
        """Lengths of the examples that have something to learn in each row."""
        sizes, longest = [], 0
        for group in self.examples(records, name):
            if all(row.learn[1:].any() for row in group):
                rows = [len(row.tokens) - 1 for row in group]
                sizes.append(sum(rows))
                longest = max(longest, *rows)
        return Lengths(np.array(sizes, np.int32), longest)


@dataclass(frozen=True)
class Lengths:
    """Tokens of each example (n,) and of the longest row, without the last of a row, which is a label alone."""

    sizes: I32
    longest: int


def load_dataset(path: str | Path, reader: Reader, o: TrainingConfig) -> Dataset:
    """Samples of a file for supervised learning: of rows, else of one text. TrainingError names the fault."""
    if is_rows(path):
        return packed_rows(rows_of(path, str(path)), str(path), reader, o)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path}: byte {error.start} is not UTF-8") from None
    return text_dataset(text, str(path), reader.tokenizer, o)


def context_of(longest: int, n_ctx_train: int) -> int:
    """Tokens of a window that has room for the longest row (`Lengths`): at least 128, at most the model's."""
    return min(max(LEAST_CONTEXT, -(-longest // 16) * 16), n_ctx_train)


def parsed_rows(rows: Rows, name: str = "rows") -> Iterator[DatasetRow]:
    """Rows given as objects, numbered from 1 in messages."""
    return of_one_format((parse_row(row, i, f"{name}: line {i}") for i, row in enumerate(rows, 1)), name)


def packed_rows(records: Iterable[DatasetRow], name: str, reader: Reader, o: TrainingConfig) -> PackedExamples:
    """Rows, tokenized and packed into samples of `o.n_ctx` tokens."""
    examples = (example for (example,) in reader.examples(records, name))
    return PackedExamples(examples, o.n_ctx, pack=o.pack, name=name)


def text_dataset(text: str, name: str, tokenizer: Tokenizer, o: TrainingConfig) -> Dataset:
    text = text.rstrip("\0")
    if not text:
        raise TrainingError(f"{name}: is empty")
    if o.sample_start is None:
        return StridedSamples(np.array(tokenizer.encode(text), np.int32), o.n_ctx, o.stride, name)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if bos is None or eos is None:
        raise TrainingError(f"{name}: --sample-start needs a vocabulary with BOS and EOS tokens")
    if not o.sample_start:
        ids = np.array(tokenizer.encode(text, add_special=False), np.int32)
        n = max(1, len(ids) - o.n_ctx + 1)
        begins = list(range(n))
        return TextSamples(ids, begins, [min(o.n_ctx, len(ids) - b) for b in begins], o.n_ctx, bos, eos, o)
    spans = find_samples(
        text,
        o.sample_start,
        o.n_ctx,
        include_start=o.include_sample_start,
        overlapping=o.overlapping_samples,
    )
    texts = [text[a:b] for a, b in spans]
    if tokenizer.add_space_prefix:  # it puts one in front of every sample
        texts = [part.removeprefix(" ") for part in texts]
    parts = [tokenizer.encode(part, add_special=False) for part in texts]
    sizes = [len(part) for part in parts]
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int).tolist()
    tokens = np.array([id for part in parts for id in part], np.int32)
    return TextSamples(tokens, begins, sizes, o.n_ctx, bos, eos, o)
