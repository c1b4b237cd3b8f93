"""Draft learner (draft-learn): trains a draft head on the texts of requests, in the gaps between steps.

An example is a token's last hidden state, which lies in a ring buffer on the device
(engine/runner/hidden_rows.py), and the tokens behind it. The model never runs for training."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from logitless.engine.sequence import Sequence
from logitless.engine.speculation.draft_vocabulary import DraftVocabulary
from logitless.engine.speculation.head_file import HeadFile
from logitless.graph.execution.preemptible_plan import PreemptiblePlan
from logitless.graph.ops.training.optimizer import adamw_params
from logitless.graph.tensor import Tensor
from logitless.models.drafters.draft_head import (
    PREFIX,
    SEED,
    TRAINING,
    DraftHead,
    HeadTraining,
    HeadValues,
    write_rows,
)

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.graph.execution.session import Measurement, Session

log = logging.getLogger("logitless.speculation")
SHARE = 0.05  # of the device's time beside running requests
MAX_DEPTH = 4  # draft tokens in a row that the head is trained on; longer drafts continue in the same way
N_BATCH = 32  # examples of an optimizer step; at most half of them are new
DECAY = 0.8  # weight of a draft token, relative to the one before
RATE = 1e-3
BETAS = (0.9, 0.99)
PASSES = 8.0  # steps that have an example, on average, while less than half of the first draft tokens are right
PUBLISH_STEPS = 8  # steps after which the head that drafts gets the trained values
MIN_ACCURACY = 0.3  # below it, after TRIAL_STEPS, the passes are divided by FEWER
TRIAL_STEPS, FEWER = 500, 8
RECENT = 0.1  # weight of a step in the recent accuracy
MIN_CHANGE = 0.1  # of the accuracy, for which `on_change` is called
SAVE_SECONDS = 120.0
ARENA = "learn"  # name of the plan's memory arena


class DraftLearner:
    """Examples and optimizer steps of one model's draft head; a time_sharing.Background.

    It belongs to the engine thread."""

    share = SHARE

    def __init__(self, engine: ModelRunner, file: HeadFile, depth: int) -> None:
        """`depth`: tokens of a draft at most."""
        assert engine.draft_head is not None
        assert engine.hidden is not None
        self._engine, self._hidden, self.file = engine, engine.hidden, file
        self._values: HeadValues = engine.draft_head
        self._depth = min(max(1, depth), MAX_DEPTH)
        self.vocabulary = DraftVocabulary(self._values.ids)
        self.on_change: Callable[[float], None] = lambda _: None  # called with the accuracy of the head that drafts
        self._last_accuracy = self._values.accuracy
        self._rng = np.random.default_rng(SEED)
        n = self._hidden.n_turns
        self._counters = np.full(n, -1, np.int64)  # of each row: the token that it was last an example of
        self._tokens = np.full((n, self._depth + 1), -1, np.int64)  # the token behind it, and those behind that
        self._fresh: deque[int] = deque(maxlen=n)  # row counters of examples that no step has had
        # by slot: the sequence's id, its first position without example, (position, counter) of incomplete examples
        self._open: dict[int, tuple[int, int, list[tuple[int, int]]]] = {}
        self._credit = 0.0  # examples that steps may take
        self._session: Session | None = None  # of the training variables
        self._training: HeadTraining | None = None
        self._plan: PreemptiblePlan | None = None
        self._measurement: Measurement | Exception | None = None
        self._preparer: threading.Thread | None = None
        self._parts: Iterator[float] | None = None  # the rest of a step
        self._failed = False  # on this session
        self._start_step = self._values.n_steps  # the step at which the moments were zero
        self._save_step, self._save_time = self._values.n_steps, time.monotonic()
        self._writer: threading.Thread | None = None

    @property
    def accuracy(self) -> float:
        """Share of first draft tokens in which the head is right, about."""
        return self._values.accuracy

    @property
    def n_steps(self) -> int:
        """Optimizer steps so far, those of the file included."""
        return self._values.n_steps

    # -- examples

    def collect(self, seq: Sequence) -> None:
        """Take the tokens of a sequence's last step as examples, without those that were rejected.

        Texts of requests with a `cache_salt` are not learnt."""
        if not self._is_current:
            self.start()
        if self._failed:
            return
        try:
            self._collect(seq)
        except Exception as error:
            self._stop(error)

    def _collect(self, seq: Sequence) -> None:
        span = self._hidden.last_span(seq)
        if span is None or seq.request.cache_salt or seq.slot is None:
            return
        offset, positions = span
        id, first, incomplete = self._open.get(seq.slot.id, (-1, 0, []))
        if id != seq.id:
            first, incomplete = 0, []
        first = max(first, positions.start)
        new = [(p, p + offset) for p in range(first, min(positions.stop, seq.n_computed))]
        tokens, n = seq.tokens, self._depth + 1
        if new:
            self._add_tokens(tokens[new[0][0] : new[-1][0] + 1])
            first = new[-1][0] + 1
        examples, incomplete = [*incomplete, *new], []
        for p, counter in examples:
            following = tokens[p + 1 : p + 1 + n]
            row = counter % len(self._counters)
            is_new = self._counters[row] != counter
            if is_new and p >= positions.start:
                self._counters[row], self._tokens[row] = counter, -1
                self._credit += self._passes()
            if self._counters[row] == counter:
                self._tokens[row, : len(following)] = following
                if len(following) == n:
                    self._fresh.append(counter)
                else:
                    incomplete.append((p, counter))
        self._open[seq.slot.id] = seq.id, first, incomplete
        if self._plan is None and self._preparer is None and len(self._fresh) >= N_BATCH:
            self._preparer = threading.Thread(target=self.prepare, name="draft-head", daemon=True)
            self._preparer.start()

    def _passes(self) -> float:
        """Steps for each new example: few where the head is right already, or has not become right."""
        accuracy = self._values.accuracy
        if accuracy < MIN_ACCURACY and self._values.n_steps - self._start_step >= TRIAL_STEPS:
            return PASSES / FEWER
        return PASSES * min(1.0, 2 * (1 - accuracy))

    def _add_tokens(self, ids: list[int]) -> None:
        """Give tokens of a text columns of the draft vocabulary."""
        if columns := self.vocabulary.use(ids):
            self._write_rows(columns)

    def _write_rows(self, columns: Iterable[int]) -> None:
        engine = self._engine
        write_rows(engine.session, engine.model, [(column, self.vocabulary[column]) for column in columns])

    # -- steps

    @property
    def ready(self) -> bool:
        can_begin = self._measurement is not None and self._credit >= N_BATCH
        return self._is_current and (can_begin or self._parts is not None)

    @property
    def pending(self) -> bool:
        """False: an idle server need not wait for it."""
        return False

    @property
    def _is_current(self) -> bool:
        """True if the device still has the hidden states and the training variables."""
        return self._session is self._engine.session

    def wait(self) -> None:
        """Wait for `prepare` on the other thread, if that runs."""
        if self._preparer is not None:
            self._preparer.join()

    def prepare(self) -> None:
        """Measure the step's plan and compile its kernels. On any thread."""
        session = self._session
        assert session is not None
        try:
            measured = next(iter(session.measure_all([self.nodes])))
            self._engine.prepare_kernels(measured[0].order)
            result: Measurement | Exception = measured
        except Exception as error:
            result = error
        if self._session is session:  # else the model sleeps, or has lost a device
            self._measurement = result

    def nodes(self) -> list[Tensor]:
        """Graph of an optimizer step."""
        hidden = self._engine.graph.hidden
        assert self._training is not None
        assert hidden is not None
        return self._training.nodes(self._engine.model, hidden, N_BATCH, self._depth)

    def run(self, seconds: float, waits: Callable[[], object]) -> None:
        """Run parts of steps for about so many seconds, or until a part ends while a request `waits`."""
        until = time.perf_counter() + seconds
        try:
            while self.ready:
                self._parts = self._parts or self._step()
                seconds_of_next = next(self._parts, None)
                if seconds_of_next is None:
                    self._parts = None
                if waits() or time.perf_counter() + (seconds_of_next or 0.0) > until:
                    return
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Learn no more on this session; requests go on."""
        log.warning("the draft head stops to learn: %s", " ".join(f"{type(error).__name__}: {error}".split()))
        self._parts, self._credit, self._measurement, self._failed = None, 0.0, None, True

    def _step(self) -> Iterator[float]:
        """Run an optimizer step, and publish where that is due; yields the expected seconds of each part before it."""
        if self._plan is None:
            if isinstance(self._measurement, Exception):
                raise self._measurement
            plan = self._engine.session.plan(self.nodes, ARENA, self._measurement)
            assert isinstance(plan, PreemptiblePlan)
            self._plan = plan
        values, (counters, n_fresh) = self._values, self._batch()
        self._credit = self._credit - N_BATCH if len(counters) else 0.0
        if not len(counters):
            return
        feeds, targets = self._feeds(counters)
        yield from self._plan.parts(feeds)
        best, *rest = self._plan.results([N_BATCH] * self._depth + [None] + [0] * len(values.params))
        values.n_steps += 1
        if n_fresh:
            right = float((best == targets)[:n_fresh].mean())
            values.accuracy += RECENT * (right - values.accuracy)
        if not np.isfinite(rest[self._depth - 1]):
            self._restart()
        elif values.n_steps % PUBLISH_STEPS == 0 or self._credit < N_BATCH:
            yield from self._publish()

    def _feeds(self, counters: npt.NDArray[np.int64]) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
        """Inputs of a step on these examples, and their first columns."""
        tokens = self._tokens[counters % len(self._counters)]
        weight = np.where(tokens[:, 1:] >= 0, DECAY ** np.arange(self._depth), 0.0)
        columns = np.array(self.vocabulary.columns(tokens[:, 1:].reshape(-1).tolist())).reshape(weight.shape)
        weight[columns < 0] = 0
        feeds = {
            "learn.rows": (1 + counters % len(self._counters)).astype(np.int32),
            "learn.tokens": np.maximum(tokens[:, :-1], 0).T.reshape(-1).astype(np.int32),
            "learn.targets": np.maximum(columns, 0).T.reshape(-1).astype(np.int32),
            "learn.weight": (weight / max(weight.sum(), 1e-9)).T.reshape(-1).astype(np.float32),
            "learn.optimizer": adamw_params(self._values.n_steps - self._start_step + 1, RATE, betas=BETAS),
        }
        return feeds, columns[:, 0]

    def _batch(self) -> tuple[npt.NDArray[np.int64], int]:
        """Examples of the next step by row counter, and the number of new ones, which come first."""
        oldest = self._hidden.oldest
        fresh: list[int] = []
        while self._fresh and len(fresh) < N_BATCH // 2:
            if (counter := self._fresh.popleft()) >= oldest:
                fresh.append(counter)
        valid = self._counters[(self._counters >= oldest) & (self._tokens[:, 1] >= 0)]
        if not len(valid):
            return valid, 0
        others = self._rng.choice(valid, N_BATCH - len(fresh))
        return np.concatenate([np.array(fresh, np.int64), others]), len(fresh)

    def _publish(self) -> Iterator[float]:
        """Give the head that drafts the values of the one that trains, if they are finite.

        They are read in parts, and written between two steps of requests."""
        session, params = self._engine.session, {}
        for name in self._values.params:
            params[name] = session.read(f"{PREFIX}.{name}{TRAINING}")
            yield 0.0
        if not all(np.isfinite(value).all() for value in params.values()):
            self._restart()
            return
        for name, value in params.items():
            session.write(f"{PREFIX}.{name}", value)
        self._values.params = params
        self._report()
        if time.monotonic() - self._save_time > SAVE_SECONDS:
            self.save()

    def _report(self) -> None:
        """Call `on_change` with the accuracy, if that has changed by MIN_CHANGE."""
        if abs(self._values.accuracy - self._last_accuracy) >= MIN_CHANGE:
            self._last_accuracy = self._values.accuracy
            self.on_change(self._last_accuracy)

    def _restart(self) -> None:
        """Continue from the values that draft, which are finite, with moments of zero."""
        session = self._engine.session
        for name, value in self._values.params.items():
            session.write(f"{PREFIX}.{name}{TRAINING}", value)
            for moment in self._training.moments[name] if self._training is not None else ():
                session.write(moment.name, np.zeros(moment.shape, np.float32))
        self._start_step = self._values.n_steps

    def start(self) -> None:
        """Define the training variables on the session, whose weights are loaded; forget all of another one."""
        self._session, head = self._engine.session, self._engine.graph.drafter
        assert isinstance(head, DraftHead)
        self._plan = self._measurement = self._parts = self._preparer = None
        self._failed, self._start_step = False, self._values.n_steps
        self.forget()
        try:
            self._training = HeadTraining.define(self._session, self._values, head)
            self._write_rows(range(len(self.vocabulary)))
        except Exception as error:
            self._stop(error)

    def forget(self) -> None:
        """Forget all examples, and the step that has begun."""
        self._parts = None
        self._counters[:] = -1
        self._fresh.clear()
        self._open.clear()
        self._credit = 0.0

    # -- the file

    def save(self, *, wait: bool = False) -> None:
        """Write the head's file, on a thread of its own, if it has learnt since the last time."""
        if self._writer is not None and wait:
            self._writer.join()
        if self._save_step == self._values.n_steps or (self._writer is not None and self._writer.is_alive()):
            return
        self._save_step, self._save_time = self._values.n_steps, time.monotonic()
        self._writer = threading.Thread(target=self._write, name="draft-head-file", daemon=True)
        self._writer.start()
        if wait:
            self._writer.join()

    def _write(self) -> None:
        """Write the values of the moment: 25 MB at an embedding length of 4,096, for which no request waits."""
        self.file.write(self.file.content())

    def close(self) -> None:
        """Save what was published. A step that has begun is lost."""
        self._parts = None
        self.save(wait=True)
