"""How many tokens a step with prompts may have without making the streams beside them stutter."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from logitless.engine.batch import power_of_two, size_below, size_beside

STRETCH = 2.2  # a step with prompts may take so many times as long as one without; clients see a little more
BETWEEN = 2.0  # the same where prompts have steps of their own, which stop in time
LEAST_PROMPT = 4  # tokens of a step: prompts go on, however slow they are beside the streams
SUPERLINEAR = 1.1  # times the tokens that a larger size has, until what it adds has been seen
LEAST_ROOM = 0.5  # of a stream's step as it is now: so prompts go on where streams have become slow
AFTER = 7  # steps after parts of prompts that are remembered
TRUST = 0.99  # in what a size was seen to add beyond what is expected, after each step of the size below
REMEMBERED = 129  # steps: a prompt that arrives, or another process, may hold up dozens, which their median forgets


@dataclass
class _Growth:
    """How many times as much as a size the next larger one added, when both had their turn: one slow step of either is
    not believed, and a size that was too large is tried again before long."""

    last: float
    before: float
    trust: float = 1.0


class PrefillBudget:
    """Learns from the steps that ran what streams are used to, by how many they are, and what prompts add to them.

    Steps have few sizes, for each needs a plan of its own, and what a token adds depends on how many there are: eight
    rows may take as long as sixteen. So a size is judged by what it took last time, and the next larger one by how
    much more that took when it was last tried. Where the smallest size takes too long, a step does not fill it: each
    of its tokens looks at all that is there of its prompt, which may take longer than the weights.
    """

    def __init__(self, most: int) -> None:
        self.most = most  # tokens of prompts in a step with streams
        self._plain: dict[int, deque[float]] = {}  # seconds of steps without prompts, by the power of two above
        self._token = 0.0  # seconds of each token of a prompt alone; what is known at first
        self._size = 0  # tokens of the last step with both, rounded up; 0: there is none to judge by
        self._added = 0.0  # seconds that it took longer than one without prompts
        self._growth: dict[int, _Growth] = {}  # by size: what the next larger one adds
        self._medians: dict[int, float] = {}  # of those in _plain that have not changed since
        self._after: deque[float] = deque(maxlen=AFTER)  # times the usual that steps alone took after parts of prompts
        self.crowded = False  # even the smallest step with prompts took too long, and some wait since

    def observe(self, n_prompt: int, n_tokens: int, seconds: float, *, between: bool = False) -> None:
        """A step took `seconds` for `n_tokens`, of which `n_prompt` belong to prompts. `between`: others of a prompt
        ran since the last step, on the same caches."""
        if not n_prompt and between:
            if self._plain and (usual := self._usual(n_tokens)):
                self._after.append(seconds / usual)
        elif not n_prompt:
            size = power_of_two(n_tokens)
            self._plain.setdefault(size, deque(maxlen=REMEMBERED)).append(seconds)
            self._medians.pop(size, None)
        elif n_prompt == n_tokens:
            self._token, self._size = seconds / n_prompt, 0
        elif self._plain:
            size, n_streams = size_beside(n_tokens), n_tokens - n_prompt
            usual, smallest = self._usual(n_streams), size == self._least(n_streams)
            added = max(0.0, seconds - usual)
            if smallest:
                added *= (size - n_streams) / n_prompt  # had it been full
            if self._size and size == _above(self._size):
                self._saw(self._size, added, self._added)
            elif self._size == _above(size):
                self._saw(size, self._added, added)
            elif size in self._growth:
                self._growth[size].trust *= TRUST
            self._size, self._added = size, added
            self.crowded = smallest and added > (STRETCH - 1) * usual

    def room(self, n_streams: int) -> float:
        """Seconds that prompts may take before the next step, which is for so many streams."""
        if not self._plain:
            return 0.0
        after = max(1.0, statistics.median(self._after)) if self._after else 1.0
        return max(LEAST_ROOM * after, BETWEEN - after) * self._usual(n_streams)

    def tokens(self, n_streams: int) -> int:
        """The tokens that the next step may have, `n_streams` of them for streams."""
        least = self._least(n_streams)
        most = max(least, _at_most(n_streams + self.most))
        if not self._plain or not (self._size or self._token):
            return min(most, n_streams + self.most)
        spare = (STRETCH - 1) * self._usual(n_streams)
        if self._size:
            size, added = self._size, self._added
            if added * self._grows(size, _expected(size)) <= spare:
                size = _above(size)
            while added > spare and size > least:
                size = size_below(size)
                added /= self._grows(size, _above(size) / size)
            if added > spare:
                fitting = int((least - n_streams) * spare / added)
                return n_streams + min(self.most, max(LEAST_PROMPT, fitting))
        else:
            size = _at_most(n_streams + int(spare / self._token))
        return min(max(least, min(size, most)), n_streams + self.most)

    def _grows(self, size: int, unknown: float) -> float:
        """How many times as much the size above is believed to add."""
        growth = self._growth.get(size)
        if growth is None:
            return unknown
        seen = min(growth.last, growth.before)
        return max(min(seen, _expected(size)), seen * growth.trust)

    def _saw(self, size: int, larger: float, smaller: float) -> None:
        """The size above adds so much, and `size` so much."""
        known = self._growth.get(size)
        last = max(1.0, larger / smaller) if smaller else _expected(size)
        self._growth[size] = _Growth(last, known.last if known is not None else _expected(size))

    def _usual(self, n_streams: int) -> float:
        """Seconds of a step without prompts: of so many streams, else of the next fewer known, else of the fewest."""
        size = power_of_two(n_streams)
        known = max((s for s in self._plain if s <= size), default=min(self._plain))
        if known not in self._medians:
            self._medians[known] = statistics.median(self._plain[known])
        return self._medians[known]

    def _least(self, n_streams: int) -> int:
        """The smallest size with prompts."""
        return size_beside(n_streams + min(self.most, LEAST_PROMPT))


def _above(size: int) -> int:
    return size_beside(size + 1)


def _at_most(n: int) -> int:
    """The largest size of n tokens or fewer."""
    return size_below(size_beside(n + 1))


def _expected(size: int) -> float:
    return SUPERLINEAR * _above(size) / size


def shares(debts: list[int], room: int) -> list[int]:
    """The tokens that each prompt gets of `room`, for what they still owe, first in order first.

    The first has at least half of the room; with the other half shorter prompts may overtake it, the shortest first.
    So nobody waits for all of a very long prompt, and the long one takes twice its time at most.
    """
    given = [0] * len(debts)
    if not debts:
        return given
    given[0] = min(debts[0], -(-room // 2))
    left = room - given[0]
    shorter = sorted((debt, i) for i, debt in enumerate(debts) if debt < debts[0])
    for i in (*(i for _, i in shorter), *range(len(debts))):
        n = min(debts[i] - given[i], left)
        given[i] += n
        left -= n
    return given
