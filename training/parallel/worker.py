"""Worker of data-parallel training: gradients of micro-batches, and the sums of its shard of them.

A worker has no state that outlives a step: it gets the parameters at the step's begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import hparams_of
from logitless.training.config import TrainingConfig
from logitless.training.step import Arrays, Feeds, Steps, outcome
from logitless.training.trainable import F32, Trainable

Ref = Any  # names an array in a store; messages to other processes may have it


class GradientStore(Protocol):
    """Vectors of f32 that all processes of a run reach."""

    def put(self, values: F32) -> Ref: ...

    def get(self, ref: Ref) -> F32: ...

    def take(self, ref: Ref) -> F32:
        """The vector, which no process asks for again."""
        ...

    def clear(self) -> None:
        """Drop what this process put and nobody took."""
        ...


@dataclass(frozen=True)
class Recipe:
    """Recipe of a worker: its model and devices. Its functions are those of modules, so that other
    processes find them by name."""

    backends: Callable[[], Sequence[Backend]]
    model: Path
    trainable: Callable[[Session, GGUFFile, Hparams], Trainable]
    settings: TrainingConfig
    sharded: bool  # each rank sums a shard of the gradients; else rank 0 sums all

    @contextmanager
    def steps(self) -> Iterator[Steps]:
        """The step graphs of the run, on a session of their own."""
        with GGUFFile.open(self.model) as gguf, Session(self.backends()) as session:
            for backend in session.backends:
                backend.prefetch_training(())
            yield Steps(self.trainable(session, gguf, hparams_of(gguf)), self.settings)


def flat(arrays: Sequence[npt.NDArray[Any]]) -> F32:
    """Arrays one after another."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def shards(values: F32, n: int) -> list[F32]:
    """`n` parts of a vector, as equal as can be."""
    return np.array_split(values, n)


class GradientWorker:
    """Work of one rank from 1. Its public methods are what the coordinator asks for."""

    def __init__(self, steps: Steps, store: GradientStore, rank: int, n_shards: int) -> None:
        self._steps, self._store, self._n_shards = steps, store, n_shards
        own = rank if rank < n_shards else 0
        self._total = np.zeros_like(shards(np.zeros(steps.trainable.n_params, np.float32), n_shards)[own])

    def begin(self, parameters: Ref) -> None:
        """Begin a step, or begin it again."""
        self._store.clear()
        self._total[:] = 0
        values, at = self._store.get(parameters), 0
        for p in self._steps.trainable.state:
            n = p.nbytes // 4
            self._steps.trainable.session.write(p.name, values[at : at + n])
            at += n

    def gradients(self, feeds: Feeds) -> tuple[Arrays, list[Ref]]:
        """Outputs of a micro-batch, and its gradient in shards."""
        outputs, gradients = outcome(self._steps.gradient(feeds))
        return outputs, [self._store.put(shard) for shard in shards(flat(gradients), self._n_shards)]

    def add(self, refs: Sequence[Ref]) -> None:
        """Add this rank's shard of micro-batches, in their order."""
        for ref in refs:
            self._total += self._store.take(ref)

    def total(self) -> Ref:
        """The sum of this rank's shard."""
        return self._store.put(self._total)

    def ping(self) -> None:
        """Nothing: the answer says that the worker lives."""
