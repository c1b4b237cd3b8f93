"""RMS norm: one row a unit."""

from __future__ import annotations

import numpy as np

from backends.cpu.kernels import emit_math as m
from backends.cpu.kernels.emit_rows import row_dot
from backends.cpu.kernels.registry import bits_f32, f32p, kernel, sqrt_f32


@kernel("rms_norm")
def rms_norm():
    """a: x, w, y, n (row length), eps bits."""

    def run(a, begin, end, scratch):
        n, eps = a[3], bits_f32(a[4])
        w = f32p(a[1])
        for r in range(begin, end):
            x, y = f32p(a[0] + r * n * 4), f32p(a[2] + r * n * 4)
            total = np.float32(0)
            for i in range(n):
                total += x[i] * x[i]
            k = np.float32(1) / sqrt_f32(total / np.float32(n) + eps)
            for i in range(n):
                y[i] = x[i] * k * w[i]

    return run


slope = m.elements(2, 2, lambda b, x, s: b.fsub(b.fmul(x[0], s[0]), b.fmul(x[1], s[1])))


@kernel("rms_norm_plain")
def rms_norm_plain():
    """a: x, y, n, eps bits, weight (one number)."""

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            x = a[0] + r * n * 4
            k = f32p(a[4])[0] / sqrt_f32(row_dot(x, x, n) / np.float32(n) + bits_f32(a[3]))
            m.scaled(x, a[1] + r * n * 4, n, k)

    return run


@kernel("rms_norm_back")
def rms_norm_back():
    """a: g, x, y, n, eps bits. k·g − x·k³·mean(g·x), k being what the norm multiplied by."""

    def run(a, begin, end, scratch):
        n = a[3]
        for r in range(begin, end):
            g, x = a[0] + r * n * 4, a[1] + r * n * 4
            k = np.float32(1) / sqrt_f32(row_dot(x, x, n) / np.float32(n) + bits_f32(a[4]))
            slope(g, x, a[2] + r * n * 4, n, k, k * k * k * (row_dot(g, x, n) / np.float32(n)))

    return run
