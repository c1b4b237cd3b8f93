"""Rollouts: answers sampled by a training run as requests of the scheduler.

They run on the weights that are being trained, which are not copied, in the time that training has
(engine/time_sharing.py): their steps have no rows of users, and they give up slots and KV blocks
for users. Answers to one prompt share its prefix."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from logitless.engine.errors import GaveWay, RequestError
from logitless.engine.requests import BATCH_PRIORITY, CompletionRequest, Failed, Finished, Token
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sequence import Sequence as Generation
from logitless.models.adapters.stacked_lora import Choice
from logitless.training.errors import TrainingError
from logitless.training.policy.reinforcement import Answer
from logitless.training.step import Slice, Slices

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.models.model import Model
    from logitless.training.data.tokenize_rows import I32

NOTHING_TO_DO = Slice(math.inf)  # users have all slots


class Rollouts:
    """Samples from a model whose weights change. A training.policy.reinforcement.Policy."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, model: Model, name: str) -> None:
        """`model`: its weights are variables of the runner's session. `name`: of the run."""
        self._scheduler, self._weight_sets, self._name = scheduler, runner.weight_sets, name
        self.handle = runner.weight_sets.lend(model)

    def close(self) -> None:
        """Forget the model; nothing samples from it any more."""
        self._weight_sets.recall(self.handle)

    def sample(
        self, prompts: Sequence[I32], seeds: Sequence[int], max_tokens: Sequence[int], version: int
    ) -> Slices[list[Answer]]:
        """An answer to each prompt, in slices. TrainingError: one cannot be sampled."""
        requests = [
            self._request(prompt, seed, most, version)
            for prompt, seed, most in zip(prompts, seeds, max_tokens, strict=True)
        ]
        waiting, running = deque(range(len(requests))), dict[Generation, int]()
        tokens: list[list[tuple[int, float]]] = [[] for _ in requests]
        n_done = 0
        try:
            while n_done < len(requests):
                while waiting and self._has_room:
                    i = waiting.popleft()
                    tokens[i] = []
                    running[self._submit(requests[i])] = i
                began = time.perf_counter()
                events = self._scheduler.step_background()
                for seq, event in events:
                    i = running.get(seq, -1)
                    if i < 0:
                        continue
                    if isinstance(event, Token):
                        assert event.prob is not None
                        tokens[i].append((event.id, event.prob.value))
                    elif isinstance(event, Finished):
                        del running[seq]
                        n_done += 1
                    elif isinstance(event, Failed):
                        del running[seq]
                        if event.code != GaveWay.code:  # else another request has its slot now
                            raise TrainingError(f"an answer could not be sampled: {event.message}")
                        waiting.appendleft(i)
                yield Slice(time.perf_counter() - began) if running else NOTHING_TO_DO
        finally:
            for seq in running:
                self._scheduler.cancel(seq)
        return [
            Answer(np.array([id for id, _ in own], np.int32), np.array([x for _, x in own], np.float32))
            for own in tokens
        ]

    @property
    def _has_room(self) -> bool:
        scheduler = self._scheduler
        return sum(not slot.is_processing for slot in scheduler.slots) > len(scheduler.queue)

    def _submit(self, request: CompletionRequest) -> Generation:
        try:
            return self._scheduler.submit(request, self._name, choice=Choice(self.handle))
        except RequestError as error:
            raise TrainingError(f"an answer could not be sampled: {error.message}") from None

    def _request(self, prompt: I32, seed: int, max_tokens: int, version: int) -> CompletionRequest:
        sampling = SamplingParams(samplers=("temperature",), temperature=1.0, seed=seed, n_probs=1)
        return CompletionRequest(
            tuple(prompt.tolist()),
            sampling,
            n_predict=max_tokens,
            cache_salt=f"{self._name}/{version}",  # prefixes of other weights are none of these
            priority=BATCH_PRIORITY + 1,
            background=True,
        )
