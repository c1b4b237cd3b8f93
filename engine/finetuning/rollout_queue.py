"""Rollout queue: the questions of one batch, the processes that answer them, and the answers.

It belongs to a job and may be a process of its own. It has answers in order of arrival; the job
puts them in the order of the questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from logitless.engine.finetuning.rollouts import Question
    from logitless.training.adapters.options import LoraOptions
    from logitless.training.policy.reinforcement import Answer
    from logitless.training.trainable import F32

BEAT = 1.0  # seconds between two calls of a waiting process
LOST = 5.0  # seconds without a call, after which a process counts as lost


@dataclass(frozen=True)
class RolloutBatch:
    """Description of a batch, beside its questions and the values of its adapter.

    `kind`: of the model and the devices; processes of another kind round otherwise."""

    name: str
    kind: str
    job: str
    lora: LoraOptions
    version: int  # of the adapter: its optimizer steps


@dataclass(frozen=True)
class News:
    """Result of `take`: questions by number, and the answers that are new to the process."""

    batch: RolloutBatch | None
    questions: Sequence[tuple[int, Question]] = ()
    answers: Sequence[tuple[int, Answer]] = ()


class QueueLost(Exception):
    """The queue has ended, or does not answer."""


class Queue(Protocol):
    """A queue as a process sees it. Only `take` and `values` wait for an answer; they raise QueueLost."""

    def post(self, batch: RolloutBatch, values: Mapping[str, F32], questions: Sequence[Question]) -> None: ...

    def withdraw(self, batch: str) -> None:
        """End a batch: its questions need no answers."""

    def take(self, process: str, kind: str, batch: str, n: int, n_known: int, seconds: float) -> News:
        """Up to `n` questions. Waits up to so many seconds for one, for another batch than the
        `batch` that the process knows, or for more than `n_known` answers (-1: none are asked for)."""

    def give(self, process: str, batch: str, number: int, answer: Answer) -> None: ...

    def put_back(self, process: str, batch: str, number: int) -> None: ...

    def values(self, batch: str) -> Mapping[str, F32] | None:
        """The adapter's values; None: the batch is over."""

    def close(self) -> None: ...


class Queues(Protocol):
    """Place where processes meet."""

    def open(self) -> Queue:
        """A queue for the job of this process. It may take a while before it answers."""

    def find(self) -> Queue | None:
        """The queue of another process; None: no job runs there."""


@dataclass
class RolloutQueue:
    """The state of a queue."""

    clock: Callable[[], float] = time.monotonic
    batch: RolloutBatch | None = None
    _values: Mapping[str, F32] = field(default_factory=dict)
    _questions: Sequence[Question] = ()
    _prompts: Sequence[bytes] = ()
    _holders: dict[int, str] = field(default_factory=dict)  # processes that answer, by number
    _begun: dict[bytes, str] = field(default_factory=dict)  # by prompt: first process that got it and has it cached
    _answers: dict[int, Answer] = field(default_factory=dict)  # in order of arrival
    _calls: dict[str, float] = field(default_factory=dict)  # time of the last call of each process

    def post(self, batch: RolloutBatch, values: Mapping[str, F32], questions: Sequence[Question]) -> None:
        self.batch, self._values, self._questions = batch, values, questions
        self._prompts = [question.prompt.tobytes() for question in questions]
        self._holders, self._begun, self._answers = {}, {}, {}

    def withdraw(self, batch: str) -> None:
        if self._is(batch):
            self.batch, self._values, self._questions = None, {}, ()
            self._answers = {}

    def has_news(self, process: str, kind: str, batch: str, n: int, n_known: int) -> bool:
        """True if `take` would return at once."""
        if not self._is(batch):
            return self.batch is not None or bool(batch)
        return bool(n and self._free(process, kind)) or 0 <= n_known < len(self._answers)

    def take(self, process: str, kind: str, batch: str, n: int, n_known: int) -> News:
        """See Queue.take. One process gets all questions of a prompt while others have prompts left,
        because its answers share the prompt's prefix."""
        self._calls[process] = self.clock()
        if not self._is(batch):
            return News(self.batch)
        taken = []
        for _ in range(n):
            if not (free := self._free(process, kind)):
                break
            number = min(free, key=lambda i: (self._distance(process, i), i))
            self._holders[number] = process
            self._begun.setdefault(self._prompts[number], process)
            taken.append((number, self._questions[number]))
        answers = list(self._answers.items())[n_known:] if n_known >= 0 else []
        return News(self.batch, taken, answers)

    def give(self, process: str, batch: str, number: int, answer: Answer) -> None:
        """Keep an answer. An answer that was sampled twice has the same bits both times."""
        self._calls[process] = self.clock()
        if self._is(batch):
            self._answers.setdefault(number, answer)

    def put_back(self, process: str, batch: str, number: int) -> None:
        if self._is(batch) and self._holders.get(number) == process:
            del self._holders[number]

    def values_of(self, batch: str) -> Mapping[str, F32] | None:
        """See Queue.values."""
        return self._values if self._is(batch) else None

    def _is(self, batch: str) -> bool:
        return self.batch is not None and self.batch.name == batch

    def _free(self, process: str, kind: str) -> list[int]:
        """Numbers of questions without an answer, of which no live process has taken any."""
        if self.batch is None or self.batch.kind != kind:
            return []
        oldest = self.clock() - LOST
        alive = {name for name, at in self._calls.items() if at >= oldest} | {process}
        numbers = range(len(self._questions))
        return [i for i in numbers if i not in self._answers and self._holders.get(i) not in alive]

    def _distance(self, process: str, number: int) -> int:
        begun = self._begun.get(self._prompts[number])
        return 0 if begun == process else 1 if begun is None else 2
