"""Steps with nothing but a stretch of one prompt, which others may interrupt: their plans can be left in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from logitless.engine.batch import APART, StepFailed, UBatch
from logitless.engine.runner.buckets import Shape
from logitless.graph.execution.preemptible_plan import CUT_AFTER_WARMUP_RUNS, MAX_PART_SECONDS, PreemptiblePlan
from logitless.graph.execution.session import Build

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import Engine

ARENA = "prompt"  # the name of their memory
DEPTH = 2048  # tokens before those of a run without a batch, whose attention is as long as that of many prompts
STEPS = 5  # parts of which a stream's step should take as long
LEAST = 5e-5  # seconds of a part: to leave and to go on costs a fifth of that
RUNS = 8  # of a stream's step, to know how long it takes
SHORT = 0.02  # seconds of it; beside longer ones a plan's parts may be made and cut in its first runs
BRISK = 0.001  # seconds of it; where it is less, a tick of the system's, for which the event loop may wait, is many
FORGET = 0.5  # of what is known of a size, with each run of a smaller one


class StepParts:
    """The plans of one engine, of which those that are ready can run; they are made while nobody waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plans: dict[int, PreemptiblePlan] = {}  # ready, by their tokens
        self._longest: dict[int, float] = {}  # seconds of their longest parts in their last runs; 0: not known yet
        self._next: PreemptiblePlan | None = None  # not ready
        self._alone: list[float] = []  # seconds that steps of one stream took
        able = engine.hparams.causal and engine.is_first and engine.hidden is None and engine.states is None
        able = able and all(backend.preemptible for backend in engine.session.backends)
        self._missing = [n for n in APART if n <= engine.options.n_ubatch] if able else []

    def clear(self) -> None:
        """No plan is ready, and none will be made."""
        self._plans, self._longest, self._next, self._missing = {}, {}, None, []

    @property
    def builds(self) -> list[Build]:
        """The graphs of plans that are not ready, in the order in which they will be made."""
        return [_build(self._engine, n) for n in self._missing]

    @property
    def sizes(self) -> Mapping[int, float]:
        """Tokens of a run, the most first, with the seconds of its longest part."""
        return self._longest

    def prepare_ahead(self, wanted: Callable[[], bool]) -> bool:
        """Make the next plan, and run it until its parts are cut, or somebody waits; False: there is none to make."""
        if not self._missing:
            return False
        while len(self._alone) < RUNS and not (self._alone and self._alone[0] >= SHORT):
            if wanted():
                return True
            began = time.perf_counter()
            self._engine.run_alone()
            self._alone.append(time.perf_counter() - began)
        alone = min(self._alone)
        self._next = plan = self._next or self._made(self._missing[0], alone)
        while alone < SHORT and not (plan.is_fully_cut and plan.longest_part_seconds):
            for _ in plan.parts(None):
                if wanted():
                    return True
        n = self._missing.pop(0)
        self._plans[n], self._longest[n], self._next = plan, 0.0, None
        return True

    def run(self, batch: UBatch) -> Iterator[float]:
        """Run a batch of which nothing is wanted but what it leaves in the cache. Stops before each part and tells how
        many seconds it will take, 0 where that is not known. StepFailed: the device cannot."""
        n = min(n for n in self._plans if n >= len(batch.tokens))
        plan = self._plans[n]
        try:
            self._engine.before_step(batch)
            self._engine.feeds_of(plan).write(batch)
            yield from plan.parts(None)
            self._longest[n] = plan.longest_part_seconds
            for larger in (m for m in self._longest if m > n):
                self._longest[larger] *= FORGET  # one that was too long, or only held up, is tried again before long
        except (MemoryError, OSError) as error:
            raise StepFailed(str(error) or type(error).__name__) from error

    def _made(self, n: int, alone: float) -> PreemptiblePlan:
        """A plan for n tokens, with nothing to do behind a long context; a stream's step takes `alone` seconds."""
        plan = self._engine.session.plan(_build(self._engine, n), ARENA)
        assert isinstance(plan, PreemptiblePlan)
        plan.cut_after = CUT_AFTER_WARMUP_RUNS
        plan.max_part_seconds = min(MAX_PART_SECONDS, max(LEAST, alone / STEPS))
        plan.spare_core = alone < BRISK
        self._engine.feeds_of(plan).write(UBatch())
        if (pos := plan.input_buffers.get("pos")) is not None:
            pos[:] = min(DEPTH, self._engine.n_ctx_slot) - 1
        return plan


def _build(engine: Engine, n: int) -> Build:
    return partial(engine.build, Shape(n, 0))
