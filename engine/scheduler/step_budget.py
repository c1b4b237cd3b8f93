"""Budgets of a step beside streams, by measured times: prompt tokens (chunked prefill), and rows of batches."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from logitless.engine.batch import bucket, mixed_batch_size, power_of_two, size_below

STRETCH = 2.2  # duration of a mixed step relative to one without prompts; clients see a little more
BETWEEN = 2.0  # the same for interleaved prefill, whose parts stop in time
LEAST_PROMPT = 4  # prompt tokens of a mixed step at least, however slow they are
SUPERLINEAR = 1.1  # assumed seconds per token of a larger size, relative, until they are measured
LEAST_ROOM = 0.5  # share of a decode step that prompts get at least
AFTER = 7  # decode steps after interleaved parts whose durations are kept
TRUST = 0.99  # decay of a measured growth per step of the size below
REMEMBERED = 129  # decode steps of a median: other processes may delay dozens of them

SLOWDOWN = 1.2  # duration of a step with rows of batches relative to one of its streams alone
FEW = 3  # steps of streams alone that must be known before rows of batches join them
OFTEN = 15  # steps of a size whose median counts
REFRESH = 16  # steps with rows of batches until one without measures the streams alone
PATIENCE = 32  # steps without rows of batches until they join in any case
RETRY = 256  # steps until the measurement of a size is forgotten


@dataclass
class _Growth:
    """Measured growth: seconds that the next larger size adds, relative to a size.

    One slow step is not believed, and a size that was too large is tried again before long."""

    last: float
    before: float
    trust: float = 1.0


class PrefillBudget:
    """Learns the duration of decode steps by their number of streams, and the time that prompts
    add.

    Steps have few sizes, since each needs a plan of its own, and the time of a token depends on the
    size: eight rows may take as long as sixteen. So a size is judged by its last duration, and the
    next larger one by its measured growth. Where the smallest size takes too long, a step does not
    fill it: attention over a long prompt may take longer than the weights."""

    def __init__(self, most: int) -> None:
        self.most = most  # tokens of prompts in a step with streams
        # seconds of steps without prompts, by the power of two above
        self._plain: dict[int, deque[float]] = {}
        self._token = 0.0  # seconds of each token of a prompt alone, the first estimate
        # tokens of the last step with both, rounded up; 0: there is none to judge by
        self._size = 0
        self._added = 0.0  # seconds that it took longer than one without prompts
        self._growth: dict[int, _Growth] = {}  # by size: seconds that the next larger one adds
        self._medians: dict[int, float] = {}  # of the entries of _plain that have not changed since
        # times the usual that steps alone took after parts of prompts
        self._after: deque[float] = deque(maxlen=AFTER)
        # even the smallest step with prompts took too long, and some wait since
        self.crowded = False

    def observe(self, n_prompt: int, n_tokens: int, seconds: float, *, between: bool = False) -> None:
        """Note the duration of a step in seconds: `n_tokens`, `n_prompt` of them of prompts.

        `between`: parts of interleaved prefill ran since the last step and used the same processor
        caches."""
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
            size, n_streams = mixed_batch_size(n_tokens), n_tokens - n_prompt
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
        """Seconds that interleaved prefill may take before the next step of so many streams."""
        if not self._plain:
            return 0.0
        after = max(1.0, statistics.median(self._after)) if self._after else 1.0
        return max(LEAST_ROOM * after, BETWEEN - after) * self._usual(n_streams)

    def tokens(self, n_streams: int) -> int:
        """Tokens of the next step, `n_streams` of them of decoding streams."""
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
        """Expected growth to the size above."""
        growth = self._growth.get(size)
        if growth is None:
            return unknown
        growth_seen = min(growth.last, growth.before)
        return max(min(growth_seen, _expected(size)), growth_seen * growth.trust)

    def _saw(self, size: int, larger: float, smaller: float) -> None:
        """Note the seconds that the size above and `size` add."""
        known = self._growth.get(size)
        last = max(1.0, larger / smaller) if smaller else _expected(size)
        self._growth[size] = _Growth(last, known.last if known is not None else _expected(size))

    def _usual(self, n_streams: int) -> float:
        """Median seconds of a step without prompts, of so many streams or the next fewer that are known."""
        size = power_of_two(n_streams)
        known = max((s for s in self._plain if s <= size), default=min(self._plain))
        if known not in self._medians:
            self._medians[known] = statistics.median(self._plain[known])
        return self._medians[known]

    def _least(self, n_streams: int) -> int:
        """The smallest size with prompts."""
        return mixed_batch_size(n_streams + min(self.most, LEAST_PROMPT))


class BatchRows:
    """Learns the duration of steps by their number of rows, and how many rows batches may add to streams.

    A step takes at most SLOWDOWN times one of its streams alone. Where a single row more takes
    longer, it joins as seldom as makes that the mean."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}  # of the last steps, by their rounded number of rows
        self._last_step: dict[int, int] = {}  # last step of a size
        self._n_steps = 0
        self._n_joined = 0  # steps since the last one of streams alone
        self._n_waited = 0  # steps since the last one with rows of batches
        self._saved = 0.0  # seconds that steps without rows of batches have left

    def observe(self, size: int, seconds: float) -> None:
        """Note the duration of a step of so many rows, rounded up to a bucket."""
        self._n_steps += 1
        for old in [old for old, step in self._last_step.items() if self._n_steps - step > RETRY]:
            del self._last_step[old], self._seconds[old]
        self._seconds.setdefault(size, deque(maxlen=OFTEN)).append(seconds)
        self._last_step[size] = self._n_steps

    def rows(self, n_streams: int, n_waiting: int, *, mixed: bool, busy: bool) -> int:
        """Rows of batches in the next step, of `n_waiting`. `mixed`: some are of prompts; `busy`: prompts of
        others have the time that streams leave."""
        size = self._size(n_streams, n_waiting, mixed=mixed, busy=busy)
        self._n_waited = 0 if size else self._n_waited + 1
        self._n_joined = self._n_joined + 1 if size else 0
        return min(n_waiting, max(0, size - n_streams))

    def _size(self, n_streams: int, n_waiting: int, *, mixed: bool, busy: bool) -> int:
        """Rows of the next step, rounded to a bucket; 0: the streams' rows alone."""
        sizes = _sizes(n_streams, n_waiting, mixed=mixed)
        if self._n_waited >= PATIENCE:
            return sizes[0]
        known = self._seconds.get(bucket(n_streams), ())
        if busy or len(known) < FEW or self._n_joined >= REFRESH:
            return 0
        alone = statistics.median_low(known)
        spare = (SLOWDOWN - 1) * alone
        largest = 0
        for size in sizes:
            if self._expected(size) - alone <= spare:
                largest = size
            if size > max(self._seconds):  # a larger one is tried when this one is known
                break
        if largest:
            return largest
        self._saved += spare
        if self._saved < self._expected(sizes[0]) - alone:
            return 0
        self._saved = 0.0
        return sizes[0]

    def _expected(self, size: int) -> float:
        """Seconds of a step of this size, interpolated between the next known sizes."""
        below = max((known for known in self._seconds if known <= size), default=0)
        above = min((known for known in self._seconds if known >= size), default=below)
        least, most = (statistics.median_low(self._seconds[known]) for known in (below or above, above))
        return least if above <= below or not below else least + (most - least) * (size - below) / (above - below)


