"""Workers of data-parallel training as Ray actors, with vectors in Ray's object store."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from logitless.training.errors import TrainingError
from logitless.training.parallel.coordinator import Transport, WorkerLost
from logitless.training.parallel.worker import GradientWorker, Recipe
from logitless.training.trainable import F32


class ObjectStore:
    """Vectors in Ray's object store, which frees those that no process names any more."""

    def put(self, values: F32) -> Any:
        return ray.put(values)

    def get(self, ref: Any) -> F32:
        values: F32 = ray.get(ref)
        return values

    take = get

    def clear(self) -> None:
        pass


class _Worker:
    """Actor of one rank. It opens the model when it is first asked, so that an error has an answer."""

    def __init__(self, recipe: Recipe, rank: int, n_shards: int) -> None:
        self._open = recipe, rank, n_shards
        self._stack = ExitStack()
        self._worker: GradientWorker | None = None

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self._worker is None:
            recipe, *place = self._open
            self._worker = GradientWorker(self._stack.enter_context(recipe.steps()), ObjectStore(), *place)
        return getattr(self._worker, method)(*args)


class Actors(Transport):
    """Actors on the cluster that `ray.init` has connected."""

    def __init__(self, num_cpus: float, num_gpus: float) -> None:
        """`num_cpus`, `num_gpus`: what each actor reserves."""
        self.store = ObjectStore()
        self._options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": "SPREAD"}
        self._actors: dict[int, Any] = {}
        self._answers: dict[int, deque[Any]] = {}

    def start(self, rank: int, recipe: Recipe, n_shards: int) -> None:
        self._end(rank)
        self._actors[rank] = ray.remote(_Worker).options(**self._options).remote(recipe, rank, n_shards)
        self._answers[rank] = deque()

    def send(self, rank: int, method: str, *args: Any) -> None:
        self._answers[rank].append(self._actors[rank].call.remote(method, args))

    def receive(self, rank: int) -> Any:
        try:
            return ray.get(self._answers[rank].popleft())
        except (RayActorError, ObjectLostError) as error:
            raise WorkerLost(f"worker {rank} has ended ({type(error).__name__})") from None
        except RayTaskError as error:
            raise TrainingError(f"worker {rank}: {' '.join(str(error.cause).split())}") from None

    def _end(self, rank: int) -> None:
        if rank in self._actors:
            ray.kill(self._actors.pop(rank))

    def close(self) -> None:
        for rank in list(self._actors):
            self._end(rank)


def warn_of_room(n: int, num_cpus: float) -> None:
    """Warn where the cluster has fewer cores now than n actors reserve."""
    cores = ray.cluster_resources().get("CPU", 0)
    if n * num_cpus > cores:
        reason = f"{n} actors of {num_cpus:g} cores wait until the cluster has them; it has {cores:g}"
        print(f"logitless: warning: --workers {n + 1}: {reason}", file=sys.stderr)
