"""How many tokens models are to draft at once: as many as promise the most tokens a second.

A draft costs a model's steps, and a row each in the step that verifies it. One stream's step reads all weights whatever
it computes, so rows come nearly for nothing; sixteen streams' steps compute all the time, and guesses that are wrong
take time from others. How long steps take with drafts of each length, by how many sequences there are, is a matter of
the machine and the model, and how often guesses come true one of the text. Neither is assumed: both are what they have
been lately.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from logitless.engine.batch import power_of_two

FEW = 3  # steps of a length, and one more, before it is judged
LONGEST = 8  # tokens of a draft: each length takes some steps to be known
EVERY = 128  # steps from one trial of another length to the next
TRIAL = 4  # steps of a trial
PROBE = 16  # steps from one guess to the next where none is worth it: the text may have changed
UNKNOWN = 0.7  # the chance of a guess of which nothing is known
WEIGHT = 2.0  # guesses that what others have seen counts for
OWN, SHARED = 0.9, 0.98  # of what is known, after another draft


class Chances:
    """How often guesses have come true lately, by their place in a draft."""

    __slots__ = ("_kept", "_others", "_right", "_tried")

    def __init__(self, others: Chances | None = None) -> None:
        """Of one sequence; `others`: of all of them, which are told, too."""
        self._others = others
        self._kept = SHARED if others is None else OWN
        self._tried: list[float] = []
        self._right: list[float] = []

    def judged(self, n_drafted: int, n_accepted: int) -> None:
        """Of a draft of so many tokens the first n_accepted came true."""
        for i in range(min(n_drafted, n_accepted + 1)):  # what follows a wrong one was not tried
            if i == len(self._tried):
                self._tried.append(0.0)
                self._right.append(0.0)
            self._tried[i] = self._kept * self._tried[i] + 1
            self._right[i] = self._kept * self._right[i] + (i < n_accepted)
        if self._others is not None:
            self._others.judged(n_drafted, n_accepted)

    def of(self, i: int) -> float:
        """That guess i comes true, if those before it do."""
        expected = UNKNOWN if self._others is None else self._others.of(i)
        if i >= len(self._tried):
            return expected
        return (self._right[i] + WEIGHT * expected) / (self._tried[i] + WEIGHT)

    def tokens(self, n_most: int) -> list[float]:
        """How many a step will give, by the draft's length."""
        expected, chance = [1.0], 1.0
        for i in range(n_most):
            chance *= self.of(i)
            expected.append(expected[-1] + chance)
        return expected


class _Times:
    """What steps of so many sequences take, by the length of their drafts. They are alike but for pauses of the
    machine, which a median forgets."""

    __slots__ = ("_n", "_seconds", "n_steps")

    def __init__(self) -> None:
        self.n_steps = 0
        self._n: dict[int, int] = {}
        self._seconds: dict[int, deque[float]] = {}

    def add(self, length: int, seconds: float) -> None:
        n = self._n[length] = self._n.get(length, 0) + 1
        if n > 1:  # the first may have had to make a plan
            self._seconds.setdefault(length, deque(maxlen=15)).append(seconds)

    def untried(self, lengths: Sequence[int]) -> int | None:
        """The longest one of which too little is known."""
        return next((i for i in reversed(lengths) if self._n.get(i, 0) <= FEW), None)

    def of(self, length: int) -> float:
        return statistics.median(self._seconds[length])


class Worth:
    """Belongs to the engine's thread."""

    def __init__(self) -> None:
        self.chances = Chances()  # of all sequences
        self._times: dict[tuple[int, int], _Times] = {}
        self._out: tuple[_Times, int] | None = None  # what the step under way will tell of

    def choose(self, drafting: Sequence[Chances], n_others: int, n_least: int, n_most: int) -> int:
        """How many tokens the next drafts of these sequences may have: n_least to n_most, or none. `n_others`: other
        sequences of the same step, which get a token each."""
        times = self._times.setdefault((len(drafting), power_of_two(n_others) if n_others else 0), _Times())
        times.n_steps += 1
        lengths = [0, *range(max(1, n_least), min(n_most, LONGEST) + 1)]
        length = times.untried(lengths)
        if length is None:
            length = self._best(times, drafting, n_others, lengths)
        self._out = times, length
        return length

    def _best(self, times: _Times, drafting: Sequence[Chances], n_others: int, lengths: Sequence[int]) -> int:
        expected = [n_others + sum(t) for t in zip(*(c.tokens(lengths[-1]) for c in drafting), strict=True)]
        rates = [expected[length] / times.of(length) for length in lengths]
        best = rates.index(max(rates))
        trial, i = divmod(times.n_steps, EVERY)
        others = [at for at in (best - 1, best + 1) if 0 <= at < len(lengths)]
        if i < TRIAL and others:
            return lengths[others[trial % len(others)]]
        return lengths[1 if not best and len(lengths) > 1 and not i % PROBE else best]

    def observe(self, seconds: float, *, counts: bool) -> None:
        """The step for which drafts were chosen took so long, guesses included. `counts`: it had nothing else to do."""
        if self._out is not None and counts:
            times, length = self._out
            times.add(length, seconds)
        self._out = None
