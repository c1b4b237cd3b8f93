"""Attention of rows to a range of rows of their window: causal, two-way and full attention forward.

Scores are transposed, a column for each query, and keys come in tiles with an online softmax, so
that weights are a packed operand of their product with values. The gradient is causal.py's.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.attention.causal import soft_cap, unit_addresses
from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel
from logitless.backends.cpu.kernels.matmul.gemm import copy_a_panels, pack_a, pack_b
from logitless.backends.cpu.kernels.matmul.gemm_tile import MT, NR, compute_tile
from logitless.backends.cpu.kernels.matmul.layout import ENCODER_KEYS, ENCODER_ROWS


@njit(forceinline=True)
def clear(at, n):
    x = f32p(at)
    for i in range(n):
        x[i] = np.float32(0)


LOWEST = -3.4028234663852886e38  # finite: minus infinity less itself would be NaN
LOG2_E = np.float32(1.4426950408889634)


@intrinsic
def softmax_columns(typingctx, scores, n, tops, totals, sums, size, scale):
    """Softmax step of a block: n rows of NR scores → weights, in place, a column for each query.

    tops: the highest scores so far, totals: the sums of weights, sums: `size` rows of weighted
    values, all of which are rescaled to the new tops. `scale` is for powers of two.
    """

    def codegen(ctx, b, sig, args):
        S, TOPS, TOTALS, SUMS = (b.inttoptr(args[i], e.I8P) for i in (0, 2, 3, 4))
        n, size = args[1], args[5]
        scale = e.splat(b, args[6])
        for offset in range(0, 4 * NR, 64):

            def row(p, i, offset=offset):
                return e.at(b, p, b.add(b.mul(i, e.i64(4 * NR)), e.i64(offset)))

            def highest(i, values, row=row):
                return [m.maximum(b, values[0], e.load(b, row(S, i), e.V16F, 4))]

            old = e.load(b, row(TOPS, e.i64(0)), e.V16F, 4)
            (top,) = e.loop(b, e.i64(0), n, [old], highest)
            e.store(b, top, row(TOPS, e.i64(0)), 4)
            shrink = m.exp2(b, b.fmul(b.fsub(old, top, flags=m.STRICT), scale))

            def weigh(i, values, row=row, top=top):
                above = b.fsub(e.load(b, row(S, i), e.V16F, 4), top, flags=m.STRICT)  # exact of large scores
                x = b.fmul(above, scale)
                weight = b.select(b.fcmp_ordered("<", x, m.fill(16, -126.0)), m.fill(16, 0.0), m.exp2(b, x))
                e.store(b, weight, row(S, i), 4)
                return [b.fadd(values[0], weight, flags=m.STRICT)]

            total = b.fmul(e.load(b, row(TOTALS, e.i64(0)), e.V16F, 4), shrink)
            (total,) = e.loop(b, e.i64(0), n, [total], weigh)
            e.store(b, total, row(TOTALS, e.i64(0)), 4)

            def rescale(d, _, row=row, shrink=shrink):
                e.store(b, b.fmul(e.load(b, row(SUMS, d), e.V16F, 4), shrink), row(SUMS, d), 4)
                return []

            e.loop(b, e.i64(0), size, [], rescale)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32), codegen


@njit(forceinline=True)
def range_of(start, last, t, kind, reach_back, reach_ahead):
    """First and last row that row t of a window sees. `start`, `last`: see range_attention."""
    if kind == FULL:
        return max(np.int64(0), t - reach_back), min(np.int64(i32p(last)[0]) - 1, t + reach_ahead)
    first = np.int64(i32p(start)[t])
    if reach_back >= 0:
        first = max(first, t - reach_back)
    return first, (np.int64(i32p(last)[t]) if kind == BOUNDS else t)


@njit(forceinline=True)
def mask_unseen(scores, firsts, lasts, s0, begin, end):
    """Minus infinity for keys s0 + begin…s0 + end − 1 outside of each query's range."""
    x, first, last = f32p(scores), i32p(firsts), i32p(lasts)
    for i in range(begin, end):
        s = np.int32(s0 + i)
        for j in range(NR):
            if s < first[j] or s > last[j]:
                x[i * NR + j] = np.float32(-np.inf)


@njit(forceinline=True)
def add_bias(scores, bias, n, rows, scale):
    """Scores of n keys and `rows` queries times `scale`, plus their bias; `bias`: address of the first of both."""
    x, of = f32p(scores), f32p(bias)
    for i in range(n):
        for j in range(rows):
            x[i * NR + j] = x[i * NR + j] * scale + of[i - j]


@njit(forceinline=True)
def write_rows(sums, totals, y, y_nbytes, rows, size):
    """Rows of y: columns of `sums` divided by their totals; 0 where a total is 0."""
    x, total = f32p(sums), f32p(totals)
    for j in range(rows):
        out = f32p(y + j * y_nbytes)
        inverse = np.float32(1) / total[j] if total[j] != np.float32(0) else np.float32(0)
        for d in range(size):
            out[d] = x[d * NR + j] * inverse


CAUSAL, BOUNDS, FULL = range(3)  # the last row that a row sees: itself, one of its own, that of its window


