"""Slicing kernels: slices, transposes, masks, diagonals, f16 casts, argmax."""

from __future__ import annotations

import numpy as np

from logitless.backends.cpu.kernels.ir.registry import bits_f32, f16_to_f32, f32_to_f16, f32p, i32p, kernel, u16p

CHUNK = 4096  # elements of a unit of `copy` and `cast`


@kernel("copy")
def copy(x_at, y_at, n, begin, end, scratch):
    """Copy. A unit is CHUNK elements."""
    x, y = f32p(x_at), f32p(y_at)
    for i in range(begin * CHUNK, min(n, end * CHUNK)):
        y[i] = x[i]


@kernel("block")
def block(how):
    """Strided copy, or with `how` "add" y += x. x0…x3, y0…y3: strides.

    A unit is a row of n, out of d0 · d1 · d2 rows. Strides count elements of four axes. Both
    addresses are of the first element."""
    accumulate = how == "add"

    def run(x_at, y_at, n, d1, d2, x0, x1, x2, x3, y0, y1, y2, y3, begin, end, scratch):
        for r in range(begin, end):
            i, j, k = r // (d1 * d2), r // d2 % d1, r % d2
            x = f32p(x_at + (i * x0 + j * x1 + k * x2) * 4)
            y = f32p(y_at + (i * y0 + j * y1 + k * y2) * 4)
            sx, sy = x3, y3
            for c in range(n):
                if accumulate:
                    y[c * sy] += x[c * sx]
                else:
                    y[c * sy] = x[c * sx]

    return run


@kernel("causal_mask")
def causal_mask(x_at, y_at, rows, n, past, fill_bits, begin, end, scratch):
    """Causal mask. A unit is a row."""
    fill = bits_f32(fill_bits)
    for r in range(begin, end):
        x, y = f32p(x_at + r * n * 4), f32p(y_at + r * n * 4)
        n_visible = max(0, min(n, r % rows + past + 1))
        for i in range(n_visible):
            y[i] = x[i]
        for i in range(n_visible, n):
            y[i] = fill


@kernel("diag")
def diag(x_at, y_at, n, begin, end, scratch):
    """Diagonal matrix. A unit is a row."""
    for r in range(begin, end):
        y = f32p(y_at + r * n * 4)
        for i in range(n):
            y[i] = np.float32(0)
        y[r] = f32p(x_at)[r]


@kernel("cast")
def cast(source, target):
    """Cast f16 ↔ f32."""

    def run(x_at, y_at, n, begin, end, scratch):
        for i in range(begin * CHUNK, min(n, end * CHUNK)):
            if source == "f16":
                f32p(y_at)[i] = f16_to_f32(u16p(x_at)[i])
            else:
                u16p(y_at)[i] = f32_to_f16(f32p(x_at)[i])

    return run


@kernel("argmax")
def argmax(x_at, y_at, n, begin, end, scratch):
    """Argmax. A unit is a row."""
    for r in range(begin, end):
        x = f32p(x_at + r * n * 4)
        best = 0
        for i in range(1, n):
            if x[i] > x[best]:
                best = i
        i32p(y_at)[r] = best
