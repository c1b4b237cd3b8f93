"""RMS norm kernels, alone or fused with quantization of the result. A unit is a row."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, kernel, sqrt_f32
from logitless.backends.cpu.kernels.ir.row_reduce import row_dot
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK
from logitless.backends.cpu.kernels.matmul.quantize_activations import panel_of, row_quantizer

scale_and_weight = m.elementwise(2, 1, lambda b, x, s: b.fmul(b.fmul(x[0], s[0]), x[1]))


@njit(forceinline=True)
def norm_row(x, w, y, n, eps):
    """Normalise a row. As vector IR it gives the same bits in every kernel."""
    k = np.float32(1) / sqrt_f32(row_dot(x, x, n) / np.float32(n) + eps)
    scale_and_weight(x, w, y, n, k)


@kernel("rms_norm")
def rms_norm():
    """RMS norm. a: x, w, y, n (row length), eps bits."""

    def run(a, begin, end, scratch):
        n = a[3]
        for r in range(begin, end):
            norm_row(a[0] + r * n * 4, a[1], a[2] + r * n * 4, n, bits_f32(a[4]))

    return run


@kernel("rms_norm_act")
def rms_norm_act(group_size):
    """RMS norm and `quantize_act`. a: x, w, y, m, blocks of a row, panel rows, panels, eps bits.

    Scratch: a row.
    """
    quantize_row = row_quantizer(int(group_size))

    def run(a, begin, end, scratch):
        m, count, panel_rows, n_panels, eps = a[3], a[4], a[5], a[6], bits_f32(a[7])
        for row in range(begin, end):
            r0, rows = panel_of(row, m, panel_rows, n_panels)
            norm_row(a[0] + row * count * 128, a[1], scratch, count * 32, eps)
            quantize_row(scratch, a[2] + (r0 * count + row - r0) * ACT_BLOCK, rows * ACT_BLOCK, count)

    return run


gradient = m.elementwise(2, 2, lambda b, x, s: b.fsub(b.fmul(x[0], s[0]), b.fmul(x[1], s[1])))


@kernel("rms_norm_plain")
def rms_norm_plain():
    """RMS norm with a scalar weight. a: x, y, n, eps bits, weight."""

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            x = a[0] + r * n * 4
            k = f32p(a[4])[0] / sqrt_f32(row_dot(x, x, n) / np.float32(n) + bits_f32(a[3]))
            m.scale_elements(x, a[1] + r * n * 4, n, k)

    return run


@kernel("rms_norm_back")
def rms_norm_back():
    """Gradient of RMS norm: k·g − x·k³·mean(g·x), with k the norm's factor. a: g, x, y, n, eps
    bits.
    """

    def run(a, begin, end, scratch):
        n = a[3]
        for r in range(begin, end):
            g, x = a[0] + r * n * 4, a[1] + r * n * 4
            k = np.float32(1) / sqrt_f32(row_dot(x, x, n) / np.float32(n) + bits_f32(a[4]))
            gradient(g, x, a[2] + r * n * 4, n, k, k * k * k * (row_dot(g, x, n) / np.float32(n)))

    return run
