"""Shared rollouts: the answers of a reinforcement job, sampled by all processes that serve its model.

After each optimizer step the job posts its adapter and a batch of questions to a queue
(engine/finetuning/rollout_queue.py). Each process, the job's own included, takes questions as its
slots become free, and gives answers back. An answer's bits follow from the adapter, the prompt and
the seed, so it is the same whichever process samples it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from logitless.engine.finetuning.rollout_queue import BEAT, News, Queue, QueueLost, Queues, RolloutBatch
from logitless.engine.finetuning.rollouts import Question, Rollouts
from logitless.engine.runner.model_runner import ModelRunner
from logitless.graph.tensor import Tensor
from logitless.training.data.tokenize_rows import I32
from logitless.training.policy.reinforcement import Answer, Sampling
from logitless.training.trainable import F32, Trainable
from logitless.training.trainer import OffDeviceWork

log = logging.getLogger("logitless.tuning")


def kind_of(engine: ModelRunner) -> str:
    """Fingerprint of model and devices: processes with the same one sample the same bits."""
    devices = [(backend.name, backend.identity) for backend in engine.session.backends]
    return repr((engine.cache_kind, devices))


def values_of(trainable: Trainable) -> dict[str, F32]:
    """All values of an adapter, trained and frozen, by name."""
    frozen = {name: trainable.owner(partial(trainable.session.read, t.name)) for name, t in trainable.frozen}
    return trainable.read() | frozen


class Share:
    """A process's share of a batch, a rollouts.Work: the questions that it gets from the queue."""

    def __init__(self, process: str, queue: Queue, batch: RolloutBatch, changed: threading.Condition) -> None:
        """`changed`: guards the share, and is notified when it wants questions or gets some."""
        self.process, self.queue, self.batch, self._changed = process, queue, batch, changed
        self.waiting: deque[tuple[int, Question]] = deque()
        self.n_wanted = 0
        self.ended = False

    @property
    def over(self) -> bool:
        return self.ended

    def take(self, n_free: int) -> tuple[int, Question] | None:
        with self._changed:
            while len(self.waiting) > n_free:  # users have got the slots
                self.put_back(self.waiting.pop()[0])
            self.n_wanted = n_free - len(self.waiting)
            self._changed.notify_all()
            return self.waiting.popleft() if self.waiting else None

    def give(self, number: int, answer: Answer) -> None:
        self.queue.give(self.process, self.batch.name, number, answer)

    def put_back(self, number: int) -> None:
        self.queue.put_back(self.process, self.batch.name, number)

    def wait(self) -> OffDeviceWork:
        return OffDeviceWork(self._wait)

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self.over, BEAT)

    def receive(self, news: News) -> None:
        """Take up the questions that the queue gave, or the end of the batch."""
        with self._changed:
            if news.batch is None or news.batch.name != self.batch.name:
                self.ended = True
            self.waiting.extend(news.questions)
            self.n_wanted -= len(news.questions)
            self._changed.notify_all()


class _OwnShare(Share):
    """The share of the job's process. It ends with all answers, and samples the rest if the queue is lost."""

    def __init__(self, *args: Any, questions: Sequence[Question]) -> None:
        super().__init__(*args)
        self._questions, self._running = questions, set[int]()
        self.answers: dict[int, Answer] = {}
        self.n_received = self.n_own = 0  # answers from the queue; answers of this process
        self._alone = False

    @property
    def over(self) -> bool:
        return len(self.answers) == len(self._questions)

    def take(self, n_free: int) -> tuple[int, Question] | None:
        taken = super().take(n_free)
        if taken is None and self._alone:
            remaining = (i for i in range(len(self._questions)) if i not in self.answers and i not in self._running)
            taken = next(((i, self._questions[i]) for i in remaining), None)
        if taken is not None:
            self._running.add(taken[0])
        return taken

    def give(self, number: int, answer: Answer) -> None:
        self._running.discard(number)
        self.n_own += number not in self.answers
        self.answers.setdefault(number, answer)
        super().give(number, answer)

    def put_back(self, number: int) -> None:
        self._running.discard(number)
        super().put_back(number)

    def receive(self, news: News) -> None:
        if news.batch is not None and news.batch.name == self.batch.name:  # else the batch is not there yet
            self.n_received += len(news.answers)
            for number, answer in news.answers:
                self.answers.setdefault(number, answer)
            super().receive(news)

    def go_on_alone(self) -> None:
        """Answer all further questions here: the queue is lost."""
        with self._changed:
            self._alone = True
            self.waiting.clear()
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self.over or self._alone, BEAT)


