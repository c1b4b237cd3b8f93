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
def rms_norm(x_at, w_at, y_at, n, eps_bits, begin, end, scratch):
    """RMS norm."""
    for r in range(begin, end):
        norm_row(x_at + r * n * 4, w_at, y_at + r * n * 4, n, bits_f32(eps_bits))


@kernel("rms_norm_act")
def rms_norm_act(group_size):
    """RMS norm and `quantize_act`.

    Scratch: a row."""
    quantize_row = row_quantizer(int(group_size))

    def run(x_at, w_at, y_at, m, count, panel_rows, n_panels, eps_bits, begin, end, scratch):
        eps = bits_f32(eps_bits)
        for row in range(begin, end):
            r0, rows = panel_of(row, m, panel_rows, n_panels)
            norm_row(x_at + row * count * 128, w_at, scratch, count * 32, eps)
            quantize_row(scratch, y_at + (r0 * count + row - r0) * ACT_BLOCK, rows * ACT_BLOCK, count)

    return run


gradient = m.elementwise(2, 2, lambda b, x, s: b.fsub(b.fmul(x[0], s[0]), b.fmul(x[1], s[1])))


@kernel("rms_norm_plain")
def rms_norm_plain(x_at, y_at, n, eps_bits, w_at, begin, end, scratch):
    """RMS norm with a scalar weight."""
    for r in range(begin, end):
        x = x_at + r * n * 4
        k = f32p(w_at)[0] / sqrt_f32(row_dot(x, x, n) / np.float32(n) + bits_f32(eps_bits))
        m.scale_elements(x, y_at + r * n * 4, n, k)


@kernel("rms_norm_back")
def rms_norm_back(g_at, x_at, y_at, n, eps_bits, begin, end, scratch):
    """Gradient of RMS norm: k·g − x·k³·mean(g·x), with k the norm's factor."""
    for r in range(begin, end):
        g, x = g_at + r * n * 4, x_at + r * n * 4
        k = np.float32(1) / sqrt_f32(row_dot(x, x, n) / np.float32(n) + bits_f32(eps_bits))
        gradient(g, x, y_at + r * n * 4, n, k, k * k * k * (row_dot(g, x, n) / np.float32(n)))