@kernel("range_attention")
def range_attention():
    """Attention of each row to a range of the rows of its window.

    `start` (kind CAUSAL and BOUNDS): each row's first row. `last`: each row's last one (BOUNDS, from
    number `to_last` on), or each window's number of rows (FULL). `reach_back`, `reach_ahead`: rows
    that a row sees at most in front of it (−1: all), and behind it (FULL). `bias` (H, n_bias):
    biases of scores by the distance of key and query; n_bias 0: none.

    A unit is ENCODER_ROWS query rows of a (window, head) pair. ENCODER_KEYS keys and values are
    packed at a time, from the window's first row on, so that a row's bits do not follow from others.

    Scratch, in floats: packed queries and weighted values of each strip of NR queries, (D, NR) each;
    their totals and tops; ranges of a strip (2, NR); scores (keys, NR); tiles of keys and of values.
    """
    n_strips = (ENCODER_ROWS + NR - 1) // NR

    def run(
        q_at, k_at, v_at, start_at, y_at, last_at, bias_at, n_bias, to_last, kind, length, heads, kv_heads, size,
        scale_bits, cap_bits, reach_back, reach_ahead, begin, end, scratch,
    ):  # fmt: skip
        scale, cap = bits_f32(scale_bits), bits_f32(cap_bits)
        weigh = LOG2_E if cap > np.float32(0) or n_bias > 0 else scale * LOG2_E
        q_row, k_row = heads * size * 4, kv_heads * size * 4
        strip_nbytes, panel_nbytes = size * NR * 4, ENCODER_KEYS * MT * 4
        sums = scratch + n_strips * strip_nbytes
        totals = sums + n_strips * strip_nbytes
        tops = totals + n_strips * NR * 4
        firsts = tops + n_strips * NR * 4
        lasts = firsts + n_strips * NR * 4
        scores = lasts + n_strips * NR * 4
        keys = scores + ENCODER_KEYS * NR * 4
        values = keys + (ENCODER_KEYS * size + 16) * 4
        parts = (length + ENCODER_ROWS - 1) // ENCODER_ROWS
        for unit in range(begin, end):
            w, q, k, v, y = unit_addresses(unit // parts, q_at, k_at, v_at, y_at, length, heads, kv_heads, size)
            start, last = start_at + w * length * 4, last_at + (w if kind == FULL else to_last + w * length) * 4
            t0 = unit % parts * ENCODER_ROWS
            t1 = min(length, t0 + ENCODER_ROWS)
            clear(sums, n_strips * (size + 1) * NR)
            highest, first, final = f32p(tops), i32p(firsts), i32p(lasts)
            lowest_row, highest_row = length, np.int64(-1)
            for i in range(n_strips * NR):
                highest[i] = np.float32(LOWEST)
                first[i], final[i] = np.int32(1), np.int32(0)  # nothing
                if t0 + i < t1:
                    a, z = range_of(start, last, t0 + i, kind, reach_back, reach_ahead)
                    first[i], final[i] = np.int32(a), np.int32(z)
                    lowest_row, highest_row = min(lowest_row, a), max(highest_row, z)
            for t in range(t0, t1, NR):
                at = (t - t0) // NR * strip_nbytes
                pack_b(q + t * q_row, q_row, min(NR, t1 - t), size, scratch + at)
            for s0 in range(lowest_row // ENCODER_KEYS * ENCODER_KEYS, highest_row + 1, ENCODER_KEYS):
                n_keys = min(ENCODER_KEYS, highest_row + 1 - s0)
                for r in range(0, n_keys, MT):
                    pack_a(k + (s0 + r) * k_row, k_row, min(MT, n_keys - r), size, keys + r * size * 4)
                copy_a_panels(v + s0 * k_row, k_row, size, n_keys, values, panel_nbytes)
                for t in range(t0, t1, NR):
                    strip, rows = (t - t0) // NR, min(NR, t1 - t)
                    a, z, inner_a, inner_z = length, np.int64(-1), np.int64(0), length
                    for j in range(strip * NR, strip * NR + rows):
                        a, z = min(a, np.int64(first[j])), max(z, np.int64(final[j]))
                        inner_a, inner_z = max(inner_a, np.int64(first[j])), min(inner_z, np.int64(final[j]))
                    n = min(n_keys, z + 1 - s0)
                    if n <= 0 or s0 + n <= a:
                        continue
                    for r in range(0, n, MT):
                        at = scores + r * NR * 4
                        compute_tile(keys + r * size * 4, scratch + strip * strip_nbytes, at, NR * 4, size, 1, MT, NR)
                    if cap > np.float32(0):
                        soft_cap(scores, scores, n * NR, scale / cap, cap)
                    if n_bias > 0:
                        of = unit // parts % heads * n_bias + n_bias // 2 + s0 - t
                        add_bias(scores, bias_at + of * 4, n, rows, scale)
                    ranges = strip * NR * 4
                    below, above = max(np.int64(0), min(n, inner_a - s0)), max(np.int64(0), min(n, inner_z + 1 - s0))
                    mask_unseen(scores, firsts + ranges, lasts + ranges, s0, 0, below)
                    mask_unseen(scores, firsts + ranges, lasts + ranges, s0, max(below, above), n)
                    to = sums + strip * strip_nbytes
                    softmax_columns(scores, n, tops + strip * NR * 4, totals + strip * NR * 4, to, size, weigh)
                    for d in range(0, size, MT):
                        at = values + d // MT * panel_nbytes
                        compute_tile(at, scores, to + d * NR * 4, NR * 4, n, 0, min(MT, size - d), NR)
            for t in range(t0, t1, NR):
                strip = (t - t0) // NR
                to, total = sums + strip * strip_nbytes, totals + strip * NR * 4
                write_rows(to, total, y + t * q_row, q_row, min(NR, t1 - t), size)

    return run
