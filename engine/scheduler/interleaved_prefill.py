"""Prompts between the steps of streams.

Where even the smallest step with both would make streams stutter (a long context, a small model), prompts get steps of
their own, which stop as soon as the streams have waited long enough and go on after their next tokens. Such a step is
as large as is fast, however little of it fits between two tokens: what is usual elsewhere, smaller chunks of prompts
(Sarathi, arXiv 2308.16369), reads the prompt's context and the weights anew for each of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from logitless.engine.batch import DeviceFailed, StepResult
from logitless.engine.scheduler.batch_builder import fill
from logitless.engine.sequence import Sequence
from logitless.models.adapters.adapter_bank import BASE

if TYPE_CHECKING:
    from logitless.engine.scheduler.scheduler import Events, Scheduler

RETRY = 32  # steps after which a prompt that begins has a step with the streams tried again
log = logging.getLogger("logitless.scheduler")


class Interleaver:
    """At most one step of one prompt is under way, and its sequence owes what it pays until it has come to its end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.seq: Sequence | None = None  # whose step is under way
        self.n = 0  # its tokens
        self._run: Iterator[float] = iter(())
        self._active = False
        self._following = 0.0  # seconds that its next part will take; 0: not known
        self._beginning = 0.0  # seconds that the last step took until its first part: to find pages, to write feeds
        self._tried = 0  # the step of the scheduler when a prompt that began last had a step with the streams tried

    def takes(self, seq: Sequence) -> bool:
        """Whether this sequence's tokens are paid here for now, all but the last one."""
        return seq is self.seq or (self._active and self._may_take(seq))

    def starts(self, seq: Sequence) -> None:
        """A prompt begins: its context is short as yet, so a step with the streams may be fine, and is better then."""
        scheduler = self._scheduler
        seq.served = scheduler.n_steps - 1  # behind whoever waits since earlier steps
        if scheduler.n_steps - self._tried >= RETRY:
            scheduler.pace.crowded, self._tried = False, scheduler.n_steps

    def turn(self, events: Events) -> bool:
        """Go on while the streams may wait; whether there was anything to do."""
        scheduler, pace = self._scheduler, self._scheduler.pace
        if self.seq is None and not pace.crowded:
            self._active = False
            return False
        streams = [seq for seq in scheduler.running if seq.started and scheduler.debt(seq) <= 1]
        if not any(seq.started and scheduler.debt(seq) > 1 for seq in scheduler.running):
            pace.crowded = False
        flow = any(seq.flows for seq in streams)
        self._active = flow and pace.crowded and bool(scheduler.engine.part_sizes)
        room = pace.room(len(streams)) if flow else math.inf
        until = scheduler.clock() + room
        ran = False
        try:
            while not ran or scheduler.clock() + (self._beginning if self.seq is None else self._following) <= until:
                if self.seq is not None:
                    self._go_on(events)
                elif not self._begin(room):
                    break
                ran = True
        except DeviceFailed as error:
            scheduler.device_failed(error, events)
        except Exception as error:
            self._failed(error)
        return ran

    def forget(self, seq: Sequence) -> None:
        """The sequence gives up its pages: nothing may be written there any more."""
        if seq is self.seq:
            self._drop()

    def _may_take(self, seq: Sequence) -> bool:
        """A stream that owes a few tokens, which were not sampled, is none of these."""
        if seq.undivided or not seq.paced or seq.choice != BASE or seq.request.prompt_logprobs is not None:
            return False
        return seq.started and self._scheduler.debt(seq) > 1 and (seq.resumed or not seq.n_generated)

    def _begin(self, room: float) -> bool:
        """Begin a step of the prompt whose turn was longest ago, with parts for turns of `room` seconds; False: there
        is none, or there are no pages for any."""
        scheduler = self._scheduler
        began = scheduler.clock()
        prompts = [seq for seq in scheduler.running if self._may_take(seq)] if self._active else []
        for seq in sorted(prompts, key=lambda seq: seq.served):
            n = self._size(scheduler.debt(seq) - 1, room)
            n = dict(scheduler.reserve([(seq, n)])).get(seq, 0)
            if n:
                seq.served = scheduler.n_steps
                self.seq, self.n = seq, n
                if scheduler.cache.beside is not None:
                    scheduler.cache.beside.prepare([(seq, n)])
                self._run = scheduler.engine.run_in_parts(fill([(seq, n)]))
                self._following = next(self._run)
                self._beginning = scheduler.clock() - began
                return True
        return False

    def _size(self, n_owed: int, room: float) -> int:
        """Tokens of the next step: the largest whose parts fit, and no larger than it takes."""
        sizes = self._scheduler.engine.part_sizes
        fitting = [n for n, longest in sizes.items() if longest <= room] or [min(sizes)]
        return min(n_owed, min((n for n in fitting if n >= n_owed), default=max(fitting)))

    def _go_on(self, events: Events) -> None:
        """The next part of the step that is under way."""
        scheduler, seq = self._scheduler, self.seq
        assert seq is not None
        following = next(self._run, None)
        if following is not None:
            self._following = following
            return
        self.seq = None
        scheduler.commit([(seq, self.n)], StepResult(np.zeros(0, np.uint32)), scheduler.clock(), events)

    def _drop(self) -> None:
        """Leave the step for good: what it was to pay is owed still."""
        seq, self.seq, self._run = self.seq, None, iter(())
        if seq is not None and self._scheduler.cache.beside is not None:
            self._scheduler.cache.beside.undo([(seq, self.n)])

    def _failed(self, error: Exception) -> None:
        """The same tokens run once more in a step of the usual kind, which finds out whose fault it was."""
        log.warning("a step of a prompt beside streams failed: %s: %s", type(error).__name__, error)
        self._scheduler.stats.n_failed_steps += 1
        if self.seq is not None:
            self.seq.undivided = True
        else:
            self._scheduler.pace.crowded = self._active = False
        self._drop()
