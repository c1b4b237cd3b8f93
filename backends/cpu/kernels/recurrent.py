"""Layers with a state (graph/ops/recurrent.py): short convolutions, the gated delta rule, and the gradients of both.

Which state row t begins with says `begin` (i32; -1: what is left of the row before), where it is kept `end` (address 0:
nowhere).
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from backends.cpu.kernels import emit as e
from backends.cpu.kernels.registry import bits_f32, f32p, i32p, kernel

COLUMNS = 64  # of a unit of a convolution
WIDTH = 32  # elements of a head's values that a unit of the delta rule has
AT_ONCE = 4  # rows of a state that one turn of its loops takes, each with sums of its own
SAVED = 16  # rows from one state to the next that a gradient keeps


@njit(forceinline=True)
def _seen(x, states, state, first, t, columns, size, c0):
    """The address of row t of the sequence that begins in row `first`, at column c0."""
    if t >= first:
        return x + (t * columns + c0) * 4
    return states + ((state * (size - 1) + size - 1 + t - first) * columns + c0) * 4


@kernel("text_begins")
def text_begins():
    """a: start, y, length. A unit is a row."""

    def run(a, begin, end, scratch):
        start, y, length = i32p(a[0]), i32p(a[1]), a[2]
        for t in range(begin, end):
            y[t] = 0 if start[t] == t % length else -1

    return run


@kernel("causal_conv")
def causal_conv():
    """a: x, w, states, begin, end, y, T, C, K. A unit is 64 columns. Scratch: their weights, by taps."""

    def run(a, begin, end, scratch):
        x, states, rows, columns, size = a[0], a[2], a[6], a[7], a[8]
        begins, ends, taps = i32p(a[3]), i32p(a[4]), f32p(scratch)
        for unit in range(begin, end):
            c0 = unit * COLUMNS
            n = min(COLUMNS, columns - c0)
            w = f32p(a[1] + c0 * size * 4)
            for j in range(size):
                for c in range(n):
                    taps[j * COLUMNS + c] = w[c * size + j]
            first, state = 0, 0
            for t in range(rows):
                if begins[t] >= 0:
                    first, state = t, np.int64(begins[t])
                y = f32p(a[5] + (t * columns + c0) * 4)
                for c in range(n):
                    y[c] = np.float32(0)
                for j in range(size):
                    source = f32p(_seen(x, states, state, first, t - size + 1 + j, columns, size, c0))
                    for c in range(n):
                        y[c] += taps[j * COLUMNS + c] * source[c]
                if a[4] != 0 and ends[t] >= 0:
                    for j in range(size - 1):
                        source = f32p(_seen(x, states, state, first, t - size + 2 + j, columns, size, c0))
                        kept = f32p(states + ((np.int64(ends[t]) * (size - 1) + j) * columns + c0) * 4)
                        for c in range(n):
                            kept[c] = source[c]

    return run


@kernel("causal_conv_back")
def causal_conv_back():
    """a: g, x, w, states, begin, y (of x, then of w), T, C, K. A unit is 64 columns. Scratch: the gradient of w."""

    def run(a, begin, end, scratch):
        rows, columns, size = a[6], a[7], a[8]
        begins, of_taps = i32p(a[4]), f32p(scratch)
        for unit in range(begin, end):
            c0 = unit * COLUMNS
            n = min(COLUMNS, columns - c0)
            w, of_w = f32p(a[2] + c0 * size * 4), f32p(a[5] + (rows * columns + c0 * size) * 4)
            for i in range(size * COLUMNS):
                of_taps[i] = np.float32(0)
            for t in range(rows):
                of_x = f32p(a[5] + (t * columns + c0) * 4)
                for c in range(n):
                    of_x[c] = np.float32(0)
            first, state = 0, 0
            for t in range(rows):
                if begins[t] >= 0:
                    first, state = t, np.int64(begins[t])
                g = f32p(a[0] + (t * columns + c0) * 4)
                for j in range(size):
                    p = t - size + 1 + j
                    source = f32p(_seen(a[1], a[3], state, first, p, columns, size, c0))
                    for c in range(n):
                        of_taps[j * COLUMNS + c] += g[c] * source[c]
                    if p >= first:
                        of_x = f32p(a[5] + (p * columns + c0) * 4)
                        for c in range(n):
                            of_x[c] += g[c] * w[c * size + j]
            for c in range(n):
                for j in range(size):
                    of_w[c * size + j] = of_taps[j * COLUMNS + c]

    return run


@intrinsic
def _advance(typingctx, s, k, q, v, y, size, decay, beta, scale):
    """One token of WIDTH columns of a head: its state s (D, WIDTH) goes on, y (WIDTH,) is what q finds there."""
    halves = range(WIDTH // 16)

    def codegen(ctx, b, sig, a):
        state, key, query, value, out = (b.inttoptr(x, e.I8P) for x in a[:5])
        count, zero = a[5], e.each(0.0)
        faded, learned, scaled = (e.splat(b, x) for x in a[6:])

        def row(i):
            return [e.at(b, state, b.add(b.mul(i, e.i64(4 * WIDTH)), e.i64(64 * h))) for h in halves]

        def number(base, i):
            return e.splat(b, e.load(b, e.at(b, base, b.mul(i, e.i64(4))), e.F32, 4))

        def turn(body):
            """Sums of body(row of the state, which sums) over all rows, halves apart."""

            def several(i, sums):
                found = []
                for n in range(AT_ONCE):
                    found += body(b.add(i, e.i64(n)), sums[n * len(halves) : (n + 1) * len(halves)])
                return found

            sums = e.loop(b, e.i64(0), count, [zero] * AT_ONCE * len(halves), several, AT_ONCE)
            pairs = [[sums[n * len(halves) + h] for n in range(AT_ONCE)] for h in halves]
            return [b.fadd(b.fadd(p[0], p[1]), b.fadd(p[2], p[3])) for p in pairs]

        def recall(i, sums):
            k_i = number(key, i)
            return [e.fma(b, e.load(b, p, e.V16F, 4), k_i, x) for p, x in zip(row(i), sums, strict=True)]

        known = turn(recall)
        missing = [
            b.fmul(learned, b.fsub(e.load(b, e.at(b, value, 64 * h), e.V16F, 4), b.fmul(faded, known[h])))
            for h in halves
        ]

        def learn(i, sums):
            k_i, q_i, found = number(key, i), number(query, i), []
            for p, u, x in zip(row(i), missing, sums, strict=True):
                new = e.fma(b, k_i, u, b.fmul(faded, e.load(b, p, e.V16F, 4)))
                e.store(b, new, p, 4)
                found.append(e.fma(b, new, q_i, x))
            return found

        for h, x in zip(halves, turn(learn), strict=True):
            e.store(b, b.fmul(scaled, x), e.at(b, out, 64 * h), 4)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 6, *[types.float32] * 3), codegen


@njit(forceinline=True)
def _copy(source, s_step, target, t_step, rows, n):
    """Rows of n numbers, `step` numbers apart."""
    for i in range(rows):
        x, y = f32p(source + i * s_step * 4), f32p(target + i * t_step * 4)
        for j in range(n):
            y[j] = x[j]


@kernel("gated_delta_rule")
def gated_delta_rule():
    """a: q, k, v, decay, beta, states, begin, end, y, T, H, H_k, D, E, scale bits. A unit is WIDTH columns of a head.

    Scratch: its state, and a row each of v and y.
    """

    def run(a, begin, end, scratch):
        rows, heads, k_heads, size, width, scale = a[9], a[10], a[11], a[12], a[13], bits_f32(a[14])
        decay, beta, begins, ends = f32p(a[3]), f32p(a[4]), i32p(a[6]), i32p(a[7])
        parts = (width + WIDTH - 1) // WIDTH
        v_row = scratch + size * WIDTH * 4
        y_row = v_row + WIDTH * 4
        for i in range((size + 1) * WIDTH):  # columns that are none stay zero
            f32p(scratch)[i] = np.float32(0)
        for unit in range(begin, end):
            h, c0 = unit // parts, unit % parts * WIDTH
            n, k_head = min(WIDTH, width - c0), h % k_heads
            place = a[5] + (h * size * width + c0) * 4  # of this unit's part of the first state
            for t in range(rows):
                if begins[t] >= 0:
                    _copy(place + np.int64(begins[t]) * heads * size * width * 4, width, scratch, WIDTH, size, n)
                at, k_at = (t * heads + h) * width + c0, (t * k_heads + k_head) * size * 4
                _copy(a[2] + at * 4, 0, v_row, 0, 1, n)
                i = t * heads + h
                _advance(scratch, a[1] + k_at, a[0] + k_at, v_row, y_row, size, decay[i], beta[i], scale)
                _copy(y_row, 0, a[8] + at * 4, 0, 1, n)
                if a[7] != 0 and ends[t] >= 0:
                    _copy(scratch, WIDTH, place + np.int64(ends[t]) * heads * size * width * 4, width, size, n)

    return run


@njit(forceinline=True)
def _forward(s, k, v, decay, beta, missing, size, width):
    """One token of a whole head: its state s (D, E) goes on, `missing` (E,) is what it did not know of v."""
    state, key, value, miss = f32p(s), f32p(k), f32p(v), f32p(missing)
    for c in range(width):
        miss[c] = value[c]
    for d in range(size):
        for c in range(width):
            state[d * width + c] *= decay
            miss[c] -= state[d * width + c] * key[d]
    for d in range(size):
        for c in range(width):
            state[d * width + c] += key[d] * beta * miss[c]


@kernel("gated_delta_rule_back")
def gated_delta_rule_back():
    """a: g, q, k, v, decay, beta, states, begin, y (of q, k, v, decay, beta), T, H, H_k, D, E, scale bits. A unit is a
    head of keys.

    Scratch: states before each SAVED-th row, then before each row of such a stretch, the last state, its gradient; what
    was missing in rows of a stretch, and two rows.
    """

    def run(a, begin, end, scratch):
        rows, heads, k_heads, size, width, scale = a[9], a[10], a[11], a[12], a[13], bits_f32(a[14])
        begins = i32p(a[7])
        of_q = a[8]
        of_k = of_q + rows * k_heads * size * 4
        of_v = of_k + rows * k_heads * size * 4
        of_decay = of_v + rows * heads * width * 4
        of_beta = of_decay + rows * heads * 4
        whole = size * width
        stretches = (rows + SAVED - 1) // SAVED
        olds = scratch + stretches * whole * 4
        s, ds = olds + SAVED * whole * 4, f32p(olds + (SAVED + 1) * whole * 4)
        missed = olds + (SAVED + 2) * whole * 4
        of_sum = f32p(missed + SAVED * width * 4)
        for k_head in range(begin, end):
            for t in range(rows):
                at = (t * k_heads + k_head) * size * 4
                dq, dk = f32p(of_q + at), f32p(of_k + at)
                for d in range(size):
                    dq[d] = np.float32(0)
                    dk[d] = np.float32(0)
            for h in range(k_head, heads, k_heads):
                place = a[6] + h * whole * 4
                for t in range(rows):
                    if begins[t] >= 0:
                        _copy(place + np.int64(begins[t]) * heads * whole * 4, 0, s, 0, 1, whole)
                    if t % SAVED == 0:
                        _copy(s, 0, scratch + t // SAVED * whole * 4, 0, 1, whole)
                    i, k = t * heads + h, a[2] + (t * k_heads + k_head) * size * 4
                    _forward(s, k, a[3] + i * width * 4, f32p(a[4])[i], f32p(a[5])[i], missed, size, width)
                for j in range(whole):
                    ds[j] = np.float32(0)
                for stretch in range(stretches - 1, -1, -1):
                    t0 = stretch * SAVED
                    stop = min(rows, t0 + SAVED)
                    _copy(scratch + stretch * whole * 4, 0, s, 0, 1, whole)
                    for t in range(t0, stop):
                        if begins[t] >= 0:
                            _copy(place + np.int64(begins[t]) * heads * whole * 4, 0, s, 0, 1, whole)
                        _copy(s, 0, olds + (t - t0) * whole * 4, 0, 1, whole)
                        i, k = t * heads + h, a[2] + (t * k_heads + k_head) * size * 4
                        miss = missed + (t - t0) * width * 4
                        _forward(s, k, a[3] + i * width * 4, f32p(a[4])[i], f32p(a[5])[i], miss, size, width)
                    for t in range(stop - 1, t0 - 1, -1):
                        i, at = t * heads + h, (t * k_heads + k_head) * size * 4
                        g, dv = f32p(a[0] + i * width * 4), f32p(of_v + i * width * 4)
                        q, k, dq, dk = f32p(a[1] + at), f32p(a[2] + at), f32p(of_q + at), f32p(of_k + at)
                        old, miss = f32p(olds + (t - t0) * whole * 4), f32p(missed + (t - t0) * width * 4)
                        decay, beta = f32p(a[4])[i], f32p(a[5])[i]
                        for c in range(width):
                            of_sum[c] = np.float32(0)
                        for d in range(size):
                            found, own = np.float32(0), np.float32(0)
                            for c in range(width):
                                new = decay * old[d * width + c] + k[d] * beta * miss[c]
                                found += new * g[c]
                                ds[d * width + c] += scale * q[d] * g[c]
                                own += ds[d * width + c] * miss[c]
                                of_sum[c] += ds[d * width + c] * k[d]
                            dq[d] += scale * found
                            dk[d] += beta * own
                        total = np.float32(0)
                        for c in range(width):
                            total += of_sum[c] * miss[c]
                            dv[c] = beta * of_sum[c]
                        f32p(of_beta)[i] = total
                        total = np.float32(0)
                        for d in range(size):
                            own = np.float32(0)
                            for c in range(width):
                                own += old[d * width + c] * dv[c]
                                ds[d * width + c] -= k[d] * dv[c]
                                total += ds[d * width + c] * old[d * width + c]
                                ds[d * width + c] *= decay
                            dk[d] -= decay * own
                        f32p(of_decay)[i] = total
                        if begins[t] >= 0:
                            for j in range(whole):
                                ds[j] = np.float32(0)

    return run
