"""Softmax and cross entropy kernels. A unit is a row; a gradient may overwrite its input."""

from __future__ import annotations

import math

import numpy as np

from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import f32p, i32p, kernel
from logitless.backends.cpu.kernels.ir.row_reduce import row_dot, row_exp_sum, row_max, row_sum

exp_scaled = m.elementwise(1, 2, lambda b, x, s: b.fmul(m.exp(b, b.fsub(x[0], s[0])), s[1]), (16, 8, 1))
softmax_slope = m.elementwise(2, 1, lambda b, x, s: b.fmul(x[1], b.fsub(x[0], s[0])))
soft_target_slope = m.elementwise(
    2, 3, lambda b, x, s: b.fmul(s[2], b.fsub(b.fmul(m.exp(b, b.fsub(x[0], s[0])), s[1]), x[1]))
)


@kernel("softmax")
def softmax(x_at, y_at, n, begin, end, scratch):
    """Softmax."""
    for r in range(begin, end):
        x = x_at + r * n * 4
        top = row_max(x, n)
        exp_scaled(x, y_at + r * n * 4, n, top, np.float32(1) / row_exp_sum(x, n, top))


@kernel("softmax_back")
def softmax_back(g_at, y_at, result_at, n, begin, end, scratch):
    """Gradient of softmax."""
    for r in range(begin, end):
        g, y = g_at + r * n * 4, y_at + r * n * 4
        softmax_slope(g, y, result_at + r * n * 4, n, row_dot(g, y, n))


@kernel("cross_entropy")
def cross_entropy(x_at, targets_at, y_at, n, begin, end, scratch):
    """Cross entropy. A negative target is ignored."""
    targets, y = i32p(targets_at), f32p(y_at)
    for r in range(begin, end):
        target = targets[r]
        if target < 0:
            y[r] = np.float32(0)
        else:
            x = x_at + r * n * 4
            top = row_max(x, n)
            y[r] = (top - f32p(x)[min(target, n - 1)]) + np.float32(math.log(np.float64(row_exp_sum(x, n, top))))


@kernel("cross_entropy_back")
def cross_entropy_back(g_at, x_at, targets_at, y_at, n, begin, end, scratch):
    """Gradient of cross entropy."""
    g, targets = f32p(g_at), i32p(targets_at)
    for r in range(begin, end):
        x, y = x_at + r * n * 4, y_at + r * n * 4
        out, target = f32p(y), targets[r]
        if target < 0:
            for i in range(n):
                out[i] = np.float32(0)
        else:
            top = row_max(x, n)
            factor = g[r]
            exp_scaled(x, y, n, top, factor / row_exp_sum(x, n, top))
            out[min(target, n - 1)] -= factor


@kernel("soft_cross_entropy")
def soft_cross_entropy(x_at, targets_at, y_at, n, begin, end, scratch):
    """Cross entropy with soft targets: −Σ t·(x − top − ln Σ exp)."""
    y = f32p(y_at)
    for r in range(begin, end):
        x, t = x_at + r * n * 4, targets_at + r * n * 4
        top = row_max(x, n)
        log_sum = top + np.float32(math.log(np.float64(row_exp_sum(x, n, top))))
        y[r] = log_sum * row_sum(t, n) - row_dot(x, t, n)


@kernel("soft_cross_entropy_back")
def soft_cross_entropy_back(g_at, x_at, targets_at, y_at, n, begin, end, scratch):
    """Gradient of cross entropy with soft targets."""
    g = f32p(g_at)
    for r in range(begin, end):
        x, t = x_at + r * n * 4, targets_at + r * n * 4
        top = row_max(x, n)
        soft_target_slope(x, t, y_at + r * n * 4, n, top, np.float32(1) / row_exp_sum(x, n, top), g[r])
