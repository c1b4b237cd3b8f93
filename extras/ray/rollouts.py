"""Rollout queue of a reinforcement job as a Ray actor, for the replicas of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from logitless.engine.finetuning.rollout_queue import News, QueueLost, RolloutBatch, RolloutQueue

if TYPE_CHECKING:
    from logitless.engine.finetuning.rollouts import Question
    from logitless.training.policy.reinforcement import Answer
    from logitless.training.trainable import F32

NAMESPACE = "logitless"
PATIENCE = 30.0  # seconds that the actor has to start, and to answer


class _Actor:
    """The queue's own process. It ends with the one that opened it."""

    def __init__(self) -> None:
        self._queue = RolloutQueue()
        self._changed = asyncio.Event()

    async def take(self, process: str, kind: str, batch: str, n: int, n_known: int, seconds: float) -> News:
        try:
            async with asyncio.timeout(seconds):
                while not self._queue.has_news(process, kind, batch, n, n_known):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._queue.take(process, kind, batch, n, n_known)

    async def values(self, batch: str) -> Mapping[str, F32] | None:
        return self._queue.values_of(batch)

    async def change(self, method: str, args: tuple[Any, ...]) -> None:
        """`post`, `withdraw`, `give` or `put_back`."""
        getattr(self._queue, method)(*args)
        self._changed.set()
        self._changed = asyncio.Event()


class _Queue:
    """A rollout_queue.Queue."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def post(self, batch: RolloutBatch, values: Mapping[str, F32], questions: Sequence[Question]) -> None:
        self._actor.change.remote("post", (batch, values, questions))

    def withdraw(self, batch: str) -> None:
        self._actor.change.remote("withdraw", (batch,))

    def take(self, process: str, kind: str, batch: str, n: int, n_known: int, seconds: float) -> News:
        news: News = self._answer(self._actor.take.remote(process, kind, batch, n, n_known, seconds))
        return news

    def give(self, process: str, batch: str, number: int, answer: Answer) -> None:
        self._actor.change.remote("give", (process, batch, number, answer))

    def put_back(self, process: str, batch: str, number: int) -> None:
        self._actor.change.remote("put_back", (process, batch, number))

    def values(self, batch: str) -> Mapping[str, F32] | None:
        values: Mapping[str, F32] | None = self._answer(self._actor.values.remote(batch))
        return values

    def close(self) -> None:
        ray.kill(self._actor)

    @staticmethod
    def _answer(ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=PATIENCE)
        except GetTimeoutError:
            raise QueueLost(f"their queue has not answered for {PATIENCE:g} seconds") from None
        except RayError as error:
            raise QueueLost(f"their queue has ended ({type(error).__name__})") from None


class ActorQueues:
    """Queues by the name of a model, for its replicas. A rollout_queue.Queues."""

    def __init__(self, name: str) -> None:
        self._name = f"rollouts of {name}"

    def open(self) -> _Queue:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = {"name": self._name, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
        return _Queue(ray.remote(_Actor).options(**options, scheduling_strategy=here).remote())

    def find(self) -> _Queue | None:
        try:
            return _Queue(ray.get_actor(self._name, NAMESPACE))
        except ValueError:
            return None
