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
def sum_to():
    """Sum over two axes. a: x (R0, K0, R1, K1), y (K0, K1), R0, K0, R1, K1.

    A unit is a row of y, in blocks of columns.
    """

    def run(a, begin, end, scratch):
        r0, k0, r1, k1 = a[2], a[3], a[4], a[5]
        blocks = (k1 + COLUMNS - 1) // COLUMNS
        for unit in range(begin, end):
            row, column = unit // blocks, unit % blocks * COLUMNS
            y = a[1] + (row * k1 + column) * 4
            if k1 == 1:
                total = np.float32(0)
                for i in range(r0):
                    total += row_sum(a[0] + (i * k0 + row) * r1 * 4, r1)
                f32p(y)[0] = total
            else:
                n = min(COLUMNS, k1 - column)
                out = f32p(y)
                for i in range(n):
                    out[i] = np.float32(0)
                for i in range(r0):
                    for j in range(r1):
                        m.add_elements(y, a[0] + (((i * k0 + row) * r1 + j) * k1 + column) * 4, y, n)

    return run


@kernel("broadcast")
def broadcast(name):
    """Broadcast arithmetic. a: a, b, y, n, d1, d2, then for a and b the strides of axes 0, 1, 2, 3.

    y is (d0, d1, d2, n); a unit is a row of n. Strides count elements; the innermost is 1 or 0.
    """
    formula = vectors(name) if name != "copy" else lambda b, x, s: x[0]
    both = m.elementwise(2, 0, formula)
    left = m.elementwise(1, 1, lambda b, x, s: formula(b, [x[0], s[0]], []))
    right = m.elementwise(1, 1, lambda b, x, s: formula(b, [s[0], x[0]], []))

    def run(a, begin, end, scratch):
        n, d1, d2 = a[3], a[4], a[5]
        for r in range(begin, end):
            i, j, k = r // (d1 * d2), r // d2 % d1, r % d2
            x = a[0] + (i * a[6] + j * a[7] + k * a[8]) * 4
            z = a[1] + (i * a[10] + j * a[11] + k * a[12]) * 4
            y = a[2] + r * n * 4
            if a[9] != 0 and a[13] != 0:
                both(x, z, y, n)
            elif a[9] != 0:
                left(x, y, n, f32p(z)[0])
            elif a[13] != 0:
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
def add_rows():
    """Scatter-add of rows, in order. a: rows (T, K), ids, y (n, K), T, K, n.

    A unit is TABLE_ROWS rows of y.
    """

    def run(a, begin, end, scratch):
        k = a[4]
        first, last = begin * TABLE_ROWS, min(a[5], end * TABLE_ROWS)
        y = f32p(a[2])
        for i in range(first * k, last * k):
            y[i] = np.float32(0)
        add_in_order(a[0], i32p(a[1]), a[2], a[3], k, first, last)

    return run


@kernel("add_rows_to")
def add_rows_to():
    """Scatter-add of rows onto x. a: x (n, K), rows (T, K), ids, y (n, K), T, K, n. y may be x."""

    def run(a, begin, end, scratch):
        k = a[5]
        first, last = begin * TABLE_ROWS, min(a[6], end * TABLE_ROWS)
        if a[0] != a[3]:
            x, y = f32p(a[0]), f32p(a[3])
            for i in range(first * k, last * k):
                y[i] = x[i]
        add_in_order(a[1], i32p(a[2]), a[3], a[4], k, first, last)

    return run


@kernel("copy_block")
def copy_block():
    """Copy with zero padding. a: x, y, bytes of padding before, of x, of y. A unit is 16 KiB of y."""

    def run(a, begin, end, scratch):
        before, middle, total = a[2] // 4, a[3] // 4, a[4] // 4
        x, y = f32p(a[0]), f32p(a[1])
        for i in range(begin * 4096, min(total, end * 4096)):
            y[i] = x[i - before] if before <= i < before + middle else np.float32(0)

    return run
