"""Gradient of causal attention over the rows of packed training samples, as small GEMMs.

A block of BLOCK query rows of one head meets every key that any of its rows sees. Its attention
weights are complete, so the softmax is the plain one. A unit is a (window, KV head) pair, whose
rows no other unit writes. The forward pass is ranges.py's.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel
from logitless.backends.cpu.kernels.ir.row_reduce import row_dot, row_exp_sum, row_max
from logitless.backends.cpu.kernels.matmul.gemm import small_gemm
from logitless.backends.cpu.kernels.training.loss import exp_scaled

BLOCK = 48


def _slope(b, x, scale, cap_inverse):
    part = b.fmul(x, cap_inverse)
    return b.fmul(scale, b.fsub(m.fill(x.type.count, 1.0), b.fmul(part, part)))


soft_cap = m.elementwise(1, 2, lambda b, x, s: b.fmul(s[1], m.tanh(b, b.fmul(x[0], s[0]))))
# derivative of a soft-capped score by its product: scale · (1 − (s / cap)²)
slope_of = m.elementwise(1, 2, lambda b, x, s: _slope(b, x[0], *s))
score_slope = m.elementwise(2, 2, lambda b, x, s: b.fmul(s[1], b.fmul(x[0], b.fsub(x[1], s[0]))))
multiply = m.elementwise(2, 0, lambda b, x, s: b.fmul(x[0], x[1]))


@njit(forceinline=True)
def unit_addresses(unit, q, k, v, y, length, heads, kv_heads, size):
    """Window of a unit, and the addresses of its head in q, k, v (of the head's KV head) and y."""
    w, head = unit // heads, unit % heads
    kv = head // (heads // kv_heads)
    at, kv_at = (w * length * heads + head) * size * 4, (w * length * kv_heads + kv) * size * 4
    return w, q + at, k + kv_at, v + kv_at, y + at


@njit(forceinline=True)
def first_visible(start, row, window):
    """First row of its window that a row sees. Rows count from the window's first."""
    first = np.int64(start)
    return max(first, row - window + 1) if window > 0 else first


@njit(forceinline=True)
def last_visible(start, to_last, row):
    """Last row of its window that a row sees: its own, or that at `to_last` behind `start`."""
    return row if to_last == 0 else np.int64(start[to_last + row])


@njit(forceinline=True)
def block_stop(start, to_last, t0, t1):
    highest = t1 - 1
    if to_last != 0:
        for t in range(t0, t1):
            highest = max(highest, last_visible(start, to_last, t))
    return highest + 1


@njit(forceinline=True)
def block_start(start, t0, t1, window):
    lowest = t0
    for t in range(t0, t1):
        lowest = min(lowest, first_visible(start[t], t, window))
    return lowest


@njit(forceinline=True)
def softmax_scores(scores, slopes, row_nbytes, start, to_last, t0, t1, s0, s1, window, scale, cap):
    """Softmax: scores of rows t0…t1 and keys s0…s1 → attention weights, 0 for masked keys.

    `slopes` receives the derivative of the scores by the products if there is a soft cap; 0 skips
    it.
    """
    for t in range(t0, t1):
        row = scores + (t - t0) * row_nbytes
        x = f32p(row)
        first = first_visible(start[t], t, window) - s0
        n = last_visible(start, to_last, t) - s0 + 1 - first
        at = row + first * 4
        if cap > np.float32(0):
            soft_cap(at, at, n, scale / cap, cap)
            if slopes != 0:
                slope_of(at, slopes + (t - t0) * row_nbytes + first * 4, n, scale, np.float32(1) / cap)
        else:
            m.scale_elements(at, at, n, scale)
        top = row_max(at, n)
        exp_scaled(at, at, n, top, np.float32(1) / row_exp_sum(at, n, top))
        for i in range(first):
            x[i] = np.float32(0)
        for i in range(first + n, s1 - s0):
            x[i] = np.float32(0)


@kernel("causal_attention_back")
def causal_attention_back(
    g_at, q_at, k_at, v_at, start_at, y_at, windows, length, heads, kv_heads, size, scale_bits, window, cap_bits,
    to_last, begin, end, scratch,
):  # fmt: skip
    """Gradient of causal attention; y: that of q (N, H, D), k and v (N, H_kv, D).

    `to_last`: numbers in `start` to a row's last visible row; 0: it is the row itself. Scratch:
    weights, their gradients, slopes, GEMM work.
    """
    scale, cap = bits_f32(scale_bits), bits_f32(cap_bits)
    q_row, k_row = heads * size * 4, kv_heads * size * 4
    row_nbytes = length * 4
    p_at = scratch
    ds_at = p_at + BLOCK * row_nbytes
    slope_at = ds_at + BLOCK * row_nbytes
    work = slope_at + BLOCK * row_nbytes
    group = heads // kv_heads
    dk_all = y_at + windows * length * q_row
    dv_all = dk_all + windows * length * k_row
    for unit in range(begin, end):
        w, kv = unit // kv_heads, unit % kv_heads
        start = i32p(start_at + w * length * 4)
        at = w * length * k_row + kv * size * 4
        k, v, dk, dv = k_at + at, v_at + at, dk_all + at, dv_all + at
        for t in range(length):
            x, z = f32p(dk + t * k_row), f32p(dv + t * k_row)
            for i in range(size):
                x[i] = np.float32(0)
                z[i] = np.float32(0)
        for head in range(kv * group, (kv + 1) * group):
            at = w * length * q_row + head * size * 4
            g, q, dq = g_at + at, q_at + at, y_at + at
            for t0 in range(0, length, BLOCK):
                t1 = min(length, t0 + BLOCK)
                s0, s1 = block_start(start, t0, t1, window), block_stop(start, to_last, t0, t1)
                rows, n = t1 - t0, s1 - s0
                qt, gt, dqt, ks, vs = (q + t0 * q_row, g + t0 * q_row, dq + t0 * q_row, k + s0 * k_row, v + s0 * k_row)
                small_gemm(qt, q_row, 1, ks, k_row, 1, p_at, row_nbytes, rows, n, size, 0, work)
                softmax_scores(p_at, slope_at, row_nbytes, start, to_last, t0, t1, s0, s1, window, scale, cap)
                small_gemm(gt, q_row, 1, vs, k_row, 1, ds_at, row_nbytes, rows, n, size, 0, work)
                for t in range(t0, t1):
                    first = first_visible(start[t], t, window) - s0
                    count = last_visible(start, to_last, t) - s0 + 1 - first
                    at = (t - t0) * row_nbytes + first * 4
                    mean = row_dot(p_at + at, ds_at + at, count)
                    score_slope(p_at + at, ds_at + at, ds_at + at, count, mean, scale if cap <= 0 else np.float32(1))
                    if cap > np.float32(0):
                        multiply(ds_at + at, slope_at + at, ds_at + at, count)
                    ds = f32p(ds_at + (t - t0) * row_nbytes)
                    for i in range(first):
                        ds[i] = np.float32(0)
                    for i in range(first + count, n):
                        ds[i] = np.float32(0)
                small_gemm(ds_at, row_nbytes, 1, ks, k_row, 0, dqt, q_row, rows, size, n, 0, work)
                small_gemm(ds_at, row_nbytes, 0, qt, q_row, 0, dk + s0 * k_row, k_row, n, size, rows, 1, work)
                small_gemm(p_at, row_nbytes, 0, gt, q_row, 0, dv + s0 * k_row, k_row, n, size, rows, 1, work)
