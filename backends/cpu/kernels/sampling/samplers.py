"""Sampler chain of one row on the CPU: samplers over its candidates, with llama.cpp's rules.

graph/ops/sampling/samplers.py is their definition. A row's work is a block `s` of int64 words in
scratch memory, named below. Candidates are either DENSE (values at X, one per id, in the order of
ids) or a list of words (candidate_list.py). A list omits those at -inf, but TOTAL counts them:
without probability, they still count for min_keep, dynatemp and the draw. Sums run in double, in
the candidates' order (dense rows: blocks of 256 in vector lanes, then the blocks in order)."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir.registry import f32p, f64p, i32p, i64p, sqrt_f32
from logitless.backends.cpu.kernels.ir.scalar_math import exp_exact, log_exact
from logitless.backends.cpu.kernels.sampling.candidate_list import (
    DEAD,
    LOWEST,
    block_maxima,
    candidate,
    collect,
    first_at,
    helper,
    id_part,
    key_of,
    key_part,
    largest,
    logit_part,
    sort,
    value_of,
)

N, TOTAL, SORTED, DENSE, X, V, LIST, TMP, AUX, E, BLOCKS, COPY, MAXED, TOP = range(14)
SUM = 256  # values under one partial sum
INF = np.float32(np.inf)


@helper
def find_top(s):
    """Key of the greatest logit. Makes the block maxima of a dense row current."""
    w = i64p(s)
    if w[DENSE]:
        if not w[MAXED]:
            w[TOP] = block_maxima(w[X], w[V], w[BLOCKS])
            w[MAXED] = 1
        return np.int32(w[TOP])
    words = i64p(w[LIST])
    best = words[0]
    if not w[SORTED]:
        for i in range(w[N]):
            best = max(best, words[i])
    return key_part(best)


@helper
def _listed(s, count, is_sorted):
    """Replace a dense row by the list, which holds `count` candidates."""
    w = i64p(s)
    if count == 0:  # everything is -inf
        i64p(w[LIST])[0] = candidate(DEAD, 0)
        count = 1
    w[N], w[DENSE], w[SORTED] = count, 0, is_sorted


@helper
def make_list(s):
    w = i64p(s)
    if w[DENSE]:
        find_top(s)
        _listed(s, collect(w[X], w[V], w[BLOCKS], LOWEST, w[LIST]), 0)


@helper
def make_sorted(s):
    w = i64p(s)
    if w[DENSE]:
        find_top(s)
        _listed(s, largest(w[X], w[V], w[V], w[BLOCKS], w[LIST], w[TMP]), 1)
    elif not w[SORTED]:
        sort(w[LIST], w[N], w[TMP], False)
        w[SORTED] = 1


@helper
def keep(s, n):
    """Truncate a list to its first n; n ≥ 1."""
    w = i64p(s)
    w[N], w[TOTAL] = min(n, w[N]), min(n, w[TOTAL])


@helper
def top_k(s, k):
    w = i64p(s)
    if w[DENSE]:
        find_top(s)
        _listed(s, largest(w[X], w[V], min(k, w[V]), w[BLOCKS], w[LIST], w[TMP]), 1)
    else:
        make_sorted(s)
    keep(s, k)


@helper
def make_copy(s):
    """Copy a dense row, so that changes leave the logits alone."""
    w = i64p(s)
    if w[DENSE] and w[X] != w[COPY]:
        x, y = f32p(w[X]), f32p(w[COPY])
        for i in range(w[V]):
            y[i] = x[i]
        w[X] = w[COPY]


@helper
def change(s, kind, begin, end, kinds_at, ids_at, values_at, repeat, frequency, presence):
    """Apply the entries of one kind: 0 add, 1 penalties (value: count of the token), 2 subtract."""
    w = i64p(s)
    kinds, ids, values = i32p(kinds_at), i32p(ids_at), f32p(values_at)
    some = False
    for j in range(begin, end):
        some = some or kinds[j] == kind
    if not some:
        return
    words, where, x = i64p(w[LIST]), i32p(w[AUX]), f32p(w[COPY])
    if w[DENSE]:
        make_copy(s)
        w[MAXED] = 0
    else:
        for i in range(w[N]):
            where[id_part(words[i])] = i
        w[SORTED] = 0
    for j in range(begin, end):
        id = ids[j]
        if kinds[j] != kind or id < 0 or id >= w[V]:
            continue
        at = 0
        if w[DENSE]:
            logit = x[id]
        else:
            at = where[id]  # never written for a token that is no candidate
            if at < 0 or at >= w[N] or id_part(words[at]) != id:
                continue
            logit = logit_part(words[at])
        if kind == 0:
            logit += values[j]
        elif kind == 2:
            logit -= values[j]
        else:
            if logit <= np.float32(0):
                logit *= repeat
            else:
                logit /= repeat
            logit -= values[j] * frequency + presence
        if w[DENSE]:
            x[id] = logit
        else:
            words[at] = candidate(key_of(logit), id)


@njit(inline="always")
def exp_below(v, top):
    """e^(v - top) for v ≤ top; 0 for NaN. If top is infinite it has weight 1, all else 0."""
    d = v - top if v == v else -INF
    return np.float32(1) if v == top and top > -INF else exp_exact(d if top > -INF else -INF)


@njit(fastmath={"reassoc"}, error_model="numpy")
def _exp_run(x_at, e_at, n, top):
    """Exponentials of n values; returns their sum."""
    x, e = f32p(x_at), f32p(e_at)
    total = 0.0
    for i in range(n):
        value = exp_below(x[i], top)
        e[i] = value
        total += np.float64(value)
    return total


@helper
def exps(s, top):
    """e^(logit - top) of every candidate, at E; returns their sum.

    A dense row leaves the sums of its blocks at TMP."""
    w = i64p(s)
    e = f32p(w[E])
    total = 0.0
    if w[DENSE]:
        sums = f64p(w[TMP])
        for b in range((w[V] + SUM - 1) // SUM):
            at = b * SUM
            sums[b] = _exp_run(w[X] + at * 4, w[E] + at * 4, min(SUM, w[V] - at), top)
            total += sums[b]
        return total
    words = i64p(w[LIST])
    for i in range(w[N]):
        e[i] = exp_below(logit_part(words[i]), top)
        total += np.float64(e[i])
    return total


@helper
def softmax(s):
    """Probabilities of the list, at E."""
    w = i64p(s)
    total = np.float32(exps(s, value_of(find_top(s))))
    p = f32p(w[E])
    for i in range(w[N]):
        p[i] = p[i] / total if total > np.float32(0) else np.float32(0)


@helper
def _reach(s, n, top, total, p, min_keep):
    """Candidates of the sorted list that reach p together, at least min_keep; 0 if the first n do not."""
    words = i64p(i64p(s)[LIST])
    run = 0.0
    for i in range(n):
        run += np.float64(exp_below(logit_part(words[i]), top) / total)
        if run >= np.float64(p):
            return max(i + 1, min_keep)
    return 0


@helper
def top_p(s, p, min_keep):
    w = i64p(s)
    dense = w[DENSE]
    if not dense:
        make_sorted(s)
    top = value_of(find_top(s))
    total = np.float32(exps(s, top))
    if dense:  # few tokens hold the mass, as a rule
        count = largest(w[X], w[V], min(256, w[V]), w[BLOCKS], w[LIST], w[TMP])
        n_kept = _reach(s, count, top, total, p, min_keep)
        if 0 < n_kept <= count:
            _listed(s, count, 1)
            keep(s, n_kept)
            return
        make_sorted(s)
    n_kept = _reach(s, w[N], top, total, p, min_keep)
    if n_kept > 0:
        keep(s, n_kept)


@helper
def min_p(s, p, min_keep):
    w = i64p(s)
    words = i64p(w[LIST])
    key = find_top(s)
    least = key_of(value_of(key) + log_exact(p))
    if key <= DEAD:
        return
    if not w[SORTED]:
        count = 0
        if w[DENSE]:
            count = collect(w[X], w[V], w[BLOCKS], least, w[LIST])
            if count >= max(min_keep, 1):
                _listed(s, count, 0)
                w[TOTAL] = count
                return
        else:
            for i in range(w[N]):
                count += key_part(words[i]) >= least
            if count >= max(min_keep, 1):
                count = 0
                for i in range(w[N]):
                    if key_part(words[i]) >= least:
                        words[count] = words[i]
                        count += 1
                w[N] = w[TOTAL] = count
                return
        top_k(s, max(min_keep, 1))
        return
    i = 1
    while i < w[N] and (key_part(words[i]) >= least or i < min_keep):
        i += 1
    keep(s, max(i, min_keep))


@helper
def typical(s, p, min_keep):
    w = i64p(s)
    make_sorted(s)
    softmax(s)
    words, order, prob = i64p(w[LIST]), i64p(w[AUX]), f32p(w[E])
    n = w[N]
    total = 0.0
    for i in range(n):
        if prob[i] > np.float32(0):
            total += np.float64(-prob[i] * log_exact(prob[i]))
    entropy = np.float32(total)
    for i in range(n):
        order[i] = candidate(key_of(-abs(-log_exact(prob[i]) - entropy)), i)
    sort(w[AUX], n, w[TMP], True)
    run, last, reordered = 0.0, w[TOTAL], i64p(w[TMP])
    passed = False
    for i in range(n):
        at = id_part(order[i])
        reordered[i] = words[at]
        run += np.float64(prob[at])
        if run > np.float64(p) and not passed:
            passed = True
            last = max(i + 1, min_keep)
    for i in range(n):
        words[i] = reordered[i]
    keep(s, last)
    w[SORTED] = 0


@helper
def top_n_sigma(s, n_sigma):
    w = i64p(s)
    if w[TOTAL] <= 1:
        return
    top = value_of(find_top(s))
    x, words = f32p(w[X]), i64p(w[LIST])
    count, total = 0, 0.0
    size = w[V] if w[DENSE] else w[N]
    for i in range(size):
        v = x[i] if w[DENSE] else logit_part(words[i])
        if v > -INF:
            total += np.float64(v)
            count += 1
    mean = np.float32(total / count) if count else np.float32(0)
    total = 0.0
    for i in range(size):
        v = x[i] if w[DENSE] else logit_part(words[i])
        if v > -INF:
            d = np.float64(v - mean)
            total += d * d
    std = sqrt_f32(np.float32(total / count)) if count else np.float32(0)
    least = key_of(top - n_sigma * std)
    if w[DENSE]:
        _listed(s, collect(w[X], w[V], w[BLOCKS], least, w[LIST]), 0)
        return
    count = 0
    for i in range(w[N]):
        if key_part(words[i]) >= least:
            words[count] = words[i]
            count += 1
    w[N] = max(count, 1)


@helper
def xtc(s, threshold, min_keep):
    w = i64p(s)
    make_sorted(s)
    softmax(s)
    words, p = i64p(w[LIST]), f32p(w[E])
    last = 0
    for i in range(w[N]):
        if not p[i] >= threshold:
            break
        last = i
    if last > 0 and w[TOTAL] - last >= min_keep:
        w[N] -= last
        w[TOTAL] -= last
        for i in range(w[N]):
            words[i] = words[i + last]


@helper
def temperature(s, t):
    w = i64p(s)
    if not t > np.float32(0):  # only the greatest stays above -inf
        find_top(s)
        if w[DENSE]:
            id = first_at(w[X], w[V], w[BLOCKS], np.int32(w[TOP]))
            i64p(w[LIST])[0] = candidate(np.int32(w[TOP]), id)
        else:
            words = i64p(w[LIST])
            for i in range(w[N]):
                words[0] = max(words[0], words[i])
        w[N], w[DENSE], w[SORTED] = 1, 0, 1
        return
    if w[DENSE]:
        x, y = f32p(w[X]), f32p(w[COPY])
        for i in range(w[V]):
            y[i] = x[i] / t
        w[X], w[MAXED] = w[COPY], 0
        return
    words = i64p(w[LIST])
    for i in range(w[N]):
        words[i] = candidate(key_of(logit_part(words[i]) / t), id_part(words[i]))


@helper
def power(x, y):
    """x^y of floats, x ≥ 0, by exp and log in double: 2 ulp where y·ln x is small."""
    if x <= np.float32(0):
        return np.float32(0) if y > np.float32(0) else np.float32(1) if y == np.float32(0) else INF
    return exp_of(np.float64(y) * log_of(x))


@helper
def log_of(x):
    """ln of a float, as a double: a float's logarithm, then one Newton step in double."""
    y = np.float64(log_exact(x))
    e = exp_double(y)
    return y + (np.float64(x) - e) / e


@helper
def exp_of(y):
    return np.float32(exp_double(y))


@helper
def exp_double(y):
    """e^y in double, to about 1e-15, by its series (mirostat and powers only)."""
    if not (y > -700.0 and y < 700.0):
        return y + np.inf if y >= 700.0 else 0.0 if y <= -700.0 else y
    n = int(np.floor(y * 1.4426950408889634 + 0.5))
    r = (y - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
    total, term = 1.0, 1.0
    for k in range(1, 16):
        term *= r / k
        total += term
    scale = 2.0 if n > 0 else 0.5
    for _ in range(abs(n)):
        total *= scale
    return total


@helper
def dynamic_temperature(s, t, delta, exponent):
    w = i64p(s)
    if w[TOTAL] <= 1:
        return
    make_sorted(s)
    softmax(s)
    p = f32p(w[E])
    total = 0.0
    for i in range(w[N]):
        if p[i] > np.float32(0):
            total -= np.float64(p[i] * log_exact(p[i]))
    most = -log_exact(np.float32(1) / np.float32(w[TOTAL]))
    low, high = max(np.float32(0), t - delta), t + delta
    temperature(s, low + (high - low) * power(np.float32(total) / most, exponent))
