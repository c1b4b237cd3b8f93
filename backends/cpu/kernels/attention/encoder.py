"""Layer norm, attention of whole texts, and means of rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.causal import BLOCK, of_unit
from logitless.backends.cpu.kernels.ir.math import added, scaled
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel, sqrt_f32
from logitless.backends.cpu.kernels.ir.row_reduce import row_exp_sum, row_max
from logitless.backends.cpu.kernels.matmul.gemm import product
from logitless.backends.cpu.kernels.training.loss import exp_scaled


@kernel("layer_norm")
def layer_norm():
    """a: x, w, b, y, n (row length), eps bits."""

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
    """a: q, k, v, count, y, length, H, H_kv, D, scale bits, reach (the length: all of it). A unit is a window and a
    head. Scratch: scores, work."""

    def run(a, begin, end, scratch):
        length, heads, kv_heads, size = a[5], a[6], a[7], a[8]
        scale, reach = bits_f32(a[9]), a[10]
        q_row, k_row = heads * size * 4, kv_heads * size * 4
        row_nbytes = length * 4
        work = scratch + BLOCK * row_nbytes
        for unit in range(begin, end):
            w, q, k, v, y = of_unit(unit, a[0], a[1], a[2], a[4], length, heads, kv_heads, size)
            n = np.int64(i32p(a[3])[w])
            for t0 in range(0, length, BLOCK):
                rows = min(length, t0 + BLOCK) - t0
                first, stop = max(0, t0 - reach), min(n, t0 + rows + reach)
                if stop <= first:  # nobody is near what fills the window up
                    for t in range(rows):
                        clear(y + (t0 + t) * q_row, size)
                    continue
                seen, width = first * k_row, stop - first
                product(q + t0 * q_row, q_row, 1, k + seen, k_row, 1, scratch, row_nbytes, rows, width, size, 0, work)
                for t in range(rows):
                    at = scratch + t * row_nbytes
                    low = min(width, max(0, t0 + t - reach - first))
                    near = max(0, min(width, t0 + t + reach + 1 - first) - low)
                    clear(at, low)
                    clear(at + (low + near) * 4, width - low - near)
                    if near > 0:
                        at += low * 4
                        scaled(at, at, near, scale)
                        top = row_max(at, near)
                        exp_scaled(at, at, near, top, np.float32(1) / row_exp_sum(at, near, top))
                product(scratch, row_nbytes, 1, v + seen, k_row, 0, y + t0 * q_row, q_row, rows, size, width, 0, work)

    return run


@kernel("mean_rows")
def mean_rows():
    """a: x, first, count, y, n (row length). A unit is a row of y."""

    def run(a, begin, end, scratch):
        n = a[4]
        for r in range(begin, end):
            x, y = a[0] + np.int64(i32p(a[1])[r]) * n * 4, a[3] + r * n * 4
            scaled(x, y, n, np.float32(1))
            count = i32p(a[2])[r]
            for i in range(1, count):
                added(y, x + i * n * 4, y, n)
            scaled(y, y, n, np.float32(1) / np.float32(count))

    return run
