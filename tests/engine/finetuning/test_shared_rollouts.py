"""Shared rollouts: how a batch is divided, and the same answers with any help, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.async_llm import AsyncLLM
from logitless.engine.finetuning.rollout_helper import RolloutHelper
from logitless.engine.finetuning.rollout_queue import LOST, News, QueueLost, RolloutBatch, RolloutQueue
from logitless.engine.finetuning.rollouts import Question, Rollouts
from logitless.engine.finetuning.shared_rollouts import SharedRollouts
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from logitless.models.synthetic.model import ModelShape
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.policy.reinforcement import Answer
from logitless.training.scratch import new_model
from logitless.training.trainer import OffDeviceWork

# -- the queue

ANSWER = Answer(np.array([1], np.int32), np.array([-1.0], np.float32))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_of(clock: Clock, *prompts: int) -> RolloutQueue:
    """With a question for each; equal numbers are one prompt."""
    queue = RolloutQueue(clock)
    questions = [Question(np.array([1, prompt], np.int32), i, 4) for i, prompt in enumerate(prompts)]
    queue.post(RolloutBatch("b", "cpu", "job", LoraOptions(), 0), {}, questions)
    return queue


def taken(queue: RolloutQueue, process: str, n: int, kind: str = "cpu") -> list[int]:
    return [number for number, _ in queue.take(process, kind, "b", n, -1).questions]


def test_answers_to_one_prompt_are_of_one_process_while_others_have_work() -> None:
    queue = queue_of(Clock(), 7, 7, 7, 8, 8, 8)
    assert taken(queue, "a", 2) == [0, 1]
    assert taken(queue, "b", 2) == [3, 4]
    assert taken(queue, "a", 1) == [2]
    assert taken(queue, "a", 2) == [5]
    assert not queue.has_news("b", "cpu", "b", 1, -1)


def test_questions_of_a_silent_process_go_to_others() -> None:
    clock = Clock()
    queue = queue_of(clock, 7, 8, 9)
    assert taken(queue, "dead", 2) == [0, 1]
    assert taken(queue, "a", 3) == [2]
    queue.give("dead", "b", 0, ANSWER)
    clock.now = LOST
    assert taken(queue, "a", 3) == []
    clock.now += 0.1
    assert queue.has_news("a", "cpu", "b", 1, -1)
    assert taken(queue, "a", 3) == [1]


def test_a_question_is_put_back_by_its_process_alone() -> None:
    queue = queue_of(Clock(), 7, 8)
    assert taken(queue, "a", 1) == [0]
    queue.put_back("b", "b", 0)
    assert taken(queue, "b", 2) == [1]
    queue.put_back("a", "b", 0)
    assert taken(queue, "b", 2) == [0]


def test_other_kinds_and_other_batches_get_nothing() -> None:
    queue = queue_of(Clock(), 7, 8)
    assert taken(queue, "a", 2, kind="vulkan") == []
    assert queue.take("a", "cpu", "old", 2, -1).questions == ()
    queue.give("a", "old", 0, ANSWER)
    assert queue.take("a", "cpu", "b", 0, 0).answers == []
    queue.give("a", "b", 1, ANSWER)
    queue.give("c", "b", 1, ANSWER)
    assert queue.take("a", "cpu", "b", 0, 0).answers == [(1, ANSWER)]
    assert queue.take("a", "cpu", "b", 0, 1).answers == []
    queue.withdraw("b")
    assert queue.take("a", "cpu", "b", 2, -1) == News(None)


# -- processes


class Meeting:
    """A queue of this process, and Queues in which the job opens it and helpers find it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.state, self.changed = RolloutQueue(self.clock), threading.Condition()
        self.on_take: Callable[[str], int] = lambda process: 1 << 30  # most questions that it gets
        self.calls: dict[str, int] = {}
        self.given: dict[str, list[int]] = {}  # numbers by process
        self.closed = False

    def open(self) -> Meeting:
        return self

    def find(self) -> Meeting | None:
        return None if self.closed else self

    def _change(self, call: Callable[..., None], *args: Any) -> None:
        with self.changed:
            call(*args)
            self.changed.notify_all()

    def post(self, batch: RolloutBatch, values: Mapping[str, Any], questions: Sequence[Question]) -> None:
        self._change(self.state.post, batch, values, questions)

    def withdraw(self, batch: str) -> None:
        self._change(self.state.withdraw, batch)

    def take(self, process: str, kind: str, batch: str, n: int, n_known: int, seconds: float) -> News:
        with self.changed:
            if n:
                n = min(n, self.on_take(process))
            self.changed.wait_for(
                lambda: self.closed or self.state.has_news(process, kind, batch, n, n_known), min(seconds, 0.05)
            )
            if self.closed:
                raise QueueLost("it has ended")
            return self.state.take(process, kind, batch, n, n_known)

    def give(self, process: str, batch: str, number: int, answer: Answer) -> None:
        self.given.setdefault(process, []).append(number)
        self._change(self.state.give, process, batch, number, answer)

    def put_back(self, process: str, batch: str, number: int) -> None:
        self._change(self.state.put_back, process, batch, number)

    def values(self, batch: str) -> Mapping[str, Any] | None:
        with self.changed:
            return self.state.values_of(batch)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Job:
    """A process with an adapter in training, whose answers are known."""

    def __init__(self, path: Path, meeting: Meeting) -> None:
        model = open_model(path, ModelOptions(ctx_size=512, threads=1))
        self.runner = model.engine()
        self.runner.load()
        scheduler = model.scheduler(self.runner)
        self.trainable = lora(self.runner.session, self.runner.model, LoraOptions(4, seed=1), "run")
        self.set_adapter(0)
        self.own = Rollouts(scheduler, self.runner, self.trainable.model, "job")
        self.policy = SharedRollouts(self.own, self.trainable, "job", self.runner, meeting)
        self.prompts = [np.array([1, 70 + i // 4], np.int32) for i in range(16)]

    def set_adapter(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for name, p in zip(self.trainable.names, self.trainable.params, strict=True):
            if name.endswith("lora_b"):
                self.runner.session.write(p.name, rng.normal(0, 0.3, p.shape).astype(np.float32))

    def answers(self, policy: Any, version: int) -> list[tuple[bytes, bytes]]:
        events = policy.sample(self.prompts, range(16), [10 + i for i in range(16)], version)
        while True:
            try:
                if isinstance(event := next(events), OffDeviceWork):
                    event.outcome()
            except StopIteration as done:
                return [(a.tokens.tobytes(), a.log_probs.tobytes()) for a in done.value]

    def close(self) -> None:
        self.policy.close()
        self.runner.close()


class Helping:
    """A process beside it, whose engine thread only helps."""

    def __init__(self, path: Path, meeting: Meeting) -> None:
        model = open_model(path, ModelOptions(ctx_size=512, threads=1))
        self.runner = model.engine()
        self.runner.load()
        self.changed, self._ended = threading.Event(), False
        scheduler = model.scheduler(self.runner)
        self.helper = RolloutHelper(meeting, self.runner, scheduler, self.changed.set, lambda: True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            self.changed.clear()
            while self.helper.ready and not self._ended:
                self.helper.run(0.01)
            self.changed.wait(0.05)
        self.helper.close()
        self.runner.close()

    def close(self) -> None:
        self._ended = True
        self._thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    new_model(tmp_path / "m.gguf", None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=256), seed=3)
    return tmp_path / "m.gguf"


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


@pytest.fixture
def job(path: Path, meeting: Meeting) -> Iterator[Job]:
    result = Job(path, meeting)
    yield result
    result.close()


def connected(job: Job) -> SharedRollouts:
    with job.policy._changed:
        assert job.policy._changed.wait_for(lambda: job.policy._queue is not None, 60)
    return job.policy


def test_answers_are_the_same_with_a_helper_by_each_version(job: Job, path: Path, meeting: Meeting) -> None:
    policy, mine = connected(job), job.policy._process
    helping = Helping(path, meeting)

    def after_two_of_the_helper(process: str) -> int:
        others = sum(len(numbers) for of, numbers in meeting.given.items() if of != mine)
        return 1 << 30 if process != mine or others >= 2 else 0

    meeting.on_take = after_two_of_the_helper
    for version in range(3):
        job.set_adapter(version)
        alone = job.answers(job.own, version)
        assert len({*alone}) == 16
        meeting.given.clear()
        assert job.answers(policy, version) == alone
        assert sorted(number for numbers in meeting.given.values() for number in numbers) == [*range(16)]
    assert policy.n_of_others >= 6
    assert policy.summary.startswith(f"{policy.n_of_others} of 48 answers were sampled by other replicas; ")
    helping.close()


def test_questions_of_a_killed_helper_are_answered_by_the_job(job: Job, meeting: Meeting) -> None:
    policy = connected(job)

    def dies(process: str) -> int:
        if not meeting.clock.now:
            batch = meeting.state.batch
            assert batch is not None
            assert len(meeting.state.take("dead", batch.kind, batch.name, 5, -1).questions) == 5
            meeting.clock.now = LOST + 1
        return 1 << 30

    meeting.on_take = dies
    assert job.answers(policy, 0) == job.answers(job.own, 0)
    assert policy.n_of_others == 0


def test_a_lost_queue_leaves_the_rest_to_the_job(job: Job, meeting: Meeting) -> None:
    policy = connected(job)

    def breaks(process: str) -> int:
        meeting.closed = sum(map(len, meeting.given.values())) >= 3
        return 1

    meeting.on_take = breaks
    assert job.answers(policy, 0) == job.answers(job.own, 0)
    assert meeting.closed
    assert job.answers(policy, 1) == job.answers(job.own, 1)


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "all weights"])
async def test_a_job_tells_who_sampled(shared_data: Path, meeting: Meeting, full: bool) -> None:
    """All weights are not sent to others, and the process that runs jobs does not help itself."""
    llm = AsyncLLM(shared_data / "models" / "stories260K.gguf", threads=1, ctx_size=256)
    llm.share_jobs("m", meeting)
    grader = {
        "type": "string_check", "name": "a", "operation": "like", "input": "{{ sample.output_text }}", "reference": "a",
    }  # fmt: skip
    sizes: dict[str, Any] = {"n_samples": 2, "max_completion_tokens": 2, "n_epochs": 1, "batch_size": 4, "full": full}
    async with llm:
        rows = [{"prompt": f"Once {i}"} for i in range(8)]
        job = await llm.finetune(rows, method="reinforcement", grader=grader, **sizes)
        told = [event["message"] async for event in job.events()]
        assert job.status == "succeeded", told
    alone = "All weights are trained: one replica samples the answers"
    assert (alone in told) == full
    assert any(line.startswith("0 of 16 answers were sampled by other replicas; ") for line in told) != full
