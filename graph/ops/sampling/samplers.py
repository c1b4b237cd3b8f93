"""Sampler chain in numpy: the reference of the op `sample` for one row, as in llama.cpp.

Facts: llama.cpp, src/llama-sampler.cpp (2026). Where it leaves a choice open, this is it: equal
logits come in the order of their ids, NaN counts as -inf, and sums of probabilities run in double.
Everything else has the precision of the logits (float32 as in llama.cpp, float64 as an oracle)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]

# Codes of a row's chain; 0 ends it. The last of a chain is a selection.
END, PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYP_P, TOP_P, MIN_P, XTC, TEMPERATURE = range(10)
GREEDY, DIST, MIROSTAT_1, MIROSTAT_2, ADAPTIVE = range(16, 21)

# Devices may compile what few chains need apart: the first set of samplers that has all of a chain's.
GREEDY_ONLY, USUAL, ALL = range(3)
_SETS = ((END, PENALTIES, DRY, GREEDY), (TOP_K, TOP_P, MIN_P, TEMPERATURE, DIST))
_VARIANTS = np.full(ADAPTIVE + 2, ALL, np.int8)  # by code, and of codes beyond
for _variant, _codes in enumerate(_SETS):
    _VARIANTS[list(_codes)] = _variant

# Columns of a row's parameters.
TEMP, RANGE, EXPONENT, K, P, LEAST_P, N_SIGMA, XTC_PROBABILITY, XTC_THRESHOLD, TYPICAL = range(10)
REPEAT, FREQUENCY, PRESENCE, MIN_KEEP, TAU, ETA, TARGET, DECAY, RESET = range(10, 19)
N_PARAMS = RESET + 2  # RESET and the column after it: new values of the state, NaN keeps the old

# mirostat: mu in column 0; adaptive-p: weighted sum and total weight in columns 0 and 1
N_STATE = 4
BIAS_ENTRY, PENALTY_ENTRY, DRY_ENTRY = range(3)  # kinds of sparse entries
# The result's word: the id, and how many draws of each kind were used: none, two (only with a
# mask), else one.
ID, TWO_DIST, TWO_XTC, NO_DIST, NO_XTC = 0x0FFFFFFF, 1 << 28, 1 << 29, 1 << 30, 1 << 31

_LAYOUT = (DIST, TEMPERATURE, RESET, N_PARAMS, N_STATE, ID, TWO_DIST, TWO_XTC, NO_DIST, NO_XTC)
LAYOUT = f"{zlib.crc32(repr(_LAYOUT).encode()):08x}"


def variant_of(chains: npt.NDArray[np.int32]) -> int:
    """The set of samplers that chains (R, C) need: GREEDY_ONLY, USUAL or ALL."""
    return int(_VARIANTS.take(chains, mode="clip").max(initial=0))


@dataclass
class Candidates:
    """Remaining candidates: ids (n,), logits (n,) and, once computed, probabilities p (n,)."""

    ids: npt.NDArray[np.int64]
    logits: Floats
    sorted: bool = False
    p: Floats | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, which: Any, *, is_sorted: bool) -> None:
        self.ids, self.logits, self.sorted = self.ids[which], self.logits[which], is_sorted
        self.p = None if self.p is None else self.p[which]

    def sort(self) -> None:
        if not self.sorted:
            self.take(np.lexsort((self.ids, -self.logits)), is_sorted=True)

    def weights(self) -> Floats:
        """e^(logit - greatest): 1 for the greatest even when it is infinite, 0 for all when all are
        -inf."""
        top = self.logits.max()
        if np.isneginf(top):
            return np.zeros_like(self.logits)
        with np.errstate(invalid="ignore", under="ignore"):
            e: Floats = np.where(self.logits == top, self.logits.dtype.type(1), np.exp(self.logits - top))
        return e

    def softmax(self) -> Floats:
        e = self.weights()
        total = e.sum(dtype=np.float64).astype(e.dtype)
        self.p = e / total if total > 0 else e
        return self.p


def change(c: Candidates, kind: int, entries: list[tuple[int, int, float]], q: Floats) -> None:
    """Apply the sparse entries of one kind; each is (kind, id, value)."""
    f = c.logits.dtype.type
    for _, id, value in (e for e in entries if e[0] == kind):
        at = np.flatnonzero(c.ids == id)
        if len(at) == 0:
            continue
        logit = c.logits[at]
        if kind == BIAS_ENTRY:
            logit = logit + f(value)
        elif kind == DRY_ENTRY:
            logit = logit - f(value)
        else:
            logit = np.where(logit <= 0, logit * f(q[REPEAT]), logit / f(q[REPEAT]))
            logit = logit - (f(value) * f(q[FREQUENCY]) + f(q[PRESENCE]))
        c.logits = c.logits.copy()
        c.logits[at] = np.where(np.isnan(logit), -np.inf, logit)
        c.sorted = False


def top_k(c: Candidates, q: Floats) -> None:
    if q[K] > 0:
        c.sort()
        c.take(slice(int(q[K])), is_sorted=True)


def _first(reached: npt.NDArray[np.bool_], least: int) -> int:
    """Number to keep: up to the first that reached the goal (inclusive), and at least `least`."""
    return max(int(reached.argmax()) + 1, least) if reached.any() else len(reached)


def top_p(c: Candidates, q: Floats) -> None:
    if q[P] < 1:
        c.sort()
        mass = np.cumsum(c.softmax(), dtype=np.float64)
        c.take(slice(_first(mass >= q[P], int(q[MIN_KEEP]))), is_sorted=True)


def min_p(c: Candidates, q: Floats) -> None:
    top = c.logits.max()
    if not q[LEAST_P] > 0 or np.isneginf(top):
        return
    f, min_keep = c.logits.dtype.type, int(q[MIN_KEEP])
    passed = c.logits >= top + np.log(f(q[LEAST_P]))
    if not c.sorted and passed.sum() >= max(min_keep, 1):
        c.take(passed, is_sorted=False)
        return
    if not c.sorted:
        passed = np.zeros(len(c), bool)
        c.sort()
    c.take(slice(max(int(passed.sum()), min_keep, 1)), is_sorted=True)


def typical(c: Candidates, q: Floats) -> None:
    """Nearest to the entropy first (Meister et al., 2022); the order stays so."""
    if not q[TYPICAL] < 1:
        return
    c.sort()
    p = c.softmax()
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = (p * np.where(p > 0, surprise, 0)).sum(dtype=np.float64).astype(p.dtype)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    mass = np.cumsum(p[order], dtype=np.float64)
    c.take(order[: _first(mass > q[TYPICAL], int(q[MIN_KEEP]))], is_sorted=False)


def top_n_sigma(c: Candidates, q: Floats) -> None:
    """Mask logits further than n standard deviations below the greatest; the order stays (llama.cpp #22645)."""
    if not q[N_SIGMA] > 0 or len(c) <= 1:
        return
    f, alive = c.logits.dtype.type, c.logits[~np.isneginf(c.logits)]
    if len(alive):
        mean = f(alive.mean(dtype=np.float64))
        std = np.sqrt(f(np.square((alive - mean).astype(np.float64)).mean()))
        c.logits = np.where(c.logits < c.logits.max() - f(q[N_SIGMA]) * std, f(-np.inf), c.logits)


def xtc(c: Candidates, q: Floats) -> None:
    """Drop all candidates with at least the threshold but the least likely of them."""
    c.sort()
    over = c.softmax() >= q[XTC_THRESHOLD]
    last = (len(c) if over.all() else int(over.argmin())) - 1
    if last > 0 and len(c) - last >= q[MIN_KEEP]:
        c.take(slice(last, None), is_sorted=True)


def temperature(c: Candidates, t: Any) -> None:
    if t > 0:
        c.logits = c.logits / c.logits.dtype.type(t)
        return
    best = min(c.ids[c.logits == c.logits.max()])
    c.logits = np.where(c.ids == best, c.logits, c.logits.dtype.type(-np.inf))


def dynamic_temperature(c: Candidates, q: Floats) -> None:
    f = c.logits.dtype.type
    if not q[RANGE] > 0:
        temperature(c, q[TEMP])
        return
    if len(c) <= 1:
        return
    c.sort()
    p = c.softmax()
    entropy = -f((p * np.log(np.where(p > 0, p, f(1)))).sum(dtype=np.float64))
    low, high = max(f(0), f(q[TEMP]) - f(q[RANGE])), f(q[TEMP]) + f(q[RANGE])
    temperature(c, low + (high - low) * (entropy / -np.log(f(1) / f(len(c)))) ** f(q[EXPONENT]))


FILTERS: dict[int, Callable[[Candidates, Floats], None]] = {
    TOP_N_SIGMA: top_n_sigma,
    TOP_K: top_k,
    TYP_P: typical,
    TOP_P: top_p,
    MIN_P: min_p,
    TEMPERATURE: dynamic_temperature,
}


def greedy(c: Candidates) -> int:
    best = int(np.lexsort((c.ids, -c.logits))[0])
    c.take([best], is_sorted=True)
    c.p = np.ones(1, c.logits.dtype)
    return 0


def dist(c: Candidates, u: float) -> int:
    """The first candidate whose running sum reaches u times the whole. Draws even when there is only one."""
    e = c.weights()
    run = np.cumsum(e, dtype=np.float64)
    c.p = (e / run[-1]).astype(e.dtype) if run[-1] > 0 else e
    return int(np.argmax(run >= run[-1] * u))


def discrete(c: Candidates, u: float) -> int:
    """std::discrete_distribution over p, which draws nothing when there is only one."""
    assert c.p is not None
    total = c.p.sum(dtype=np.float64)
    run = np.cumsum(c.p / total if total > 0 else np.ones(len(c)), dtype=np.float64)
    run[-1] = max(run[-1], 1.0)
    return int(np.argmax(run >= u))


def mirostat_1(c: Candidates, q: Floats, mu: Any, u: float, n_vocab: int) -> tuple[int, Any]:
    """Choose among as many of the likeliest as give the surprise mu on average, by Zipf's law (Basu et al., 2021)."""
    f = c.logits.dtype.type
    c.sort()
    p = c.softmax()
    with np.errstate(all="ignore"):
        i = np.arange(min(99, len(c) - 1))
        t = np.log((i + 2).astype(f) / (i + 1).astype(f))
        b = np.log(p[i] / p[i + 1])
        s_hat = _sum(t * b) / _sum(t * t)
        eps = s_hat - f(1)
        k = ((eps * f(2) ** f(mu)) / (f(1) - f(n_vocab) ** -eps)) ** (f(1) / s_hat)
    c.take(slice(int(k) if 1 <= k < 2**31 else 1), is_sorted=True)
    return _surprised(c, q, mu, u)


def _sum(values: Floats) -> Any:
    """Sum from left to right in the values' own precision, as a loop does."""
    return np.cumsum(values)[-1] if len(values) else values.dtype.type(0)


def mirostat_2(c: Candidates, q: Floats, mu: Any, u: float) -> tuple[int, Any]:
    """Choose among the candidates whose surprise is at most mu."""
    c.sort()
    with np.errstate(divide="ignore"):
        over = -np.log2(c.softmax()) > mu
    c.take(slice(max(1, int(over.argmax()) if over.any() else len(c))), is_sorted=True)
    return _surprised(c, q, mu, u)


def _surprised(c: Candidates, q: Floats, mu: Any, u: float) -> tuple[int, Any]:
    p = c.softmax()
    chosen = discrete(c, u)
    with np.errstate(divide="ignore"):
        return chosen, mu - q[ETA] * (-np.log2(p[chosen]) - q[TAU])


def adaptive(c: Candidates, q: Floats, state: Floats, u: float) -> int:
    """Prefer probabilities near a target that makes up for those chosen before; keeps their decaying mean in state."""
    f = c.logits.dtype.type
    before = c.softmax()
    if q[TARGET] < 0:
        return discrete(c, u)
    target = np.clip(f(q[TARGET]), f(0), f(1))
    if state[1] != 0:
        target = np.clip(f(2) * target - f(state[0]) / f(state[1]), f(0), f(1))
    d = np.abs((before - target) * (f(1) / f(0.3)))
    c.logits = np.where(np.isneginf(c.logits), c.logits, f(5) - f(10) * d * d / (f(1) + d))
    c.sorted = False
    c.softmax()
    chosen = discrete(c, u)
    state[0] = before[chosen] + q[DECAY] * state[0]
    state[1] = 1 + q[DECAY] * state[1]
    return chosen


def uniform(lo: int, hi: int) -> float:
    """[0, 1) from two 32-bit draws, as libstdc++'s uniform_real_distribution<double>."""
    return min((float(lo) + float(hi) * 2.0**32) / 2.0**64, float(np.nextafter(1.0, 0.0)))


def whole_vocabulary(logits: Floats, q: Floats, entries: list[tuple[int, int, float]]) -> Candidates:
    """The candidates that a chain begins with: every token, its bias applied."""
    c = Candidates(np.arange(len(logits)), np.where(np.isnan(logits), logits.dtype.type(-np.inf), logits))
    change(c, BIAS_ENTRY, entries, q)
    return c


def run_chain(
    c: Candidates,
    q: Floats,
    chain: list[int],
    draw: tuple[int, int],
    draw_xtc: int,
    entries: list[tuple[int, int, float]],
    state: Floats,
    n_vocab: int,
) -> tuple[int, int]:
    """Run a chain, or what comes after a part of it: which of the candidates left is chosen, and
    the flags NO_DIST, NO_XTC. Writes the state (4,)."""
    flags, u, code = NO_DIST | NO_XTC, uniform(*draw), END
    for code in chain:
        if code == PENALTIES:
            change(c, PENALTY_ENTRY, entries, q)
        elif code == DRY:
            change(c, DRY_ENTRY, entries, q)
        elif code == XTC:
            if q[XTC_PROBABILITY] > 0 and q[XTC_THRESHOLD] <= 0.5 and len(c) >= 2:
                flags &= ~NO_XTC
                chance = min(np.float32(draw_xtc) / np.float32(2**32), np.float32(0.99999994))
                if chance <= q[XTC_PROBABILITY]:
                    xtc(c, q)
        elif code in FILTERS:
            FILTERS[code](c, q)
        else:
            break
    if code == DIST:
        return dist(c, u), flags & ~NO_DIST
    if code == MIROSTAT_1:
        chosen, state[0] = mirostat_1(c, q, state[0], u, n_vocab)
    elif code == MIROSTAT_2:
        chosen, state[0] = mirostat_2(c, q, state[0], u)
    elif code == ADAPTIVE:
        chosen = adaptive(c, q, state, u)
    else:
        return greedy(c), flags
    return chosen, flags & ~NO_DIST if len(c) > 1 else flags


def reset(state: Floats, q: Floats) -> None:
    """Write the state (4,) where the row's parameters say so."""
    for i in range(2):
        if not np.isnan(q[RESET + i]):
            state[i] = q[RESET + i]


def allowed(mask: npt.NDArray[Any], n_vocab: int) -> npt.NDArray[np.bool_]:
    """Bits of a mask's words (W,) u32 as (n_vocab,): bit i of word w is the token 32·w + i."""
    ids = np.arange(n_vocab)
    bits: npt.NDArray[np.bool_] = (np.asarray(mask).astype(np.int64)[ids // 32] >> (ids % 32)) & 1 != 0
    return bits


def used(flags: int) -> tuple[int, int]:
    """Decode flags: uniforms that a row used for the selection, and for XTC."""
    n_dist = 0 if flags & NO_DIST else 2 if flags & TWO_DIST else 1
    return n_dist, 0 if flags & NO_XTC else 2 if flags & TWO_XTC else 1


def flags_of(n_dist: int, n_xtc: int) -> int:
    """The inverse of `used`."""
    return (NO_DIST, 0, TWO_DIST)[n_dist] | (NO_XTC, 0, TWO_XTC)[n_xtc]
