"""Slicing kernels: slices, transposes, masks, diagonals, f16 casts, argmax."""

from __future__ import annotations

import numpy as np

from logitless.backends.cpu.kernels.ir.registry import bits_f32, f16_to_f32, f32_to_f16, f32p, i32p, kernel, u16p

CHUNK = 4096  # elements of a unit of `copy` and `cast`


@kernel("copy")
def copy():
    """Copy. a: x, y, n."""

    def run(a, begin, end, scratch):
        x, y = f32p(a[0]), f32p(a[1])
        for i in range(begin * CHUNK, min(a[2], end * CHUNK)):
            y[i] = x[i]

    return run


@kernel("block")
def block(how):
    """Strided copy, or with `how` "add" y += x. a: x, y, n, d1, d2, strides of x, strides of y.

    A unit is a row of n, out of d0 · d1 · d2 rows. Strides count elements of four axes. Both
    addresses are of the first element.
    """
    accumulate = how == "add"

    def run(a, begin, end, scratch):
        n, d1, d2 = a[2], a[3], a[4]
        for r in range(begin, end):
            i, j, k = r // (d1 * d2), r // d2 % d1, r % d2
            x = f32p(a[0] + (i * a[5] + j * a[6] + k * a[7]) * 4)
            y = f32p(a[1] + (i * a[9] + j * a[10] + k * a[11]) * 4)
            sx, sy = a[8], a[12]
            for c in range(n):
                if accumulate:
                    y[c * sy] += x[c * sx]
                else:
                    y[c * sy] = x[c * sx]

    return run


@kernel("causal_mask")
def causal_mask():
    """Causal mask. a: x, y, T, S, past, fill bits. A unit is a row."""

    def run(a, begin, end, scratch):
        n, fill = a[3], bits_f32(a[5])
        for r in range(begin, end):
            x, y = f32p(a[0] + r * n * 4), f32p(a[1] + r * n * 4)
            n_visible = max(0, min(n, r % a[2] + a[4] + 1))
            for i in range(n_visible):
                y[i] = x[i]
            for i in range(n_visible, n):
                y[i] = fill

    return run


@kernel("diag")
def diag():
    """Diagonal matrix. a: x (n,), y (n, n), n. A unit is a row."""

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            y = f32p(a[1] + r * n * 4)
            for i in range(n):
                y[i] = np.float32(0)
            y[r] = f32p(a[0])[r]

    return run


@kernel("cast")
def cast(source, target):
    """Cast f16 ↔ f32. a: x, y, n."""

    def run(a, begin, end, scratch):
        for i in range(begin * CHUNK, min(a[2], end * CHUNK)):
            if source == "f16":
                f32p(a[1])[i] = f16_to_f32(u16p(a[0])[i])
            else:
                u16p(a[1])[i] = f32_to_f16(f32p(a[0])[i])

    return run


@kernel("argmax")
def argmax():
    """Argmax. a: x, y (i32), n. A unit is a row."""

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            x = f32p(a[0] + r * n * 4)
            best = 0
            for i in range(1, n):
                if x[i] > x[best]:
                    best = i
            i32p(a[1])[r] = best

    return run
