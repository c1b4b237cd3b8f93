"""RMS norm: one row a unit."""

from __future__ import annotations

import numpy as np

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
