"""Broadcast arithmetic, sums over axes, and scatter-add of rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.elementwise import vectors
from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import f32p, i32p, kernel
from logitless.backends.cpu.kernels.ir.row_reduce import row_sum

COLUMNS = 256  # of a unit of `sum_to`
TABLE_ROWS = 64  # of a unit of `add_rows`


@kernel("sum_to")
def sum_to(x_at, y_at, r0, k0, r1, k1, begin, end, scratch):
    """Sum of x (R0, K0, R1, K1) to y (K0, K1). A unit is a row of y, in blocks of columns."""
    blocks = (k1 + COLUMNS - 1) // COLUMNS
    for unit in range(begin, end):
        row, column = unit // blocks, unit % blocks * COLUMNS
        y = y_at + (row * k1 + column) * 4
        if k1 == 1:
            total = np.float32(0)
            for i in range(r0):
                total += row_sum(x_at + (i * k0 + row) * r1 * 4, r1)
            f32p(y)[0] = total
        else:
            n = min(COLUMNS, k1 - column)
            out = f32p(y)
            for i in range(n):
                out[i] = np.float32(0)
            for i in range(r0):
                for j in range(r1):
                    m.add_elements(y, x_at + (((i * k0 + row) * r1 + j) * k1 + column) * 4, y, n)


@kernel("broadcast")
def broadcast(name):
    """Broadcast arithmetic. a0…a3, b0…b3: strides of axes 0 to 3.

    y is (d0, d1, d2, n); a unit is a row of n. Strides count elements; the innermost is 1 or 0."""
    formula = vectors(name) if name != "copy" else lambda b, x, s: x[0]
    both = m.elementwise(2, 0, formula)
    left = m.elementwise(1, 1, lambda b, x, s: formula(b, [x[0], s[0]], []))
    right = m.elementwise(1, 1, lambda b, x, s: formula(b, [s[0], x[0]], []))

    def run(a_at, b_at, y_at, n, d1, d2, a0, a1, a2, a3, b0, b1, b2, b3, begin, end, scratch):
        for r in range(begin, end):
            i, j, k = r // (d1 * d2), r // d2 % d1, r % d2
            x = a_at + (i * a0 + j * a1 + k * a2) * 4
            z = b_at + (i * b0 + j * b1 + k * b2) * 4
            y = y_at + r * n * 4
            if a3 != 0 and b3 != 0:
                both(x, z, y, n)
            elif a3 != 0:
                left(x, y, n, f32p(z)[0])
            elif b3 != 0:
                right(z, y, n, f32p(x)[0])
            else:
                one = f32p(scratch)
                one[0] = f32p(x)[0]
                left(scratch, scratch + 4, 1, f32p(z)[0])
                out, value = f32p(y), one[1]
                for c in range(n):
                    out[c] = value

    return run


@njit(forceinline=True)
def add_in_order(rows, ids, y, count, k, first, last):
    """Add the rows whose ids lie in first…last to their rows of y."""
    for t in range(count):
        row = np.int64(ids[t])
        if first <= row < last:
            at = y + row * k * 4
            m.add_elements(at, rows + t * k * 4, at, k)


@kernel("add_rows")
def add_rows(rows_at, ids_at, y_at, count, k, n_rows, begin, end, scratch):
    """Scatter-add of rows (T, K) to y (n, K), in order. A unit is TABLE_ROWS rows of y."""
    first, last = begin * TABLE_ROWS, min(n_rows, end * TABLE_ROWS)
    y = f32p(y_at)
    for i in range(first * k, last * k):
        y[i] = np.float32(0)
    add_in_order(rows_at, i32p(ids_at), y_at, count, k, first, last)


@kernel("add_rows_to")
def add_rows_to(x_at, rows_at, ids_at, y_at, count, k, n_rows, begin, end, scratch):
    """Scatter-add of rows (T, K) onto x (n, K); y (n, K) may be x."""
    first, last = begin * TABLE_ROWS, min(n_rows, end * TABLE_ROWS)
    if x_at != y_at:
        x, y = f32p(x_at), f32p(y_at)
        for i in range(first * k, last * k):
            y[i] = x[i]
    add_in_order(rows_at, i32p(ids_at), y_at, count, k, first, last)


@kernel("copy_block")
def copy_block(x_at, y_at, before_nbytes, nbytes, y_nbytes, begin, end, scratch):
    """Copy with `before_nbytes` of zeros before and zeros behind. A unit is 16 KiB of y."""
    before, middle, total = before_nbytes // 4, nbytes // 4, y_nbytes // 4
    x, y = f32p(x_at), f32p(y_at)
    for i in range(begin * 4096, min(total, end * 4096)):
        y[i] = x[i - before] if before <= i < before + middle else np.float32(0)
