"""Image patches (im2col) and max pooling of (N, H, W, C), with gradients."""

from __future__ import annotations

import numpy as np

from logitless.backends.cpu.kernels.ir import math as m
from logitless.backends.cpu.kernels.ir.builder import move_within
from logitless.backends.cpu.kernels.ir.registry import f32p, kernel

WIDTHS = (16, 8, 4, 1)
copy = m.elementwise(1, 0, lambda b, x, s: x[0], WIDTHS)
add = m.elementwise(2, 0, lambda b, x, s: b.fadd(x[0], x[1]), WIDTHS)
fill = m.elementwise(0, 1, lambda b, x, s: s[0], WIDTHS)


def _largest(b, x):
    first, second = (m.maximum(b, x[i], x[i + 1]) for i in (0, 2))
    return m.maximum(b, first, second)


def _slope_at(i):
    """Gradient of a 2 × 2 max: g where the i-th is the first maximum, otherwise 0."""

    def formula(b, x, s):
        g, four = x[0], x[1:]
        best = _largest(b, four)
        value = b.select(b.fcmp_ordered("==", four[i], best), g, m.fill(g.type.count, 0.0))
        for earlier in four[:i]:
            value = b.select(b.fcmp_ordered("==", earlier, best), m.fill(g.type.count, 0.0), value)
        return value

    return m.elementwise(5, 0, formula, WIDTHS)


slope_0, slope_1, slope_2, slope_3 = (_slope_at(i) for i in range(4))
largest_of_4 = m.elementwise(4, 0, lambda b, x, s: _largest(b, x), WIDTHS)


@kernel("patches")
def patches(x_at, y_at, h, w, c, rows, columns, kh, kw, stride, padding, begin, end, scratch):
    """im2col of kh × kw patches. A unit is a row of patches."""
    for unit in range(begin, end):
        image, p = unit // rows, unit % rows
        for i in range(kh):
            r = p * stride - padding + i
            y = y_at + (unit * columns * kh + i) * kw * c * 4
            x = x_at + ((image * h + r) * w - padding) * c * 4
            if r < 0 or r >= h:
                for _ in range(columns):
                    fill(y, kw * c, np.float32(0))
                    y += kh * kw * c * 4
                continue
            for q in range(columns):
                s = q * stride - padding
                if kw * c <= 16:
                    move_within(x, max(0, -s) * c, min(kw, w - s) * c, y, kw * c)
                    x += stride * c * 4
                    y += kh * kw * c * 4
                    continue
                before, after = max(0, -s), max(0, s + kw - w)
                if before + after > 0:
                    inside = max(0, kw - before - after)
                    before = min(before, kw)
                    fill(y, before * c, np.float32(0))
                    copy(x + before * c * 4, y + before * c * 4, inside * c)
                    fill(y + (before + inside) * c * 4, (kw - before - inside) * c, np.float32(0))
                else:
                    copy(x, y, kw * c)
                x += stride * c * 4
                y += kh * kw * c * 4


@kernel("patches_back")
def patches_back(g_at, y_at, h, w, c, rows, columns, kh, kw, stride, padding, begin, end, scratch):
    """Gradient of im2col. A unit is a row of an image."""
    for unit in range(begin, end):
        image, r = unit // h, unit % h
        y = y_at + unit * w * c * 4
        fill(y, w * c, np.float32(0))
        for i in range(kh):
            p = r + padding - i
            if p >= 0 and p % stride == 0 and p // stride < rows:
                for q in range(columns):
                    g = g_at + (((image * rows + p // stride) * columns + q) * kh + i) * kw * c * 4
                    s = q * stride - padding
                    first, last = max(0, -s), min(kw, w - s)
                    if last > first:
                        at = y + (s + first) * c * 4
                        add(at, g + first * c * 4, at, (last - first) * c)


@kernel("max_pool")
def max_pool(x_at, y_at, h, w, c, size, begin, end, scratch):
    """Max pooling. A unit is a row of the result."""
    rows, columns = h // size, w // size
    for unit in range(begin, end):
        image, p = unit // rows, unit % rows
        for q in range(columns):
            out = y_at + (unit * columns + q) * c * 4
            first = x_at + ((image * h + p * size) * w + q * size) * c * 4
            if size == 2:
                below = first + w * c * 4
                largest_of_4(first, first + c * 4, below, below + c * 4, out, c)
                continue
            y = f32p(out)
            for i in range(size):
                for j in range(size):
                    x = f32p(first + (i * w + j) * c * 4)
                    for k in range(c):
                        y[k] = x[k] if i + j == 0 else max(y[k], x[k])


@kernel("max_pool_back")
def max_pool_back(g_at, x_at, y_at, h, w, c, size, begin, end, scratch):
    """Gradient of max pooling. A unit is an image."""
    rows, columns = h // size, w // size
    for image in range(begin, end):
        x, y = x_at + image * h * w * c * 4, y_at + image * h * w * c * 4
        if h % size + w % size > 0 or size != 2:
            fill(y, h * w * c, np.float32(0))
        for p in range(rows):
            for q in range(columns):
                g = g_at + ((image * rows + p) * columns + q) * c * 4
                square = (p * size * w + q * size) * c * 4
                if size == 2:
                    x0, y0 = x + square, y + square
                    x1, x2, x3 = x0 + c * 4, x0 + w * c * 4, x0 + (w + 1) * c * 4
                    slope_0(g, x0, x1, x2, x3, y0, c)
                    slope_1(g, x0, x1, x2, x3, y0 + c * 4, c)
                    slope_2(g, x0, x1, x2, x3, y0 + w * c * 4, c)
                    slope_3(g, x0, x1, x2, x3, y0 + (w + 1) * c * 4, c)
                    continue
                values, out = f32p(x + square), f32p(y + square)
                for k in range(c):
                    best = k
                    for i in range(size):
                        for j in range(size):
                            at = (i * w + j) * c + k
                            if values[at] > values[best]:
                                best = at
                    out[best] = f32p(g)[k]
