"""Encoder (embedding model) kernels: layer norm, mean pooling."""

from __future__ import annotations

import numpy as np

from logitless.backends.cpu.kernels.ir.math import add_elements, scale_elements
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel, sqrt_f32


@kernel("layer_norm")
def layer_norm(x_at, w_at, b_at, y_at, n, eps_bits, begin, end, scratch):
    """Layer norm of rows of n. A unit is a row."""
    eps = bits_f32(eps_bits)
    w, b = f32p(w_at), f32p(b_at)
    for r in range(begin, end):
        x, y = f32p(x_at + r * n * 4), f32p(y_at + r * n * 4)
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


@kernel("mean_rows")
def mean_rows(x_at, firsts, counts, y_at, n, begin, end, scratch):
    """Mean pooling of rows of n. A unit is a row of y."""
    for r in range(begin, end):
        x, y = x_at + np.int64(i32p(firsts)[r]) * n * 4, y_at + r * n * 4
        scale_elements(x, y, n, np.float32(1))
        count = i32p(counts)[r]
        for i in range(1, count):
            add_elements(y, x + i * n * 4, y, n)
        scale_elements(y, y, n, np.float32(1) / np.float32(count))
