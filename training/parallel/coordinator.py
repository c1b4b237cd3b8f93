"""Coordinator of data-parallel training: hands out micro-batches, and has their gradients summed.

Rank 0 is the trainer's own process. Micro-batch i is of rank i modulo n, and every sum begins at 0
and goes from the first micro-batch to the last: the additions of one process that accumulates."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np

from logitless.training.errors import TrainingError
from logitless.training.parallel.worker import GradientStore, Recipe, flat, shards
from logitless.training.step import Arrays, Feeds, Slice, Slices, Steps

log = logging.getLogger("logitless.training")
MOST_LOSSES = 3  # of workers, before a step is done


class WorkerLost(Exception):
    """A worker's process has ended, or what it had is lost."""


class Transport(ABC):
    """Processes of the ranks from 1, each of which answers in the order in which it is asked, and a
    store that all of them reach."""

    store: GradientStore

    @abstractmethod
    def start(self, rank: int, recipe: Recipe, n_shards: int) -> None:
        """Start a rank's process, in place of one that has ended."""

    @abstractmethod
    def send(self, rank: int, method: str, *args: Any) -> None:
        """Ask for a method of GradientWorker. Raises WorkerLost."""

    @abstractmethod
    def receive(self, rank: int) -> Any:
        """Wait for the next answer. Raises WorkerLost, and TrainingError for an error of the method."""

    @abstractmethod
    def close(self) -> None:
        """End all processes."""


OpenTransport = Callable[[], Transport]


class DataParallel:
    """`Steps.workers` of a run with n processes."""

    def __init__(self, transport: Transport, recipe: Recipe, n: int) -> None:
        """Start the workers; they open the model while the trainer goes on. `n`: processes, this one included."""
        self._transport, self._recipe, self._n = transport, recipe, n
        self._n_shards = n if recipe.sharded else 1
        self._requests: list[deque[bool]] = [deque() for _ in range(n)]  # answers to come; True: somebody waits
        self._losses = 0
        for rank in range(1, n):
            self._start(rank)

    def gradients(self, steps: Steps, batches: Sequence[Callable[[], Feeds]]) -> Slices[tuple[list[Arrays], Arrays]]:
        """See Workers. A step that loses a worker is computed again, with another in its place."""
        while True:
            try:
                result = yield from self._attempt(steps, batches)
            except WorkerLost as error:
                self._replace(error)
            else:
                self._losses = 0
                return result

    def _attempt(self, steps: Steps, batches: Sequence[Callable[[], Feeds]]) -> Slices[tuple[list[Arrays], Arrays]]:
        store, n, params = self._transport.store, self._n, steps.trainable.params
        for rank in range(1, n):
            self._drain(rank)
        store.clear()
        parameters = store.put(flat([steps.trainable.session.read(p.name) for p in steps.trainable.state]))
        for rank in range(1, n):
            self._ask(rank, "begin", parameters, waits=False)
        rounds = [batches[i : i + n] for i in range(0, len(batches), n)]
        self._hand_out(rounds[0])
        total: Any = np.float32(0)
        outputs: list[Arrays] = []
        for i, part in enumerate(rounds):
            if i + 1 < len(rounds):
                self._hand_out(rounds[i + 1])
            own_outputs, gradient = yield from steps.gradient(part[0]())
            first, *others = shards(flat(gradient), self._n_shards)
            answers = [self._answer(rank) for rank in range(1, len(part))]
            outputs += [own_outputs, *(outputs for outputs, _ in answers)]
            total = total + first
            for _, refs in answers:
                total += store.take(refs[0])
            for owner, shard in enumerate(others, 1):
                self._ask(owner, "add", [store.put(shard), *(refs[owner] for _, refs in answers)], waits=False)
            yield Slice()
        owners = range(1, self._n_shards)
        for owner in owners:
            self._ask(owner, "total")
        whole = flat([total, *(store.take(self._answer(owner)) for owner in owners)])
        ends = [*accumulate(p.nbytes // 4 for p in params)]
        return outputs, np.split(whole, ends[:-1])

    def _hand_out(self, batches: Sequence[Callable[[], Feeds]]) -> None:
        for rank, feeds in enumerate(batches[1:], 1):
            self._ask(rank, "gradients", feeds())

    # -- messages

    def _start(self, rank: int) -> None:
        self._requests[rank].clear()
        self._transport.start(rank, self._recipe, self._n_shards)

    def _ask(self, rank: int, method: str, *args: Any, waits: bool = True) -> None:
        self._transport.send(rank, method, *args)
        self._requests[rank].append(waits)

    def _answer(self, rank: int) -> Any:
        """The next answer that somebody waits for."""
        while True:
            waits = self._requests[rank].popleft()
            answer = self._transport.receive(rank)
            if waits:
                return answer

    def _drain(self, rank: int) -> None:
        """Let go of what was asked in a step that did not end."""
        while self._requests[rank]:
            self._requests[rank].popleft()
            self._transport.receive(rank)

    def _replace(self, error: WorkerLost) -> None:
        """Start all ranks anew whose process has ended."""
        self._losses += 1
        if self._losses > MOST_LOSSES:
            raise TrainingError(f"{error}, {self._losses} times before a step was done") from None
        log.warning("%s; another one computes the step again", error)
        for rank in range(1, self._n):
            try:
                self._drain(rank)
                self._ask(rank, "ping")
                self._answer(rank)
            except WorkerLost:
                self._start(rank)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
