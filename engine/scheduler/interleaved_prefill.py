"""Interleaved prefill: prompts computed between decode steps, in parts that decode steps preempt.

Where even the smallest step with both would make streams stutter (a long context, a small model),
prompts get steps of their own. Such a step stops as soon as the streams have waited long enough,
and goes on after their next tokens. It is as large as is fast, however little of it fits between
two tokens. Smaller chunks, which are usual elsewhere (Sarathi, arXiv 2308.16369), would read the
prompt's context and the weights anew for each chunk."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import numpy as np

from logitless.engine.batch import DeviceFailed, StepResult
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.requests import Event
from logitless.engine.scheduler.batch_builder import Plan, build_batch
from logitless.engine.scheduler.runner import Runner
from logitless.engine.scheduler.running_set import RunningSet
from logitless.engine.scheduler.step_budget import PrefillBudget
from logitless.engine.sequence import Sequence
from logitless.engine.stats import SchedulerStats
from logitless.models.adapters.stacked_lora import BASE

RETRY = 32  # steps after which a prompt that begins has a step with the streams tried again
log = logging.getLogger("logitless.scheduler")

Events = list[tuple[Sequence, Event]]


class InterleavedPrefill:
    """Runs at most one preemptible prefill chunk; its tokens count as computed only when it finishes."""

    def __init__(
        self,
        runner: Runner,
        kv: KVCacheManager,
        budget: PrefillBudget,
        running: RunningSet,
        stats: SchedulerStats,
        clock: Callable[[], float],
        process: Callable[[Plan, StepResult, float, Events], None],
    ) -> None:
        """`process`: hands out the result of a finished chunk."""
        self._runner = runner
        self._kv = kv
        self._budget = budget
        self._running = running
        self._stats = stats
        self._clock = clock
        self._process = process
        self.seq: Sequence | None = None  # sequence whose chunk is being computed
        self.n = 0  # tokens of the chunk
        self._parts: Iterator[float] = iter(())
        self._active = False
        self._next_seconds = 0.0  # seconds that the next part will take; 0: unknown
        # seconds of the last chunk before its first part: finding blocks, writing inputs
        self._first_seconds = 0.0
        self._tried = 0  # step in which a prompt that began last had a step with the streams tried

    def takes(self, seq: Sequence) -> bool:
        """True if this sequence's prompt is computed here for now, all but its last token."""
        return seq is self.seq or (self._active and self._may_take(seq))

    def starts(self, seq: Sequence) -> None:
        """Note that a prompt begins: its context is short as yet, so a mixed step may be fast, and is better then."""
        step = self._running.step
        seq.served = step - 1  # behind prompts that wait since earlier steps
        if step - self._tried >= RETRY:
            self._budget.crowded, self._tried = False, step

    def turn(self, events: Events) -> bool:
        """Compute parts while the streams may wait; False if there was nothing to do. Raises DeviceFailed."""
        budget, seqs = self._budget, self._running.of_step(background=False)
        if self.seq is None and not budget.crowded:
            self._active = False
            return False
        streams = [seq for seq in seqs if seq.started and seq.n_schedulable <= 1]
        if not any(seq.started and seq.n_schedulable > 1 for seq in seqs):
            budget.crowded = False
        is_decoding = any(seq.is_decoding for seq in streams)
        self._active = is_decoding and budget.crowded and bool(self._runner.part_sizes)
        seconds = budget.room(len(streams)) if is_decoding else math.inf
        until = self._clock() + seconds
        ran = False
        try:
            while not ran or self._clock() + self._seconds_needed() <= until:
                if self.seq is not None:
                    self._continue(events)
                elif not self._begin(seconds):
                    break
                ran = True
        except DeviceFailed:
            raise
        except Exception as error:
            self._failed(error)
        return ran

    def forget(self, seq: Sequence) -> None:
        """Abandon the sequence's chunk: it gives up its blocks, which must not be written any more."""
        if seq is self.seq:
            self._drop()

    def _seconds_needed(self) -> float:
        return self._first_seconds if self.seq is None else self._next_seconds

    def _may_take(self, seq: Sequence) -> bool:
        """True for prompts; a stream with a few tokens to compute that were not sampled is none."""
        if seq.request.media is not None or seq.request.is_batch:  # steps with other inputs; rows beside streams
            return False
        if seq.not_preemptible or not seq.throttled or seq.choice != BASE or seq.request.prompt_logprobs is not None:
            return False
        return seq.started and seq.n_schedulable > 1 and (seq.resumed or not seq.n_generated)

    def _begin(self, seconds: float) -> bool:
        """Begin a chunk of the prompt whose turn is longest ago, with parts for turns of so many
        seconds.

        False: there is no prompt, or none for which there are blocks."""
        began = self._clock()
        prompts = [seq for seq in self._running.seqs if self._may_take(seq)] if self._active else []
        for seq in sorted(prompts, key=lambda seq: seq.served):
            n = self._size(seq.n_schedulable - 1, seconds)
            n = dict(self._running.reserve([(seq, n)])).get(seq, 0)
            if n:
                seq.served = self._running.step
                self.seq, self.n = seq, n
                if self._kv.auxiliary is not None:
                    self._kv.auxiliary.prepare([(seq, n)])
                self._parts = self._runner.run_in_parts(build_batch([(seq, n)], self._runner.hidden))
                self._next_seconds = next(self._parts)
                self._first_seconds = self._clock() - began
                return True
        return False

    def _size(self, n_uncomputed: int, seconds: float) -> int:
        """Tokens of the next chunk: the largest whose parts fit, and no larger than needed."""
        sizes = self._runner.part_sizes
        fitting = [n for n, longest in sizes.items() if longest <= seconds] or [min(sizes)]
        return min(n_uncomputed, min((n for n in fitting if n >= n_uncomputed), default=max(fitting)))

    def _continue(self, events: Events) -> None:
        """Compute the next part of the chunk."""
        seq = self.seq
        assert seq is not None
        next_seconds = next(self._parts, None)
        if next_seconds is not None:
            self._next_seconds = next_seconds
            return
        self.seq = None
        self._process([(seq, self.n)], StepResult(np.zeros(0, np.uint32)), self._clock(), events)

    def _drop(self) -> None:
        """Abandon the chunk: its tokens stay uncomputed."""
        seq, self.seq, self._parts = self.seq, None, iter(())
        if seq is not None and self._kv.auxiliary is not None:
            self._kv.auxiliary.undo([(seq, self.n)])

    def _failed(self, error: Exception) -> None:
        """Have the same tokens computed by an ordinary step, which finds the faulty request."""
        log.warning("a preemptible prefill chunk failed: %s: %s", type(error).__name__, error)
        self._stats.n_failed_steps += 1
        if self.seq is not None:
            self.seq.not_preemptible = True
        else:
            self._budget.crowded = self._active = False
        self._drop()
