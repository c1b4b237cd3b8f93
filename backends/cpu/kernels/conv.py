"""Patches of images (N, H, W, C) and back, and the largest of squares."""

from __future__ import annotations

import numpy as np

from backends.cpu.kernels.emit_math import added
from backends.cpu.kernels.registry import f32p, kernel


@kernel("patches")
def patches():
    """a: x, y, H, W, C, H', W', height, width of a patch, stride, padding. A row of patches is a unit."""

    def run(a, begin, end, scratch):
        h, w, c, rows, columns, kh, kw, stride, padding = a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
        for unit in range(begin, end):
            image, p = unit // rows, unit % rows
            for q in range(columns):
                out = a[1] + (unit * columns + q) * kh * kw * c * 4
                for i in range(kh):
                    r, s = p * stride - padding + i, q * stride - padding
                    x, y = f32p(a[0] + ((image * h + r) * w + s) * c * 4), f32p(out + i * kw * c * 4)
                    if 0 <= r < h and s >= 0 and s + kw <= w:
                        for k in range(kw * c):
                            y[k] = x[k]
                    else:
                        for j in range(kw):
                            inside = 0 <= r < h and 0 <= s + j < w
                            for k in range(c):
                                y[j * c + k] = x[j * c + k] if inside else np.float32(0)

    return run


@kernel("patches_back")
def patches_back():
    """a: g, y, H, W, C, H', W', height, width of a patch, stride, padding. A row of an image is a unit."""

    def run(a, begin, end, scratch):
        h, w, c, rows, columns, kh, kw, stride, padding = a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
        for unit in range(begin, end):
            image, r = unit // h, unit % h
            y = a[1] + unit * w * c * 4
            for k in range(w * c):
                f32p(y)[k] = np.float32(0)
            for i in range(kh):
                p = r + padding - i
                if p >= 0 and p % stride == 0 and p // stride < rows:
                    for q in range(columns):
                        g = a[0] + (((image * rows + p // stride) * columns + q) * kh + i) * kw * c * 4
                        s = q * stride - padding
                        first, last = max(0, -s), min(kw, w - s)
                        if last > first:
                            at = y + (s + first) * c * 4
                            added(at, g + first * c * 4, at, (last - first) * c)

    return run


@kernel("max_pool")
def max_pool():
    """a: x, y, H, W, C, size. A row of the result is a unit."""

    def run(a, begin, end, scratch):
        h, w, c, size = a[2], a[3], a[4], a[5]
        rows, columns = h // size, w // size
        for unit in range(begin, end):
            image, p = unit // rows, unit % rows
            for q in range(columns):
                y = f32p(a[1] + (unit * columns + q) * c * 4)
                for i in range(size):
                    for j in range(size):
                        x = f32p(a[0] + ((image * h + p * size + i) * w + q * size + j) * c * 4)
                        for k in range(c):
                            y[k] = x[k] if i + j == 0 else max(y[k], x[k])

    return run


@kernel("max_pool_back")
def max_pool_back():
    """a: g, x, y, H, W, C, size. An image is a unit."""

    def run(a, begin, end, scratch):
        h, w, c, size = a[3], a[4], a[5], a[6]
        rows, columns = h // size, w // size
        for image in range(begin, end):
            x, y = f32p(a[1] + image * h * w * c * 4), f32p(a[2] + image * h * w * c * 4)
            for k in range(h * w * c):
                y[k] = np.float32(0)
            for p in range(rows):
                for q in range(columns):
                    g = f32p(a[0] + ((image * rows + p) * columns + q) * c * 4)
                    for k in range(c):
                        best = (p * size * w + q * size) * c + k
                        for i in range(size):
                            for j in range(size):
                                at = ((p * size + i) * w + q * size + j) * c + k
                                if x[at] > x[best]:
                                    best = at
                        y[best] = g[k]

    return run
