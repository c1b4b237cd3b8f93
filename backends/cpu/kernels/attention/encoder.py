"""Encoder (embedding model) kernels: layer norm, bidirectional attention, mean pooling."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.attention.causal import unit_addresses
from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.math import add_elements, scale_elements
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel, sqrt_f32
from logitless.backends.cpu.kernels.matmul.gemm import copy_a_panels, pack_a, pack_b
from logitless.backends.cpu.kernels.matmul.gemm_tile import MT, NR, compute_tile
from logitless.backends.cpu.kernels.matmul.layout import ENCODER_KEYS, ENCODER_ROWS


@kernel("layer_norm")
def layer_norm():
    """Layer norm. a: x, w, b, y, n (row length), eps bits. A unit is a row."""

    def run(a, begin, end, scratch):
        n, eps = a[4], bits_f32(a[5])
        w, b = f32p(a[1]), f32p(a[2])
        for r in range(begin, end):
            x, y = f32p(a[0] + r * n * 4), f32p(a[3] + r * n * 4)
            total = np.float64(0)
            for i in range(n):
                total += x[i]
            mean = np.float32(total / n)
            total = np.float64(0)
            for i in range(n):
                total += np.float64(x[i] - mean) * np.float64(x[i] - mean)
            k = np.float32(1) / sqrt_f32(np.float32(total / n) + eps)
            for i in range(n):
                y[i] = (x[i] - mean) * k * w[i] + b[i]

    return run


@njit(forceinline=True)
def clear(at, n):
    x = f32p(at)
    for i in range(n):
        x[i] = np.float32(0)


LOWEST = -1e30  # below every score, and finite: minus infinity less itself would be NaN
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
            shift = b.fneg(b.fmul(top, scale))

            def weigh(i, values, row=row, shift=shift):
                x = m.fma(b, e.load(b, row(S, i), e.V16F, 4), scale, shift)
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
def mask_far(scores, t, s0, n, reach):
    """Minus infinity for keys s0…s0 + n − 1 that are more than `reach` rows from queries t…"""
    x = f32p(scores)
    for i in range(n):
        for j in range(NR):
            if abs(t + j - s0 - i) > reach:
                x[i * NR + j] = np.float32(-np.inf)


@njit(forceinline=True)
def write_rows(sums, totals, y, y_nbytes, rows, size):
    """Rows of y: columns of `sums` divided by their totals; 0 where a total is 0."""
    x, total = f32p(sums), f32p(totals)
    for j in range(rows):
        out = f32p(y + j * y_nbytes)
        inverse = np.float32(1) / total[j] if total[j] != np.float32(0) else np.float32(0)
        for d in range(size):
            out[d] = x[d * NR + j] * inverse


@kernel("full_attention")
def full_attention():
    """Bidirectional attention, within a sliding window if `reach` is below the length.

    a: q, k, v, count, y, length, H, H_kv, D, scale bits, reach. A unit is ENCODER_ROWS query rows of
    a (window, head) pair. ENCODER_KEYS keys and values are packed at a time; scores are transposed
    (a column for each query), so that weights are a packed operand of their product with values.

    Scratch, in floats: packed queries and weighted values of each strip of NR queries, (D, NR) each;
    their totals and tops; scores (keys, NR); tiles of keys and of values.
    """
    n_strips = (ENCODER_ROWS + NR - 1) // NR

    def run(a, begin, end, scratch):
        length, heads, kv_heads, size = a[5], a[6], a[7], a[8]
        scale, reach = bits_f32(a[9]) * LOG2_E, a[10]
        q_row, k_row = heads * size * 4, kv_heads * size * 4
        strip_nbytes, panel_nbytes = size * NR * 4, ENCODER_KEYS * MT * 4
        sums = scratch + n_strips * strip_nbytes
        totals = sums + n_strips * strip_nbytes
        tops = totals + n_strips * NR * 4
        scores = tops + n_strips * NR * 4
        keys = scores + ENCODER_KEYS * NR * 4
        values = keys + (ENCODER_KEYS * size + 16) * 4
        parts = (length + ENCODER_ROWS - 1) // ENCODER_ROWS
        for unit in range(begin, end):
            w, q, k, v, y = unit_addresses(unit // parts, a[0], a[1], a[2], a[4], length, heads, kv_heads, size)
            t0 = unit % parts * ENCODER_ROWS
            t1 = min(length, t0 + ENCODER_ROWS)
            for t in range(t0, t1, NR):
                at = (t - t0) // NR * strip_nbytes
                pack_b(q + t * q_row, q_row, min(NR, t1 - t), size, scratch + at)
            clear(sums, n_strips * (size + 1) * NR)
            highest = f32p(tops)
            for i in range(n_strips * NR):
                highest[i] = np.float32(LOWEST)
            first, last = max(0, t0 - reach), min(np.int64(i32p(a[3])[w]), t1 + reach)
            for s0 in range(first, last, ENCODER_KEYS):
                n = min(ENCODER_KEYS, last - s0)
                for r in range(0, n, MT):
                    pack_a(k + (s0 + r) * k_row, k_row, min(MT, n - r), size, keys + r * size * 4)
                copy_a_panels(v + s0 * k_row, k_row, size, n, values, panel_nbytes)
                for t in range(t0, t1, NR):
                    if s0 + n <= t - reach or s0 >= t + NR + reach:
                        continue
                    strip = (t - t0) // NR
                    for r in range(0, n, MT):
                        at = scores + r * NR * 4
                        compute_tile(keys + r * size * 4, scratch + strip * strip_nbytes, at, NR * 4, size, 1, MT, NR)
                    if s0 < t + NR - 1 - reach or s0 + n > t + reach + 1:
                        mask_far(scores, t, s0, n, reach)
                    to = sums + strip * strip_nbytes
                    softmax_columns(scores, n, tops + strip * NR * 4, totals + strip * NR * 4, to, size, scale)
                    for d in range(0, size, MT):
                        at, rows = values + d // MT * panel_nbytes, min(MT, size - d)
                        compute_tile(at, scores, to + d * NR * 4, NR * 4, n, 0, rows, NR)
            for t in range(t0, t1, NR):
                strip = (t - t0) // NR
                to, total = sums + strip * strip_nbytes, totals + strip * NR * 4
                write_rows(to, total, y + t * q_row, q_row, min(NR, t1 - t), size)

    return run


@kernel("mean_rows")
def mean_rows():
    """Mean pooling. a: x, first, count, y, n (row length). A unit is a row of y."""

    def run(a, begin, end, scratch):
        n = a[4]
        for r in range(begin, end):
            x, y = a[0] + np.int64(i32p(a[1])[r]) * n * 4, a[3] + r * n * 4
            scale_elements(x, y, n, np.float32(1))
            count = i32p(a[2])[r]
            for i in range(1, count):
                add_elements(y, x + i * n * 4, y, n)
            scale_elements(y, y, n, np.float32(1) / np.float32(count))

    return run
