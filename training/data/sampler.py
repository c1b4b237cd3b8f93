"""Sampler of training data: order of samples, shuffled each epoch, resumed exactly.

Its state is three numbers and the random generator's."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from logitless.training.data.packing import Dataset, Sample
from logitless.training.data.tokenize_rows import I32
from logitless.training.errors import TrainingError


def identity(name: str, begins: I32, sizes: I32) -> int:
    """64-bit hash of a dataset: the file's name, the number, starts and lengths of its samples."""
    h = hashlib.sha256(f"{name}\0{len(begins)}\0".encode())
    h.update(np.ascontiguousarray(begins, np.int32).tobytes())
    h.update(np.ascontiguousarray(sizes, np.int32).tobytes())
    return int.from_bytes(h.digest()[:8], "little")


def split(n: int, fraction: float, seed: int) -> tuple[I32, I32]:
    """Training and validation indices of n samples: shuffled once, the last `fraction` validates."""
    if not 0 <= fraction < 1:
        raise TrainingError(f"the validation split must be at least 0 and below 1, not {fraction} (--val-split)")
    order = np.random.default_rng([seed, 1]).permutation(n)
    n_val = round(n * fraction)
    if n_val >= n:
        raise TrainingError(f"a validation split of {fraction} leaves none of {n} samples to train on")
    return order[: n - n_val].astype(np.int32), np.sort(order[n - n_val :]).astype(np.int32)


def split_samples(dataset: Dataset, fraction: float, seed: int) -> tuple[I32, I32]:
    """Training and validation indices without shared tokens. Overlapping samples are not
    shuffled: the last windows of the text validate, and windows that overlap them are left out."""
    training, held_out = split(len(dataset), fraction, seed)
    begins, ends = dataset.begins, dataset.ends
    if not len(held_out) or (ends[:-1] <= begins[1:]).all():
        return training, held_out
    first, last = len(training), int((begins + dataset.sizes).max())
    n_apart = int((np.maximum.accumulate(ends) <= begins[first]).sum())
    held_out = np.arange(first, len(dataset), dtype=np.int32)
    held_out = held_out[ends[first:] <= last]  # drop samples that wrap around the end of the text
    if not n_apart or not len(held_out):
        raise TrainingError(
            f"a validation split of {fraction} of {len(dataset)} samples that overlap leaves none apart"
        )
    return np.arange(n_apart, dtype=np.int32), held_out


@dataclass
class _Order(ABC):
    """Endless order of a dataset's training part, reshuffled each epoch, or without `shuffle` as it
    is in the data. `state` and `restore`
    resume it elsewhere. Each epoch shuffles the original order, so it depends on the generator's
    state alone."""

    dataset: Any  # of samples or examples
    indices: I32  # into the dataset
    name: str  # of the file
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    next: int = 0  # position in this epoch's order
    _rng: np.random.Generator = field(init=False)
    _begun: dict[str, Any] = field(init=False)  # the generator's state before this epoch's shuffle
    _order: I32 = field(init=False)

    def __post_init__(self) -> None:
        if not len(self.indices):
            raise TrainingError(f"{self.name}: no sample is left to train on")
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, 2])))
        self._shuffle()

    def _shuffle(self) -> None:
        self._begun = dict(self._rng.bit_generator.state)
        # a split leaves the indices in random order
        self._order = self._rng.permutation(self.indices) if self.shuffle else np.sort(self.indices)

    def _end_epoch(self) -> None:
        """Begin the next epoch if this one is over."""
        if self.next == len(self._order):
            self.epoch, self.next = self.epoch + 1, 0
            self._shuffle()

    def __len__(self) -> int:
        return len(self.indices)

    @abstractmethod
    def n_batches(self, n_epochs: float, n: int) -> int:
        """Batches of n in so many epochs."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Samples or examples in the next batch of n."""

    @abstractmethod
    def take(self, n: int) -> list[Sample]:
        """Windows of the next batch of n."""

    @abstractmethod
    def validation(self, indices: I32) -> tuple[int, Iterator[Sample]]:
        """Number of windows that hold these samples or examples, and the windows, always the same."""

    @property
    def hash(self) -> int:
        return identity(self.name, self.dataset.begins[self.indices], self.dataset.sizes[self.indices])

    def state(self) -> dict[str, Any]:
        return {
            "samples_hash": self.hash,
            "rng_state": json.dumps(self._begun, separators=(",", ":")),
            "sample_count": len(self.indices),
            "next_sample": self.next,
            "epoch": self.epoch,
            "seed": self.seed,
        }

    def restore(self, state: dict[str, Any], *, force_reshuffle: bool = False) -> bool:
        """Resume at `state`. False, and a fresh order, if the samples are not the same."""
        if force_reshuffle or state["samples_hash"] != self.hash or state["sample_count"] != len(self.indices):
            self.epoch = int(state["epoch"])
            return False
        self._rng.bit_generator.state = json.loads(state["rng_state"])
        self._shuffle()
        self.epoch, self.next = int(state["epoch"]), int(state["next_sample"])
        return True


class Sampler(_Order):
    """Order of samples. A batch may span two epochs."""

    dataset: Dataset

    def n_batches(self, n_epochs: float, n: int) -> int:
        return math.ceil(n_epochs * len(self) / n)

    def size(self, n: int) -> int:
        return n

    def take(self, n: int) -> list[Sample]:
        return [self._take() for _ in range(n)]

    def _take(self) -> Sample:
        self._end_epoch()
        at = self.next
        self.next += 1
        return self.dataset.sample(int(self._order[at]), np.random.default_rng([self.seed, 3, self.epoch, at]))

    def validation(self, indices: I32) -> tuple[int, Iterator[Sample]]:
        rng = np.random.default_rng(0)
        return len(indices), (self.dataset.sample(int(i), rng) for i in indices)


class ExampleSampler(_Order):
    """Order of examples. A batch is packed into windows, and ends with its epoch."""

    def n_batches(self, n_epochs: float, n: int) -> int:
        whole, part = divmod(n_epochs, 1)
        return int(whole) * math.ceil(len(self) / n) + math.ceil(part * len(self) / n)

    def size(self, n: int) -> int:
        left = len(self) - self.next
        return min(n, left or len(self))

    def draw(self, n: int) -> I32:
        """Indices of the next batch of n."""
        self._end_epoch()
        drawn = self._order[self.next : self.next + n]
        self.next += len(drawn)
        return drawn

    def take(self, n: int) -> list[Sample]:
        return [self.dataset.window(pieces) for pieces in self.dataset.pack(self.draw(n))]

    def validation(self, indices: I32) -> tuple[int, Iterator[Sample]]:
        windows = self.dataset.pack(indices)
        return len(windows), map(self.dataset.window, windows)
