"""Loading training files: a text or JSONL rows become datasets by the model's vocabulary and chat
template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from logitless.models.chat.template import ChatTemplate
from logitless.models.tokenizer import Tokenizer
from logitless.training.data.dataset_rows import DatasetRow, parse_row, read_rows
from logitless.training.data.packing import (
    Dataset,
    Examples,
    PackedExamples,
    SampleOptions,
    StridedSamples,
    TextSamples,
    find_samples,
)
from logitless.training.data.tokenize_rows import I32, examples_of
from logitless.training.errors import TrainingError

LEAST_CONTEXT = 128  # tokens of a window that follows the data


@dataclass(frozen=True)
class DataOptions:
    """Splitting of a file into samples of `n_ctx` tokens. `sample_start` None: one every
    `stride` tokens (0: n_ctx/2)."""

    n_ctx: int = 128
    stride: int = 0
    pack: bool = True
    sample_start: str | None = None  # "": a sample begins at every token
    include_sample_start: bool = False
    overlapping_samples: bool = False
    samples: SampleOptions = field(default_factory=SampleOptions)


def load_dataset(path: str | Path, tokenizer: Tokenizer, template: ChatTemplate | None, o: DataOptions) -> Dataset:
    """Samples of a file: rows of .jsonl files, else one text. TrainingError names what is wrong."""
    path = Path(path)
    if is_rows(path):
        return jsonl_dataset(path, str(path), tokenizer, template, o)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path}: byte {error.start} is not UTF-8") from None
    return text_dataset(text, str(path), tokenizer, o)


def jsonl_dataset(
    path: Path, name: str, tokenizer: Tokenizer, template: ChatTemplate | None, o: DataOptions
) -> PackedExamples:
    """Packed samples of a JSONL file, read line by line; `name` stands for it in messages."""
    with path.open("rb") as file:
        return packed_rows(read_rows(file, name), name, tokenizer, template, o)


def is_rows(path: str | Path) -> bool:
    """True if the name is that of a file of JSONL rows."""
    return Path(path).suffix.lower() in (".jsonl", ".ndjson")


def context_of(longest: int, n_ctx_train: int) -> int:
    """Tokens of a window that has room for the longest of `row_lengths`: at least 128, at most the
    model's."""
    return min(max(LEAST_CONTEXT, -(-longest // 16) * 16), n_ctx_train)


def jsonl_examples(path: Path, name: str, tokenizer: Tokenizer, template: ChatTemplate | None, n_ctx: int) -> Examples:
    """Examples of a JSONL file, to be packed batch by batch; errors as `jsonl_dataset`."""
    with path.open("rb") as file:
        return Examples(examples_of(read_rows(file, name), tokenizer, template, name), n_ctx, name=name)


def row_lengths(path: Path, name: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> I32:
    """Tokens of each example of a JSONL file that has one to learn, without the last, which is a
    label alone; errors as `jsonl_dataset`."""
    with path.open("rb") as file:
        examples = examples_of(read_rows(file, name), tokenizer, template, name)
        return np.array([len(example.tokens) - 1 for example in examples if example.learn[1:].any()], np.int32)


def rows_dataset(
    rows: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, template: ChatTemplate | None, o: DataOptions
) -> PackedExamples:
    """Packed samples of rows given as objects, numbered from 1 in messages."""
    name = "rows"
    records = (parse_row(row, i, f"{name}: line {i}") for i, row in enumerate(rows, 1))
    return packed_rows(records, name, tokenizer, template, o)


def packed_rows(
    records: Iterable[DatasetRow], name: str, tokenizer: Tokenizer, template: ChatTemplate | None, o: DataOptions
) -> PackedExamples:
    """Rows, tokenized and packed into samples of `o.n_ctx` tokens."""
    return PackedExamples(examples_of(records, tokenizer, template, name), o.n_ctx, pack=o.pack, name=name)


def text_dataset(text: str, name: str, tokenizer: Tokenizer, o: DataOptions) -> Dataset:
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
        return TextSamples(ids, begins, [min(o.n_ctx, len(ids) - b) for b in begins], o.n_ctx, bos, eos, o.samples)
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
    return TextSamples(tokens, begins, sizes, o.n_ctx, bos, eos, o.samples)
