"""Sampling kernels: sampled ids and log-probabilities. A unit is one row of logits, or all of a sequence.

Consecutive rows with the same slot (a token and its drafts) are one unit. The random numbers that
earlier rows consumed decide which ones later rows get, as if they were sampled in separate steps."""

from __future__ import annotations

import numpy as np

from logitless.backends.cpu.kernels.ir.registry import bits_of, f32p, f64p, i32p, i64p, kernel, u32p
from logitless.backends.cpu.kernels.ir.scalar_math import log_exact
from logitless.backends.cpu.kernels.sampling.candidate_list import (
    candidate,
    first_at,
    helper,
    id_part,
    key_of,
    largest,
    logit_part,
    value_of,
)
from logitless.backends.cpu.kernels.sampling.samplers import (
    AUX,
    BLOCKS,
    COPY,
    DENSE,
    INF,
    LIST,
    MAXED,
    SORTED,
    SUM,
    TMP,
    TOP,
    TOTAL,
    E,
    N,
    V,
    X,
    change,
    dynamic_temperature,
    exp_below,
    exps,
    find_top,
    keep,
    log_of,
    make_list,
    make_sorted,
    min_p,
    power,
    softmax,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
    xtc,
)
from logitless.graph.ops.sampling import samplers as codes

CHOSEN, TOP_BITS = 16, 17  # more words of a row's block: chosen candidate, logit of weight 1
TOTAL_WEIGHT = 18  # a double: sum of all weights
NO_DIST, NO_XTC, TWO_DIST, TWO_XTC = codes.NO_DIST, codes.NO_XTC, codes.TWO_DIST, codes.TWO_XTC


