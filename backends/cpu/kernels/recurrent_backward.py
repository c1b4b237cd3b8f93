"""Recurrent layer gradients (graph/ops/linear_attention.py)."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel
from logitless.backends.cpu.kernels.recurrent import COLUMNS, copy_rows, input_row, key_head

CHECKPOINT = 16  # rows between checkpoints of the state


@kernel("causal_conv_back")
def causal_conv_back(g_at, x_at, w_at, states_at, begins_at, y_at, rows, columns, size, begin, end, scratch):
    """Gradient of the convolution; y: that of x, then of w. A unit is 64 columns.

    Scratch: the gradient of w."""
    begins, of_taps = i32p(begins_at), f32p(scratch)
    for unit in range(begin, end):
        c0 = unit * COLUMNS
        n = min(COLUMNS, columns - c0)
        w, of_w = f32p(w_at + c0 * size * 4), f32p(y_at + (rows * columns + c0 * size) * 4)
        for i in range(size * COLUMNS):
            of_taps[i] = np.float32(0)
        for t in range(rows):
            of_x = f32p(y_at + (t * columns + c0) * 4)
            for c in range(n):
                of_x[c] = np.float32(0)
        first, state = 0, 0
        for t in range(rows):
            if begins[t] >= 0:
                first, state = t, np.int64(begins[t])
            g = f32p(g_at + (t * columns + c0) * 4)
            for j in range(size):
                p = t - size + 1 + j
                source = f32p(input_row(x_at, states_at, state, first, p, columns, size, c0))
                for c in range(n):
                    of_taps[j * COLUMNS + c] += g[c] * source[c]
                if p >= first:
                    of_x = f32p(y_at + (p * columns + c0) * 4)
                    for c in range(n):
                        of_x[c] += g[c] * w[c * size + j]
        for c in range(n):
            for j in range(size):
                of_w[c * size + j] = of_taps[j * COLUMNS + c]


@njit(forceinline=True)
def _forward(s, k, v, decay, beta, residual_at, size, width, delta):
    """One token of a whole head: updates the state s (D, E); `missing` (E,) is v minus the recalled."""
    state, key, value, residual = f32p(s), f32p(k), f32p(v), f32p(residual_at)
    for c in range(width):
        residual[c] = value[c]
    for d in range(size):
        for c in range(width):
            state[d * width + c] *= decay
            if delta:
                residual[c] -= state[d * width + c] * key[d]
    for d in range(size):
        for c in range(width):
            state[d * width + c] += key[d] * beta * residual[c]


@kernel("linear_attention_back")
def linear_attention_back(
    g_at, q_at, k_at, v_at, decay_at, beta_at, states_at, begins_at, y_at, rows, heads, k_heads, size, width,
    scale_bits, is_delta, is_grouped, begin, end, scratch,
):  # fmt: skip
    """Gradient of linear attention. A unit is a head of keys.

    y: gradients of q, k, v, decay and beta. Scratch: states at every CHECKPOINT-th row, then before
    each row between two checkpoints, the last state, its gradient; `missing` of those rows, and two
    rows."""
    scale = bits_f32(scale_bits)
    decays, betas = f32p(decay_at), f32p(beta_at)
    begins, delta, grouped = i32p(begins_at), is_delta != 0, is_grouped != 0
    of_q = y_at
    of_k = of_q + rows * k_heads * size * 4
    of_v = of_k + rows * k_heads * size * 4
    of_decay = of_v + rows * heads * width * 4
    of_beta = of_decay + rows * heads * 4
    whole = size * width
    n_segments = (rows + CHECKPOINT - 1) // CHECKPOINT
    states = scratch + n_segments * whole * 4
    s, ds = states + CHECKPOINT * whole * 4, f32p(states + (CHECKPOINT + 1) * whole * 4)
    residuals = states + (CHECKPOINT + 2) * whole * 4
    of_sum = f32p(residuals + CHECKPOINT * width * 4)
    for k_head in range(begin, end):
        for t in range(rows):
            at = (t * k_heads + k_head) * size * 4
            dq, dk = f32p(of_q + at), f32p(of_k + at)
            for d in range(size):
                dq[d] = np.float32(0)
                dk[d] = np.float32(0)
        for h in range(heads):
            if key_head(h, heads, k_heads, grouped) != k_head:
                continue
            place = states_at + h * whole * 4
            for t in range(rows):
                if begins[t] >= 0:
                    copy_rows(place + np.int64(begins[t]) * heads * whole * 4, 0, s, 0, 1, whole)
                if t % CHECKPOINT == 0:
                    copy_rows(s, 0, scratch + t // CHECKPOINT * whole * 4, 0, 1, whole)
                i, k = t * heads + h, k_at + (t * k_heads + k_head) * size * 4
                _forward(s, k, v_at + i * width * 4, decays[i], betas[i], residuals, size, width, delta)
            for j in range(whole):
                ds[j] = np.float32(0)
            for segment in range(n_segments - 1, -1, -1):
                t0 = segment * CHECKPOINT
                stop = min(rows, t0 + CHECKPOINT)
                copy_rows(scratch + segment * whole * 4, 0, s, 0, 1, whole)
                for t in range(t0, stop):
                    if begins[t] >= 0:
                        copy_rows(place + np.int64(begins[t]) * heads * whole * 4, 0, s, 0, 1, whole)
                    copy_rows(s, 0, states + (t - t0) * whole * 4, 0, 1, whole)
                    i, k = t * heads + h, k_at + (t * k_heads + k_head) * size * 4
                    residual = residuals + (t - t0) * width * 4
                    _forward(s, k, v_at + i * width * 4, decays[i], betas[i], residual, size, width, delta)
                for t in range(stop - 1, t0 - 1, -1):
                    i, at = t * heads + h, (t * k_heads + k_head) * size * 4
                    g, dv = f32p(g_at + i * width * 4), f32p(of_v + i * width * 4)
                    q, k, dq, dk = f32p(q_at + at), f32p(k_at + at), f32p(of_q + at), f32p(of_k + at)
                    before, residual = f32p(states + (t - t0) * whole * 4), f32p(residuals + (t - t0) * width * 4)
                    decay, beta = decays[i], betas[i]
                    for c in range(width):
                        of_sum[c] = np.float32(0)
                    for d in range(size):
                        recalled, own = np.float32(0), np.float32(0)
                        for c in range(width):
                            new = decay * before[d * width + c] + k[d] * beta * residual[c]
                            recalled += new * g[c]
                            ds[d * width + c] += scale * q[d] * g[c]
                            own += ds[d * width + c] * residual[c]
                            of_sum[c] += ds[d * width + c] * k[d]
                        dq[d] += scale * recalled
                        dk[d] += beta * own
                    total = np.float32(0)
                    for c in range(width):
                        total += of_sum[c] * residual[c]
                        dv[c] = beta * of_sum[c]
                    f32p(of_beta)[i] = total
                    total = np.float32(0)
                    for d in range(size):
                        own = np.float32(0)
                        for c in range(width):
                            if delta:
                                own += before[d * width + c] * dv[c]
                                ds[d * width + c] -= k[d] * dv[c]
                            total += ds[d * width + c] * before[d * width + c]
                            ds[d * width + c] *= decay
                        dk[d] -= decay * own
                    f32p(of_decay)[i] = total
                    if begins[t] >= 0:
                        for j in range(whole):
                            ds[j] = np.float32(0)
