"""Rotary embedding: the angles of a step, and their application to one token's heads."""

from __future__ import annotations

import math

import numpy as np

from backends.cpu.kernels.registry import bits_f32, f32p, i32p, kernel


@kernel("rope_angles")
def rope_angles():
    """a: pos, frequency, y, n/2, magnitude bits. A unit is a token; the product is f32 (as the reference's input)."""

    def run(a, begin, end, scratch):
        pos, frequency, half, magnitude = i32p(a[0]), f32p(a[1]), a[3], bits_f32(a[4])
        for t in range(begin, end):
            y = f32p(a[2] + t * half * 8)
            for i in range(half):
                angle = np.float64(pos[t]) * np.float64(frequency[i])
                y[i] = np.float32(math.cos(angle)) * magnitude
                y[half + i] = np.float32(math.sin(angle)) * magnitude

    return run


@kernel("rope")
def rope(layout):
    """a: x, angles, y, heads, D, n/2, sign bits. A unit is a token; `layout`: interleaved or halves."""
    interleaved = layout == "interleaved"

    def run(a, begin, end, scratch):
        heads, size, half, sign = a[3], a[4], a[5], bits_f32(a[6])
        for t in range(begin, end):
            c, s = f32p(a[1] + t * half * 8), f32p(a[1] + t * half * 8 + half * 4)
            for h in range(heads):
                x = f32p(a[0] + (t * heads + h) * size * 4)
                y = f32p(a[2] + (t * heads + h) * size * 4)
                for i in range(half):
                    if interleaved:
                        left, right = x[2 * i], x[2 * i + 1]
                        y[2 * i] = left * c[i] - right * (s[i] * sign)
                        y[2 * i + 1] = left * (s[i] * sign) + right * c[i]
                    else:
                        left, right = x[i], x[half + i]
                        y[i] = left * c[i] - right * (s[i] * sign)
                        y[half + i] = left * (s[i] * sign) + right * c[i]
                for i in range(2 * half, size):
                    y[i] = x[i]

    return run