@helper
def set_up(s, scratch, x_at, n):
    """Lay out a row's scratch memory (lowering/sampling.py: scratch_nbytes)."""
    w = i64p(s)
    size = (n + 63) & ~63
    at = scratch + 512
    w[BLOCKS] = at
    at += (size // 16 + 64) & ~63
    w[COPY] = at
    at += size * 4
    w[E] = at
    at += size * 4
    w[LIST] = at
    at += size * 8
    w[AUX] = at
    at += size * 8
    w[TMP] = at
    w[N], w[TOTAL], w[SORTED], w[DENSE], w[X], w[V], w[MAXED], w[TOP] = 0, n, 0, 1, x_at, n, 0, 0


@helper
def allows(mask_at, id):
    return (np.int64(u32p(mask_at)[id >> 5]) >> (id & 31)) & 1 != 0


@helper
def apply_mask(s, mask_at):
    """Copy a row's logits, with -inf where the mask has no bit."""
    w = i64p(s)
    x, y, words = f32p(w[X]), f32p(w[COPY]), u32p(mask_at)
    for i in range(w[V]):
        y[i] = x[i] if (np.int64(words[i >> 5]) >> (i & 31)) & 1 != 0 else -INF
    w[X], w[MAXED] = w[COPY], 0


@helper
def greedy(s):
    w = i64p(s)
    key = find_top(s)
    best = candidate(key, 0)
    if w[DENSE]:
        best = candidate(key, first_at(w[X], w[V], w[BLOCKS], key))
    else:
        words = i64p(w[LIST])
        best = words[0]
        for i in range(w[N]):
            best = max(best, words[i])
        i64p(w[LIST])[0] = best
    i64p(w[LIST])[0] = best
    w[N], w[TOTAL], w[DENSE], w[SORTED], w[CHOSEN] = 1, 1, 0, 1, best
    i32p(s + TOP_BITS * 8)[0] = bits_of(logit_part(best))
    f64p(s)[TOTAL_WEIGHT] = 1.0


@helper
def dist(s, u):
    """Sample in proportion to the weights: the first candidate whose running sum reaches u · total."""
    w = i64p(s)
    top = value_of(find_top(s))
    total = exps(s, top)
    goal, run = total * u, 0.0
    i32p(s + TOP_BITS * 8)[0] = bits_of(top)
    f64p(s)[TOTAL_WEIGHT] = total
    e, words = f32p(w[E]), i64p(w[LIST])
    if w[DENSE]:
        sums = f64p(w[TMP])
        b, last = 0, (w[V] + SUM - 1) // SUM - 1
        while b < last and run + sums[b] < goal:
            run += sums[b]
            b += 1
        at = b * SUM
        end = min(w[V], at + SUM)
        chosen = at
        for i in range(at, end):
            if e[i] > np.float32(0) or goal <= 0.0:
                chosen = i
                run += np.float64(e[i])
                if run >= goal:
                    break
        w[CHOSEN] = candidate(key_of(f32p(w[X])[chosen]), chosen)
        return
    chosen = 0
    for i in range(w[N]):
        if e[i] > np.float32(0):
            chosen = i
        run += np.float64(e[i])
        if run >= goal:
            chosen = i
            break
    w[CHOSEN] = words[chosen]


@helper
def discrete(s, u):
    """std::discrete_distribution over the probabilities at E; returns the index of the chosen."""
    w = i64p(s)
    p, words = f32p(w[E]), i64p(w[LIST])
    total, run = 0.0, 0.0
    for i in range(w[N]):
        total += np.float64(p[i])
    chosen = 0
    for i in range(w[N]):
        if p[i] > np.float32(0):
            chosen = i
        run += np.float64(p[i]) / total if total > 0.0 else 1.0
        if run >= u:
            chosen = i
            break
    w[CHOSEN] = words[chosen]
    i32p(s + TOP_BITS * 8)[0] = bits_of(value_of(find_top(s)))
    f64p(s)[TOTAL_WEIGHT] = exps(s, value_of(find_top(s)))
    return chosen


@helper
def surprise(p):
    return np.float32(-1.4426950408889634 * log_of(p)) if p > np.float32(0) else INF


@helper
def mirostat_1(s, mu, u):
    """Mirostat 1: fit Zipf's exponent to the 100 likeliest, keep as many as give surprise mu."""
    w = i64p(s)
    find_top(s)
    vocabulary = np.float32(w[V])
    n = w[TOTAL]
    dense, top = w[DENSE], value_of(find_top(s))
    total = np.float32(exps(s, top))
    if dense:
        count = largest(w[X], w[V], min(w[V], 128), w[BLOCKS], w[LIST], w[TMP])
    else:
        make_sorted(s)
        count = w[N]
    words = i64p(w[LIST])
    tb, tt = np.float32(0), np.float32(0)
    for i in range(min(99, n - 1)):
        t = log_exact(np.float32(i + 2) / np.float32(i + 1))
        here = exp_below(logit_part(words[i]), top) / total if i < count else np.float32(0)
        after = exp_below(logit_part(words[i + 1]), top) / total if i + 1 < count else np.float32(0)
        tb += t * log_exact(here / after)
        tt += t * t
    s_hat = tb / tt
    eps = s_hat - np.float32(1)
    base = (eps * power(np.float32(2), mu)) / (np.float32(1) - power(vocabulary, -eps))
    k = power(base, np.float32(1) / s_hat) if base >= np.float32(0) else np.float32(0)
    n_keep = 1
    if k >= np.float32(1) and k < np.float32(2147483648):
        n_keep = int(k)
    top_k(s, n_keep)
    softmax(s)


@helper
def mirostat_2(s, mu):
    """Mirostat 2: keep candidates whose surprise is at most mu (at least the likeliest)."""
    w = i64p(s)
    dense = w[DENSE]
    if dense:
        top = value_of(find_top(s))
        total = np.float32(exps(s, top))
        e, x, words = f32p(w[E]), f32p(w[X]), i64p(w[LIST])
        count = 0
        least = power(np.float32(2), -mu) * total
        for i in range(w[V]):
            # certainly too surprising; near the limit the exact surprise decides
            if e[i] < least * np.float32(0.9999):
                continue
            if e[i] > np.float32(0) and not surprise(e[i] / total) > mu:
                words[count] = candidate(key_of(x[i]), i)
                count += 1
        if count == 0:
            top_k(s, 1)
        else:
            w[N], w[DENSE], w[SORTED] = count, 0, 0
            make_sorted(s)
    else:
        make_sorted(s)
        softmax(s)
        p = f32p(w[E])
        count = 0
        while count < w[N] and not surprise(p[count]) > mu:
            count += 1
    w[TOTAL] = max(count, 1)
    keep(s, max(count, 1))
    softmax(s)


@helper
def adaptive(s, target, decay, state, u):
    """Adaptive-p: prefer probabilities near a target, corrected by those chosen before."""
    w = i64p(s)
    make_list(s)
    softmax(s)
    if target < np.float32(0):
        discrete(s, u)
        return
    p, words, before = f32p(w[E]), i64p(w[LIST]), f32p(w[AUX])
    goal = min(max(target, np.float32(0)), np.float32(1))
    if state[1] != np.float32(0):
        goal = np.float32(2) * goal - state[0] / state[1]
    goal = min(max(goal, np.float32(0)), np.float32(1))
    for i in range(w[N]):
        before[i] = p[i]
        d = abs((p[i] - goal) * (np.float32(1) / np.float32(0.3)))
        logit = np.float32(5) - np.float32(10) * d * d / (np.float32(1) + d)
        words[i] = candidate(key_of(logit), id_part(words[i]))
    w[SORTED] = 0
    softmax(s)
    chosen = discrete(s, u)
    state[0] = before[chosen] + decay * state[0]
    state[1] = np.float32(1) + decay * state[1]


@helper
def report(s, n_probs, out_at):
    """Write the probabilities of a row: [.., candidates, probability, ids, probabilities].

    ids are -1 where there are no more."""
    w = i64p(s)
    out, p = i32p(out_at), f32p(out_at)
    top, total = f32p(s + TOP_BITS * 8)[0], f64p(s)[TOTAL_WEIGHT]
    out[1] = w[TOTAL]
    p[2] = exp_below(logit_part(w[CHOSEN]), top) / total if total > 0.0 else np.float32(0)
    if w[DENSE]:
        count = largest(w[X], w[V], min(w[V], n_probs), w[BLOCKS], w[LIST], w[TMP])
    else:
        make_sorted(s)
        count = w[N]
    words = i64p(w[LIST])
    for i in range(n_probs):
        out[3 + i], p[3 + n_probs + i] = -1, np.float32(0)
        if i < count and total > 0.0:
            prob = np.float32(np.float64(exp_below(logit_part(words[i]), top)) / total)
            if prob > np.float32(0):
                out[3 + i], p[3 + n_probs + i] = id_part(words[i]), prob


@helper
def uniform(lo, hi):
    """[0, 1) from two 32-bit draws, like libstdc++'s uniform_real_distribution<double>."""
    u = (np.float64(lo) + np.float64(hi) * 4294967296.0) * (1.0 / 18446744073709551616.0)
    return u if u < 1.0 else 0.9999999999999999


@helper
def sample_row(s, q, chain_at, dist_at, xtc_at, entries, begin, end, state_at):
    """Run a row's sampler chain; returns its flags.

    `q`: the row's params; `entries`: address of [kinds, ids, values]."""
    w, chain, state = i64p(s), i32p(chain_at), f32p(state_at)
    kinds, ids, values = i64p(entries)[0], i64p(entries)[1], i64p(entries)[2]
    min_keep = np.int64(q[codes.MIN_KEEP])
    u = uniform(u32p(dist_at)[0], u32p(dist_at)[1])
    flags = np.int64(NO_DIST | NO_XTC)
    change(s, 0, begin, end, kinds, ids, values, q[0], q[0], q[0])
    step = 0
    while True:
        code = chain[step]
        step += 1
        if code == codes.PENALTIES:
            repeat, frequency, presence = q[codes.REPEAT], q[codes.FREQUENCY], q[codes.PRESENCE]
            change(s, 1, begin, end, kinds, ids, values, repeat, frequency, presence)
        elif code == codes.DRY:
            change(s, 2, begin, end, kinds, ids, values, q[0], q[0], q[0])
        elif code == codes.TOP_N_SIGMA:
            if q[codes.N_SIGMA] > np.float32(0):
                top_n_sigma(s, q[codes.N_SIGMA])
        elif code == codes.TOP_K:
            if q[codes.K] > np.float32(0):
                top_k(s, np.int64(min(q[codes.K], np.float32(w[V]))))
        elif code == codes.TYP_P:
            if q[codes.TYPICAL] < np.float32(1):
                typical(s, q[codes.TYPICAL], min_keep)
        elif code == codes.TOP_P:
            if q[codes.P] < np.float32(1):
                top_p(s, q[codes.P], min_keep)
        elif code == codes.MIN_P:
            if q[codes.LEAST_P] > np.float32(0):
                min_p(s, q[codes.LEAST_P], min_keep)
        elif code == codes.XTC:
            probability, threshold = q[codes.XTC_PROBABILITY], q[codes.XTC_THRESHOLD]
            if probability > np.float32(0) and threshold <= np.float32(0.5) and w[TOTAL] >= 2:
                flags &= ~np.int64(NO_XTC)
                chance = np.float32(u32p(xtc_at)[2]) * np.float32(1 / 4294967296)
                if min(chance, np.float32(0.99999994)) <= probability:
                    xtc(s, threshold, min_keep)
        elif code == codes.TEMPERATURE:
            if q[codes.RANGE] > np.float32(0):
                dynamic_temperature(s, q[codes.TEMP], q[codes.RANGE], q[codes.EXPONENT])
            else:
                temperature(s, q[codes.TEMP])
        else:
            break
    if code == codes.DIST:
        dist(s, u)
        return flags & ~np.int64(NO_DIST)
    if code == codes.ADAPTIVE:
        adaptive(s, q[codes.TARGET], q[codes.DECAY], state, u)
    elif code == codes.MIROSTAT_1 or code == codes.MIROSTAT_2:
        if code == codes.MIROSTAT_1:
            mirostat_1(s, state[0], u)
        else:
            mirostat_2(s, state[0])
        p = f32p(w[E])
        chosen = discrete(s, u)
        softmax(s)
        state[0] -= q[codes.ETA] * (surprise(p[chosen]) - q[codes.TAU])
    else:
        greedy(s)
        return flags
    if w[TOTAL] > 1:
        flags &= ~np.int64(NO_DIST)
    return flags


@kernel("sample")
def sample(layout):
    """Sample tokens. `layout`: samplers.LAYOUT, whose numbers are compiled in.

    a: logits, state, params, chain, draws, list_ptr, list_kind, list_id, list_value, slot, out;
    then V, rows, columns of params, of chain, of state, n_probs, slots; then mask and mask_row,
    both 0 without masks."""

    def run(a, begin, end, scratch):
        n, rows, n_params, n_chain, n_state, n_probs, n_slots = a[11], a[12], a[13], a[14], a[15], a[16], a[17]
        ptr, slot, s = i32p(a[5]), i32p(a[9]), scratch
        width = 1 if n_probs == 0 else 3 + 2 * n_probs
        entries = i64p(s + 24 * 8)
        entries[0], entries[1], entries[2] = a[6], a[7], a[8]
        for head in range(begin, end):
            if head > 0 and slot[head] >= 0 and slot[head] == slot[head - 1]:
                continue
            r = head
            draw = 2 * head if a[18] != 0 else head
            draw_xtc = draw
            while True:
                out_at = a[10] + r * width * 4
                out, q = i32p(out_at), f32p(a[2] + r * n_params * 4)
                for i in range(width):
                    out[i] = 0
                chain_at = a[3] + r * n_chain * 4
                mask_row = i32p(a[19])[r] if a[18] != 0 else np.int32(-1)
                if i32p(chain_at)[0] == 0 or mask_row == -2:
                    u32p(out_at)[0] = NO_DIST | NO_XTC
                else:
                    state_at = a[1] + min(max(slot[r], 0), n_slots - 1) * n_state * 4
                    state = f32p(state_at)
                    for i in range(2):
                        if q[codes.RESET + i] == q[codes.RESET + i]:
                            state[i] = q[codes.RESET + i]
                    mask_at = np.int64(0)
                    if mask_row >= 0:
                        mask_at = a[18] + mask_row * ((n + 31) >> 5) * 4
                    before_0, before_1 = state[0], state[1]
                    used_dist, used_xtc, again = 0, 0, False
                    while True:  # once, or again with the mask
                        set_up(s, scratch, a[0] + r * n * 4, n)
                        if again:
                            apply_mask(s, mask_at)
                        flags = sample_row(
                            s,
                            q,
                            chain_at,
                            a[4] + draw * 16,
                            a[4] + draw_xtc * 16,
                            s + 24 * 8,
                            np.int64(ptr[r]),
                            np.int64(ptr[r + 1]),
                            state_at,
                        )
                        n_dist, n_xtc = np.int64((flags & NO_DIST) == 0), np.int64((flags & NO_XTC) == 0)
                        used_dist += n_dist
                        used_xtc += n_xtc
                        draw += n_dist
                        draw_xtc += n_xtc
                        if again or mask_at == 0 or allows(mask_at, id_part(i64p(s)[CHOSEN])):
                            break
                        again = True
                        at = 0
                        while i32p(chain_at)[at] != 0 and i32p(chain_at)[at] != codes.ADAPTIVE:
                            at += 1
                        if i32p(chain_at)[at] != 0:  # its state covers accepted tokens only
                            state[0], state[1] = before_0, before_1
                    if n_probs > 0:
                        report(s, n_probs, out_at)
                    flags = NO_DIST if used_dist == 0 else TWO_DIST if used_dist == 2 else 0
                    flags |= NO_XTC if used_xtc == 0 else TWO_XTC if used_xtc == 2 else 0
                    u32p(out_at)[0] = np.uint32(id_part(i64p(s)[CHOSEN]) | flags)
                r += 1
                if r >= rows or slot[r] < 0 or slot[r] != slot[head]:
                    break

    run.fastmath = False
    return run


@kernel("log_probs")
def log_probs(layout):
    """Log-probabilities of the n_top likeliest tokens and of a target."""

    def run(logits_at, ids_at, targets_at, y_at, n, id_columns, n_top, begin, end, scratch):
        s = scratch
        for r in range(begin, end):
            x, out = f32p(logits_at + r * n * 4), f32p(y_at + r * (1 + 2 * n_top) * 4)
            set_up(s, scratch, logits_at + r * n * 4, n)
            w = i64p(s)
            top = value_of(find_top(s))
            total = exps(s, top)
            rest = log_exact(np.float32(total)) if total > 0.0 else np.float32(0)
            target = np.int64(i32p(targets_at)[r])
            if target < 0:
                target = np.int64(i32p(ids_at + r * id_columns * 4)[0]) & codes.ID
            target = min(target, n - 1)
            out[0] = (x[target] - top) - rest
            count = 0
            if n_top > 0:
                count = largest(w[X], n, min(n, n_top), w[BLOCKS], w[LIST], w[TMP])
            words = i64p(w[LIST])
            for i in range(n_top):
                out[1 + i], out[1 + n_top + i] = np.float32(-1), -INF
                if i < count:
                    out[1 + i] = np.float32(id_part(words[i]))
                    out[1 + n_top + i] = (logit_part(words[i]) - top) - rest

    run.fastmath = False
    return run