def _sizes(n_streams: int, n_waiting: int, *, mixed: bool) -> list[int]:
    """Rounded sizes of a step with rows of batches, the smallest first."""
    rounded = mixed_batch_size if mixed else bucket
    sizes = [rounded(n_streams + min(n_waiting, LEAST_PROMPT if mixed else 1))]
    while sizes[-1] < n_streams + n_waiting:
        sizes.append(rounded(sizes[-1] + 1))
    return sizes


def _above(size: int) -> int:
    return mixed_batch_size(size + 1)


def _at_most(n: int) -> int:
    """The largest size of n tokens or fewer."""
    return size_below(mixed_batch_size(n + 1))


def _expected(size: int) -> float:
    return SUPERLINEAR * _above(size) / size


def shares(debts: list[int], room: int) -> list[int]:
    """Tokens that each prompt gets of `room`, from the uncomputed tokens of each, in order of rank.

    The first has at least half of the room; in the other half shorter prompts may overtake it, the
    shortest first. So no prompt waits for all of a very long one, which takes at most twice its
    time."""
    parts = [0] * len(debts)
    if not debts:
        return parts
    parts[0] = min(debts[0], -(-room // 2))
    rest = room - parts[0]
    shorter = sorted((debt, i) for i, debt in enumerate(debts) if debt < debts[0])
    for i in (*(i for _, i in shorter), *range(len(debts))):
        n = min(debts[i] - parts[i], rest)
        parts[i] += n
        rest -= n
    return parts
