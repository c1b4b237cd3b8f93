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
def softmax():
    """Softmax. a: x, y, n."""

    def run(a, begin, end, scratch):
        n = a[2]
        for r in range(begin, end):
            x = a[0] + r * n * 4
            top = row_max(x, n)
            exp_scaled(x, a[1] + r * n * 4, n, top, np.float32(1) / row_exp_sum(x, n, top))

    return run


@kernel("softmax_back")
def softmax_back():
    """Gradient of softmax. a: g, y, result, n."""

    def run(a, begin, end, scratch):
        n = a[3]
        for r in range(begin, end):
            g, y = a[0] + r * n * 4, a[1] + r * n * 4
            softmax_slope(g, y, a[2] + r * n * 4, n, row_dot(g, y, n))

    return run


@kernel("cross_entropy")
def cross_entropy():
    """Cross entropy. a: logits, targets, y, n. A negative target is ignored."""

    def run(a, begin, end, scratch):
        n, targets, y = a[3], i32p(a[1]), f32p(a[2])
        for r in range(begin, end):
            target = targets[r]
            if target < 0:
                y[r] = np.float32(0)
            else:
                x = a[0] + r * n * 4
                top = row_max(x, n)
                y[r] = (top - f32p(x)[min(target, n - 1)]) + np.float32(math.log(np.float64(row_exp_sum(x, n, top))))

    return run


@kernel("cross_entropy_back")
def cross_entropy_back():
    """Gradient of cross entropy. a: g, logits, targets, y, n."""

    def run(a, begin, end, scratch):
        n, g, targets = a[4], f32p(a[0]), i32p(a[2])
        for r in range(begin, end):
            x, y = a[1] + r * n * 4, a[3] + r * n * 4
            out, target = f32p(y), targets[r]
            if target < 0:
                for i in range(n):
                    out[i] = np.float32(0)
            else:
                top = row_max(x, n)
                factor = g[r]
                exp_scaled(x, y, n, top, factor / row_exp_sum(x, n, top))
                out[min(target, n - 1)] -= factor

    return run


@kernel("soft_cross_entropy")
def soft_cross_entropy():
    """Cross entropy with soft targets: −Σ t·(x − top − ln Σ exp). a: logits, targets, y, n."""

    def run(a, begin, end, scratch):
        n, y = a[3], f32p(a[2])
        for r in range(begin, end):
            x, t = a[0] + r * n * 4, a[1] + r * n * 4
            top = row_max(x, n)
            log_sum = top + np.float32(math.log(np.float64(row_exp_sum(x, n, top))))
            y[r] = log_sum * row_sum(t, n) - row_dot(x, t, n)

    return run


@kernel("soft_cross_entropy_back")
def soft_cross_entropy_back():
    """Gradient of cross entropy with soft targets. a: g, logits, targets, y, n."""

    def run(a, begin, end, scratch):
        n, g = a[4], f32p(a[0])
        for r in range(begin, end):
            x, t = a[1] + r * n * 4, a[2] + r * n * 4
            top = row_max(x, n)
            soft_target_slope(x, t, a[3] + r * n * 4, n, top, np.float32(1) / row_exp_sum(x, n, top), g[r])

    return run
