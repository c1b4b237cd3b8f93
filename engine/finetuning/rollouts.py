"""Rollouts: answers sampled by a training run as requests of the scheduler.

They run on the weights that are being trained, which are not copied, in the time that training has
(engine/time_sharing.py): their steps have no rows of users, and they give up slots and KV blocks
for users. Answers to one prompt share its prefix."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from logitless.engine.errors import GaveWay, RequestError
from logitless.engine.requests import BATCH_PRIORITY, CompletionRequest, Failed, Finished, Token
from logitless.engine.runner.buckets import StepShape
from logitless.engine.runner.model_runner import ModelRunner
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler
from logitless.engine.sequence import Sequence as Generation
from logitless.graph.tensor import Tensor
from logitless.models.adapters.stacked_lora import AdapterChoice
from logitless.models.model import Model
from logitless.training.data.tokenize_rows import I32
from logitless.training.errors import TrainingError
from logitless.training.policy.reinforcement import Answer, Sampling
from logitless.training.step import Slice
from logitless.training.trainer import OffDeviceWork

NOTHING_TO_DO = Slice(math.inf)  # users have all slots


@dataclass(frozen=True)
class Question:
    """A prompt with the seed and the maximum length of its answer."""

    prompt: I32
    seed: int
    max_tokens: int


class Work(Protocol):
    """Questions that the slots of this process answer, each with a number."""

    @property
    def over(self) -> bool:
        """True if no further answer is needed, running ones included."""

    def take(self, n_free: int) -> tuple[int, Question] | None:
        """The next question; None: there is none now. `n_free`: slots without a request; 0: users
        have the others, and no question is taken."""

    def give(self, number: int, answer: Answer) -> None: ...

    def put_back(self, number: int) -> None:
        """Return a question: a user's request has its slot."""

    def wait(self) -> Slice | OffDeviceWork:
        """The event to yield while there is neither a question nor a running answer."""


class OwnWork:
    """Questions that this process alone answers."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions
        self._waiting = deque(range(len(questions)))
        self.answers: dict[int, Answer] = {}

    @property
    def over(self) -> bool:
        return len(self.answers) == len(self._questions)

    def take(self, n_free: int) -> tuple[int, Question] | None:
        if not n_free or not self._waiting:
            return None
        number = self._waiting.popleft()
        return number, self._questions[number]

    def give(self, number: int, answer: Answer) -> None:
        self.answers[number] = answer

    def put_back(self, number: int) -> None:
        self._waiting.appendleft(number)

    def wait(self) -> Slice:
        return NOTHING_TO_DO


class Rollouts:
    """Samples from a model whose weights change. A training.policy.reinforcement.Policy."""

    summary = ""  # of a run, for its events

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, model: Model, name: str) -> None:
        """`model`: its weights are variables of the runner's session. `name`: of the run."""
        self._scheduler, self._weight_sets, self._name = scheduler, runner.weight_sets, name
        self._handle = runner.weight_sets.lend(model)

    def graph(self, engine: ModelRunner) -> list[Tensor]:
        """The graph of a step that samples."""
        return engine.build(StepShape(engine.options.n_ubatch, 64, n_top=2, weights=self._handle))

    def close(self) -> None:
        """Forget the model; nothing samples from it any more."""
        self._weight_sets.recall(self._handle)

    def sample(
        self, prompts: Sequence[I32], seeds: Sequence[int], max_tokens: Sequence[int], version: int
    ) -> Sampling[list[Answer]]:
        """An answer to each prompt, in slices. TrainingError: one cannot be sampled."""
        work = OwnWork([Question(*each) for each in zip(prompts, seeds, max_tokens, strict=True)])
        yield from self.answer(work, version)
        return [answer for _, answer in sorted(work.answers.items())]

    def answer(self, work: Work, version: int) -> Generator[Slice | OffDeviceWork, None, None]:
        """Sample until the work is over. TrainingError: an answer cannot be sampled."""
        running: dict[Generation, tuple[int, list[tuple[int, float]]]] = {}
        try:
            while not work.over:
                while (taken := work.take(n_free := self._n_free)) is not None:
                    number, question = taken
                    running[self._submit(question, version)] = number, []
                if not running:
                    yield work.wait() if n_free else NOTHING_TO_DO
                    continue
                began = time.perf_counter()
                for seq, event in self._scheduler.step_background():
                    if seq not in running:
                        continue
                    number, tokens = running[seq]
                    if isinstance(event, Token):
                        assert event.prob is not None
                        tokens.append((event.id, event.prob.value))
                    elif isinstance(event, Finished):
                        del running[seq]
                        ids, log_probs = zip(*tokens, strict=True) if tokens else ((), ())
                        work.give(number, Answer(np.array(ids, np.int32), np.array(log_probs, np.float32)))
                    elif isinstance(event, Failed):
                        del running[seq]
                        if event.code != GaveWay.code:  # else another request has its slot now
                            raise TrainingError(f"an answer could not be sampled: {event.message}")
                        work.put_back(number)
                yield Slice(time.perf_counter() - began)
        finally:
            for seq in running:
                self._scheduler.cancel(seq)

    @property
    def _n_free(self) -> int:
        scheduler = self._scheduler
        return max(0, sum(not slot.is_processing for slot in scheduler.slots) - len(scheduler.queue))

    def _submit(self, question: Question, version: int) -> Generation:
        sampling = SamplingParams(samplers=("temperature",), temperature=1.0, seed=question.seed, n_probs=1)
        request = CompletionRequest(
            tuple(question.prompt.tolist()),
            sampling,
            n_predict=question.max_tokens,
            cache_salt=f"{self._name}/{version}",  # prefixes of other weights are none of these
            priority=BATCH_PRIORITY + 1,
            background=True,
        )
        try:
            return self._scheduler.submit(request, self._name, choice=AdapterChoice(self._handle))
        except RequestError as error:
            raise TrainingError(f"an answer could not be sampled: {error.message}") from None
