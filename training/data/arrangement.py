"""Data of a run: read, split into training and validation, shuffled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.training.config import TrainingConfig
from logitless.training.data.dataset_rows import DatasetRow
from logitless.training.data.load import (
    Reader,
    Rows,
    context_of,
    load_dataset,
    packed_rows,
    parsed_rows,
)
from logitless.training.data.packing import Groups, PackedExamples
from logitless.training.data.sampler import ExampleSampler, Sampler, split, split_samples
from logitless.training.data.sources import is_rows, rows_of
from logitless.training.data.tokenize_rows import I32
from logitless.training.errors import TrainingError

Data = str | Path | Rows


def rows_in(data: object) -> list[Mapping[str, Any]]:
    """The rows of a run that are no file; a string is a text. TrainingError: they are none."""
    if not isinstance(data, Iterable):
        raise TrainingError(f"data: expected a file or rows, got {type(data).__name__}")
    rows = [{"text": row} if isinstance(row, str) else row for row in data]
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TrainingError(f"data: row {i}: expected an object, got {type(row).__name__}")
    return rows


@dataclass(frozen=True)
class Arrangement:
    """Order of the samples or examples to train on, the indices that validate, the tokens of a
    window, the windows of a device run and the device runs of a step at most. `losses`: lines about
    what is not learned as it is."""

    order: Sampler | ExampleSampler
    validation: I32
    n_ctx: int
    n_batch: int
    grad_acc: int
    losses: tuple[str, ...] = ()


def context_for(data: Data, name: str, reader: Reader, n_ctx_train: int) -> int:
    """Tokens of a window that follows the data: the longest row's, at least 128 (also of a text),
    at most the model's. TrainingError names the line at fault."""
    rows = not isinstance(data, str | Path) or is_rows(data)
    return context_of(reader.lengths(_records(data, name), name).longest if rows else 0, n_ctx_train)


def arranged(
    data: Data,
    name: str,
    reader: Reader,
    o: TrainingConfig,
) -> Arrangement:
    """A run's data. Of supervised learning a step takes batch_size · grad_acc samples of ctx_size
    tokens, of another method so many examples, in windows as long as they need. TrainingError names
    the line at fault; `name` stands for the data in messages."""
    of_file = isinstance(data, str | Path)
    short = Path(str(data)).name if of_file else name
    if reader.objective is None:
        dataset = load_dataset(data, reader, o) if of_file else packed_rows(_records(data, name), name, reader, o)  # type: ignore[arg-type]
        training, held_out = split_samples(dataset, o.val_split, o.seed)
        losses = tuple(dataset.losses) if isinstance(dataset, PackedExamples) else ()
        order = Sampler(dataset, training, short, o.seed, o.shuffle)
        return Arrangement(order, held_out, o.n_ctx, o.batch_size, o.grad_acc, losses)
    if of_file and not is_rows(data):  # type: ignore[arg-type]
        raise TrainingError(f"{name}: is a text, and {reader.objective.NAME} needs rows, such as of a .jsonl file")
    groups = Groups(reader.examples(_records(data, name), name), o.n_ctx, name=name)
    training, held_out = split(len(groups), o.val_split, o.seed)
    laid, windows, runs = groups.lay(training, o.batch_size * o.grad_acc)
    examples = ExampleSampler(laid, training, short, o.seed, o.shuffle)
    return Arrangement(examples, held_out, laid.n_tokens, windows, runs, tuple(groups.losses))


def _records(data: Data, name: str) -> Iterator[DatasetRow]:
    return rows_of(data, name) if isinstance(data, str | Path) else parsed_rows(data, name)
