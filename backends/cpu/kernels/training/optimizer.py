"""Optimizer step kernels, in place, and gradient norms. A unit is `CHUNK` consecutive elements."""

from __future__ import annotations

import numpy as np

from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.registry import f32p, kernel, sqrt_f32
from logitless.backends.cpu.kernels.ir.row_reduce import row_dot, row_sum

CHUNK = 4096  # graph/ops/training/optimizer.py: SUM_CHUNK
PIECE = 1024  # elements whose weights, moments and gradient fit the L1 cache

first_moment = m.elementwise(2, 2, lambda b, x, s: m.fma(b, s[0], x[0], b.fmul(s[1], x[1])))
second_moment = m.elementwise(2, 2, lambda b, x, s: m.fma(b, s[0], x[0], b.fmul(s[1], b.fmul(x[1], x[1]))))


def _move(b, x, s):
    """w · keep − rate·c1 · m / (√(v · c2) + eps)"""
    w, first, second = x
    keep, rate, correction, eps = s
    down = b.fadd(m.call(b, "sqrt", b.fmul(second, correction)), eps)
    return b.fsub(b.fmul(w, keep), b.fdiv(b.fmul(rate, first), down))


adamw_move = m.elementwise(3, 4, _move)
sgd_move = m.elementwise(2, 2, lambda b, x, s: b.fsub(b.fmul(x[0], s[0]), b.fmul(s[1], x[1])))


@kernel("adamw_step")
def adamw_step(w_at, m_at, v_at, g_at, params_at, factor_at, n, decays, begin, end, scratch):
    """AdamW step."""
    p, factor = f32p(params_at), f32p(factor_at)[0]
    keep = np.float32(1) - p[0] * p[6] if decays != 0 else np.float32(1)
    for unit in range(begin, end):
        for start in range(unit * CHUNK, min(n, (unit + 1) * CHUNK), PIECE):
            w, first, second, g = (w_at + start * 4, m_at + start * 4, v_at + start * 4, g_at + start * 4)
            count = min(n - start, PIECE)
            first_moment(first, g, first, count, p[1], p[3] * factor)
            second_moment(second, g, second, count, p[2], p[4] * factor * factor)
            adamw_move(w, first, second, w, count, keep, p[0] * p[7], p[8], p[5])


@kernel("sgd_step")
def sgd_step(w_at, g_at, params_at, factor_at, n, decays, begin, end, scratch):
    """SGD step."""
    p = f32p(params_at)
    keep = np.float32(1) - p[0] * p[1] if decays != 0 else np.float32(1)
    rate = p[0] * f32p(factor_at)[0]
    for unit in range(begin, end):
        at = unit * CHUNK * 4
        sgd_move(w_at + at, g_at + at, w_at + at, min(n - unit * CHUNK, CHUNK), keep, rate)


@kernel("clear")
def clear(y_at, n, begin, end, scratch):
    """Fill with zero."""
    y = f32p(y_at)
    for i in range(begin * CHUNK, min(n, end * CHUNK)):
        y[i] = np.float32(0)


@kernel("square_sums")
def square_sums(x_at, y_at, n, begin, end, scratch):
    """Sum of squares per chunk."""
    y = f32p(y_at)
    for unit in range(begin, end):
        at = x_at + unit * CHUNK * 4
        y[unit] = row_dot(at, at, min(n - unit * CHUNK, CHUNK))


@kernel("norm_of_sums")
def norm_of_sums(a, begin, end, scratch):
    """Norm out of sums of squares. a: y, count, then address and length of each vector. One unit."""
    total = np.float64(0)
    for i in range(a[1]):
        total += np.float64(row_sum(a[2 + 2 * i], a[3 + 2 * i]))
    f32p(a[0])[0] = sqrt_f32(np.float32(total))
