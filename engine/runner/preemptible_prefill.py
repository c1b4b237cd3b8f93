"""Preemptible prefill: a prefill-only step that yields to decode steps between its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

from logitless.engine.batch import APART, UBatch
from logitless.engine.runner.buckets import StepShape
from logitless.engine.runner.step_inputs import StepFeeds
from logitless.graph.execution.plan import Plan
from logitless.graph.execution.preemptible_plan import CUT_AFTER_WARMUP_RUNS, MAX_PART_SECONDS, PreemptiblePlan
from logitless.graph.execution.session import Build, Session
from logitless.graph.tensor import Tensor

ARENA = "prompt"  # name of the plans' memory arena
DEPTH = 2048  # context tokens of a warm-up run, so that attention takes as long as in usual prompts
STEPS = 5  # parts should take this fraction (1/STEPS) of a decode step
LEAST = 5e-5  # seconds of a part; a preemption costs a fifth of that
RUNS = 8  # decode steps that are timed
SHORT = 0.02  # seconds of a decode step, above which parts may be cut while requests run
BRISK = 0.001  # seconds of a decode step, below which the plan leaves a core to the event loop
FORGET = 0.5  # decay of a size's longest part with each run of a smaller size


class PrefillRunner(Protocol):
    """Steps of one model, as preemptible prefill needs them."""

    @property
    def session(self) -> Session: ...

    def build(self, shape: StepShape, /) -> list[Tensor]:
        """Graph of a step."""

    def before_step(self, batch: UBatch, /) -> None:
        """Write changed block tables and do pending block copies."""

    def feeds_of(self, plan: Plan, /) -> StepFeeds:
        """Input writer of a plan."""

    def run_alone(self) -> None:
        """Run an empty decode step of one sequence."""


class PreemptiblePrefill:
    """Preemptible plans of a model runner, by number of tokens.

    They are made while the engine is idle."""

    def __init__(self, engine: PrefillRunner, n_ubatch: int, n_ctx_slot: int) -> None:
        """`n_ubatch`: most tokens of a chunk; 0: the model or a device does not support preemption."""
        self._engine = engine
        self._depth = min(DEPTH, n_ctx_slot)
        self._plans: dict[int, PreemptiblePlan] = {}  # ready plans by number of tokens
        # seconds of a ready plan's longest part in its last run; 0: unknown
        self._longest: dict[int, float] = {}
        self._next: PreemptiblePlan | None = None  # plan that is being warmed up
        self._alone: list[float] = []  # seconds of decode steps of one sequence
        self._missing = [n for n in APART if n <= n_ubatch]

    def clear(self) -> None:
        """Drop all plans and make no more."""
        self._plans, self._longest, self._next, self._missing = {}, {}, None, []

    @property
    def builds(self) -> list[Build]:
        """Graphs of the plans that are not ready, in the order in which they will be made."""
        return [self._build(n) for n in self._missing]

    @property
    def sizes(self) -> Mapping[int, float]:
        """Number of tokens → seconds of the longest part, the largest size first."""
        return self._longest

    def prepare_ahead(self, request_waits: Callable[[], bool]) -> bool:
        """Make the next plan and run it until its parts are cut, or until `request_waits()`: a
        request waits.

        Returns False if there is no plan left to make."""
        if not self._missing:
            return False
        while len(self._alone) < RUNS and not (self._alone and self._alone[0] >= SHORT):
            if request_waits():
                return True
            began = time.perf_counter()
            self._engine.run_alone()
            self._alone.append(time.perf_counter() - began)
        alone = min(self._alone)
        self._next = plan = self._next or self._new_plan(self._missing[0], alone)
        while alone < SHORT and not (plan.is_fully_cut and plan.longest_part_seconds):
            for _ in plan.parts(None):
                if request_waits():
                    return True
        n = self._missing.pop(0)
        self._plans[n], self._longest[n], self._next = plan, 0.0, None
        return True

    def run(self, batch: UBatch) -> Iterator[float]:
        """Run a prefill batch without logits.

        Yields before each part: its expected seconds, 0 if unknown."""
        n = min(n for n in self._plans if n >= len(batch.tokens))
        plan = self._plans[n]
        self._engine.before_step(batch)
        self._engine.feeds_of(plan).write(batch)
        yield from plan.parts(None)
        self._longest[n] = plan.longest_part_seconds
        for larger in (m for m in self._longest if m > n):
            self._longest[larger] *= FORGET  # a size that was too slow is tried again

    def _new_plan(self, n: int, alone: float) -> PreemptiblePlan:
        """Plan for `n` tokens, with an empty batch after a long context.

        `alone`: seconds of a decode step."""
        plan = self._engine.session.plan(self._build(n), ARENA)
        assert isinstance(plan, PreemptiblePlan)
        plan.cut_after = CUT_AFTER_WARMUP_RUNS
        plan.max_part_seconds = min(MAX_PART_SECONDS, max(LEAST, alone / STEPS))
        plan.spare_core = alone < BRISK
        self._engine.feeds_of(plan).write(UBatch())
        if (pos := plan.input_buffers.get("pos")) is not None:
            pos[:] = self._depth - 1
        return plan

    def _build(self, n: int) -> Build:
        return partial(self._engine.build, StepShape(n, 0))