class SharedRollouts:
    """Samples from the adapter in training with other processes. A training.policy.reinforcement.Policy.

    While there is no queue, this process answers all questions."""

    def __init__(self, own: Rollouts, trainable: Trainable, job: str, engine: ModelRunner, queues: Queues) -> None:
        self._own, self._trainable, self._job, self._kind, self._queues = own, trainable, job, kind_of(engine), queues
        self._process, self._n_posted = secrets.token_hex(8), 0
        self._version = -1  # of the last batch, and its values
        self._values: dict[str, F32] = {}
        self._changed = threading.Condition()
        self._queue: Queue | None = None  # one that answers
        self._share: _OwnShare | None = None
        self._closed = False
        self.n_answers = self.n_of_others = 0
        self._seconds = 0.0
        threading.Thread(target=self._listen, name="rollouts", daemon=True).start()

    @property
    def summary(self) -> str:
        """Answers so far, for the events of the run."""
        rate = f"{self.n_answers / self._seconds:.3g} a second" if self._seconds else "none"
        return f"{self.n_of_others} of {self.n_answers} answers were sampled by other replicas; {rate} in all"

    def graph(self, engine: ModelRunner) -> list[Tensor]:
        """See Rollouts.graph."""
        return self._own.graph(engine)

    def close(self) -> None:
        """Forget the model, and end the queue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._own.close()

    def sample(
        self, prompts: Sequence[I32], seeds: Sequence[int], max_tokens: Sequence[int], version: int
    ) -> Sampling[list[Answer]]:
        """An answer to each prompt, in slices. TrainingError: one cannot be sampled."""
        began = time.perf_counter()
        if (queue := self._queue) is None:
            answers = yield from self._own.sample(prompts, seeds, max_tokens, version)
        else:
            questions = [Question(*each) for each in zip(prompts, seeds, max_tokens, strict=True)]
            answers = yield from self._sampled(queue, questions, version)
        self.n_answers += len(answers)
        self._seconds += time.perf_counter() - began
        return answers

    def _sampled(self, queue: Queue, questions: Sequence[Question], version: int) -> Sampling[list[Answer]]:
        if version != self._version:
            self._version, self._values = version, values_of(self._trainable)
        self._n_posted += 1
        assert self._trainable.lora is not None
        name = f"{self._process}/{self._n_posted}"
        batch = RolloutBatch(name, self._kind, self._job, self._trainable.lora, version)
        share = _OwnShare(self._process, queue, batch, self._changed, questions=questions)
        queue.post(batch, self._values, questions)
        self._show(share)
        try:
            yield from self._own.answer(share, version)
        finally:
            self._show(None)
            queue.withdraw(name)
        self.n_of_others += len(questions) - share.n_own
        return [share.answers[i] for i in range(len(questions))]

    def _show(self, share: _OwnShare | None) -> None:
        with self._changed:
            self._share = share
            self._changed.notify_all()

    # -- the thread that talks to the queue

    def _listen(self) -> None:
        while not self._closed:
            queue = self._queues.open()
            try:
                queue.take(self._process, self._kind, "", 0, -1, 0.0)  # it answers
                self._queue = queue
                while (share := self._wanting()) is not None:
                    n = max(0, share.n_wanted)
                    wait = BEAT if n else 0.0
                    share.receive(queue.take(self._process, self._kind, share.batch.name, n, share.n_received, wait))
            except QueueLost as error:
                log.warning("%s: its answers are sampled by this process alone: %s", self._job, error)
                self._queue = None
                if (share := self._share) is not None:
                    share.go_on_alone()
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, BEAT)
            finally:
                queue.close()

    def _wanting(self) -> _OwnShare | None:
        """The share when it wants questions, or has not heard of the others for a while. None: closed."""
        with self._changed:
            while not self._closed:
                share = self._share
                if share is None or share.queue is not self._queue:
                    self._changed.wait()
                    continue
                self._changed.wait_for(partial(self._goes_on, share), BEAT)
                if self._share is share and not self._closed:
                    return share
        return None

    def _goes_on(self, share: _OwnShare) -> bool:
        return self._closed or self._share is not share or share.n_wanted > 0
