"""Adaptive draft length: picks the number of draft tokens that gives the most tokens a second.

A draft token costs a step of the draft model and a row in the step that verifies it. The step of
one sequence is bound by memory bandwidth, so rows are nearly free. The steps of sixteen sequences
are bound by compute, so rejected tokens slow the others down. The time of a step by draft length
and batch size depends on machine and model, and the acceptance rate depends on the text. Both are
measured."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from logitless.engine.batch import power_of_two

FEW = 3  # steps of a length, after a first one, before its time is trusted
LONGEST = 8  # draft tokens at most: every length must be measured first
EVERY = 128  # steps between trials of another length
TRIAL = 4  # steps of a trial
PROBE = 16  # steps between drafts while none pays: the text may have changed
RARE_PROBE = 64  # the same for a drafter that tells how right it is to be expected
UNKNOWN = 0.7  # acceptance rate before any draft
WEIGHT = 2.0  # draft tokens that the rate of all sequences counts for in the rate of one
OWN, SHARED = 0.9, 0.98  # decay of counts after each draft, of one sequence and of all


class AcceptanceRate:
    """Acceptance rate of recent draft tokens, by position in the draft."""

    __slots__ = ("_decay", "_others", "_right", "_tried", "_unknown")

    def __init__(self, others: AcceptanceRate | None = None) -> None:
        """`others`: the rate of all sequences, which is updated too and serves as prior."""
        self._others = others
        self._unknown = UNKNOWN
        self._decay = SHARED if others is None else OWN
        self._tried: list[float] = []
        self._right: list[float] = []

    def record_outcome(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft of `n_drafted` tokens of which the first `n_accepted` were accepted."""
        for i in range(min(n_drafted, n_accepted + 1)):  # tokens after a rejected one say nothing
            if i == len(self._tried):
                self._tried.append(0.0)
                self._right.append(0.0)
            self._tried[i] = self._decay * self._tried[i] + 1
            self._right[i] = self._decay * self._right[i] + (i < n_accepted)
        if self._others is not None:
            self._others.record_outcome(n_drafted, n_accepted)

    def expect(self, rate: float) -> None:
        """Forget all drafts: the drafter has changed, and will probably be right as often as `rate` says."""
        self._unknown, self._tried, self._right = rate, [], []

    def of(self, i: int) -> float:
        """Probability that draft token `i` is accepted, given that those before it are."""
        expected = self._unknown if self._others is None else self._others.of(i)
        if i >= len(self._tried):
            return expected
        return (self._right[i] + WEIGHT * expected) / (self._tried[i] + WEIGHT)

    def tokens(self, n_most: int) -> list[float]:
        """Expected tokens of a step, by draft length from 0 to n_most."""
        expected, chance = [1.0], 1.0
        for i in range(n_most):
            chance *= self.of(i)
            expected.append(expected[-1] + chance)
        return expected


class _Times:
    """Median step times by draft length, for one batch size.

    The median ignores pauses of the machine."""

    __slots__ = ("_n", "_seconds", "n_steps")

    def __init__(self) -> None:
        self.n_steps = 0
        self._n: dict[int, int] = {}
        self._seconds: dict[int, deque[float]] = {}

    def add(self, length: int, seconds: float) -> None:
        n = self._n[length] = self._n.get(length, 0) + 1
        if n > 1:  # the first step may include making a plan
            self._seconds.setdefault(length, deque(maxlen=15)).append(seconds)

    def untried(self, lengths: Sequence[int]) -> int | None:
        """Longest draft length with too few measurements; None: all have enough."""
        return next((i for i in reversed(lengths) if self._n.get(i, 0) <= FEW), None)

    def of(self, length: int) -> float:
        return statistics.median(self._seconds[length])


class AdaptiveDraftLength:
    """Adaptive draft length of all sequences. Belongs to the engine thread."""

    def __init__(self, probe: int = PROBE) -> None:
        """`probe`: steps between drafts while none pays."""
        self._probe = probe
        self.acceptance = AcceptanceRate()  # of all sequences
        self._times: dict[tuple[int, int], _Times] = {}
        self._out: tuple[_Times, int] | None = None  # where the time of the current step counts

    def choose(self, drafting: Sequence[AcceptanceRate], n_others: int, n_least: int, n_most: int) -> int:
        """Choose the draft length of these sequences: 0, or n_least to n_most.

        `n_others`: sequences of the same step without drafts, which get one token each."""
        times = self._times.setdefault((len(drafting), power_of_two(n_others) if n_others else 0), _Times())
        times.n_steps += 1
        lengths = [0, *range(max(1, n_least), min(n_most, LONGEST) + 1)]
        length = times.untried(lengths)
        if length is None:
            length = self._best(times, drafting, n_others, lengths)
        self._out = times, length
        return length

    def _best(self, times: _Times, drafting: Sequence[AcceptanceRate], n_others: int, lengths: Sequence[int]) -> int:
        expected = [n_others + sum(t) for t in zip(*(c.tokens(lengths[-1]) for c in drafting), strict=True)]
        rates = [expected[length] / times.of(length) for length in lengths]
        best = rates.index(max(rates))
        trial, i = divmod(times.n_steps, EVERY)
        others = [at for at in (best - 1, best + 1) if 0 <= at < len(lengths)]
        if not best:
            return lengths[1 if len(lengths) > 1 and not i % self._probe else 0]
        return lengths[others[trial % len(others)] if i < TRIAL and others else best]

    def observe(self, seconds: float, *, counts: bool) -> None:
        """Record the seconds of the step, drafting included.

        `counts`: it was a pure decode step."""
        if self._out is not None and counts:
            times, length = self._out
            times.add(length, seconds)
        self._out = None
