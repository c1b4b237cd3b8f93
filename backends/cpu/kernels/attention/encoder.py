"""Encoder (embedding model) kernels: layer norm, bidirectional attention, mean pooling."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.causal import BLOCK, unit_addresses
from logitless.backends.cpu.kernels.ir.math import add_elements, scale_elements
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel, sqrt_f32
from logitless.backends.cpu.kernels.ir.row_reduce import row_exp_sum, row_max
from logitless.backends.cpu.kernels.matmul.gemm import small_gemm
from logitless.backends.cpu.kernels.training.loss import exp_scaled


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


@kernel("full_attention")
def full_attention():
    """Bidirectional attention, within a sliding window if `reach` is below the length.

    a: q, k, v, count, y, length, H, H_kv, D, scale bits, reach. A unit is a (window, head) pair.
    Scratch: scores, GEMM work.
    """

    def run(a, begin, end, scratch):
        length, heads, kv_heads, size = a[5], a[6], a[7], a[8]
        scale, reach = bits_f32(a[9]), a[10]
        q_row, k_row = heads * size * 4, kv_heads * size * 4
        row_nbytes = length * 4
        work = scratch + BLOCK * row_nbytes
        for unit in range(begin, end):
            w, q, k, v, y = unit_addresses(unit, a[0], a[1], a[2], a[4], length, heads, kv_heads, size)
            n = np.int64(i32p(a[3])[w])
            for t0 in range(0, length, BLOCK):
                rows = min(length, t0 + BLOCK) - t0
                first, last = max(0, t0 - reach), min(n, t0 + rows + reach)
                if last <= first:  # these rows are padding
                    for t in range(rows):
                        clear(y + (t0 + t) * q_row, size)
                    continue
                kv_at, width = first * k_row, last - first
                small_gemm(
                    q + t0 * q_row, q_row, 1, k + kv_at, k_row, 1, scratch, row_nbytes, rows, width, size, 0, work
                )
                for t in range(rows):
                    at = scratch + t * row_nbytes
                    low = min(width, max(0, t0 + t - reach - first))
                    n_visible = max(0, min(width, t0 + t + reach + 1 - first) - low)
                    clear(at, low)
                    clear(at + (low + n_visible) * 4, width - low - n_visible)
                    if n_visible > 0:
                        at += low * 4
                        scale_elements(at, at, n_visible, scale)
                        top = row_max(at, n_visible)
                        exp_scaled(at, at, n_visible, top, np.float32(1) / row_exp_sum(at, n_visible, top))
                small_gemm(
                    scratch, row_nbytes, 1, v + kv_at, k_row, 0, y + t0 * q_row, q_row, rows, size, width, 0, work
                )

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
