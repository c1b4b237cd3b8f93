"""Scale searches of block quantizers: the scale (and minimum) of each group that fits its numbers best.

The candidates, their order, and the order of every sum are llama.cpp's, so that blocks get the same bytes. An array is
(n, groups): element i of every group is one row, because numpy adds rows one after the other. `weights` say how much
an element's squared error counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
TINY = np.float32(1e-15)  # a group whose largest magnitude is below this is all zeros
_ZERO = np.float32(0)


def extreme(x: F32) -> F32:
    """The element of largest magnitude of each group, with its sign; of equal ones the first."""
    return np.asarray(np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0])


def total(x: F32) -> F32:
    """Sum of each group, one element after the other."""
    # numpy adds the elements of a single group in pairs
    return np.asarray(x.sum(axis=0) if x.shape[1] > 1 else np.cumsum(x, axis=0)[-1])


def rounded(x: F32, low: float, high: float) -> F32:
    """Nearest integers (halves to even) from `low` to `high`, as floats, in x itself."""
    return np.clip(np.rint(x, out=x), np.float32(low), np.float32(high), out=x)


def symmetric_scale(x: F32, n_max: int, weights: F32) -> tuple[F32, F32]:
    """x ≈ scale · q for integers q from -n_max to n_max - 1: (scale, q + n_max).

    The largest magnitude becomes about -n_max; of 19 such scales the one is taken whose best multiple leaves the least
    error. A group of zeros has scale 0 and q + n_max = 0.
    """
    top = extreme(x)
    zeros = np.abs(top) < TINY
    weighted = weights * x
    q, product = np.empty_like(x), np.empty_like(x)
    scale = best = inverse = np.zeros_like(top)
    for step in (0, *range(-9, 0), *range(1, 10)):
        candidate = -(np.float32(n_max) + np.float32(0.1) * np.float32(step)) / top
        rounded(np.multiply(candidate, x, out=q), -n_max, n_max - 1)
        sum_xq = total(np.multiply(weighted, q, out=product))
        sum_qq = total(np.multiply(np.multiply(weights, q, out=product), q, out=product))
        fit = sum_xq / sum_qq
        if step == 0:
            scale, inverse = np.where(sum_qq != 0, fit, _ZERO), candidate
            best = scale * sum_xq
        else:
            better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq)
            scale = np.where(better, fit, scale)
            best = np.where(better, fit * sum_xq, best)
            inverse = np.where(better, candidate, inverse)
    q = rounded(np.multiply(inverse, x, out=q), -n_max, n_max - 1)
    q += np.float32(n_max)
    q[:, zeros] = 0
    return np.where(zeros, _ZERO, scale), q


def descended_scale(x: F32, n_max: int) -> tuple[F32, F32]:
    """As `symmetric_scale` with weights x², from its first candidate on by moves of single elements."""
    top = extreme(x)
    zeros = np.abs(top) < TINY
    q = rounded(np.float32(-n_max) / top * x, -n_max, n_max - 1)
    scale = _moved(x, q, x * x, -n_max, n_max - 1)
    q += np.float32(n_max)
    q[:, zeros] = 0
    return np.where(zeros, _ZERO, scale), q


def scale_and_minimum(
    x: F32, n_max: int, weights: F32, candidates: tuple[float, float, int], *, absolute: bool = False
) -> tuple[F32, F32, F32]:
    """x ≈ scale · q - minimum for integers q from 0 to n_max: (scale, minimum ≥ 0, q).

    `candidates`: (first, step, number) of what is added to n_max before it is divided by the range of the numbers.
    For each, q gives the best scale and minimum by linear regression, and these their error: weighted squares, or
    magnitudes (`absolute`). A group of equal numbers has scale 0.
    """
    low, high = x.min(axis=0), x.max(axis=0)
    sum_w, sum_x = total(weights), total(weights * x)
    low = np.minimum(low, _ZERO)
    flat = high <= low
    inverse = np.float32(n_max) / (high - low)
    scale, minimum = np.float32(1) / inverse, low
    q, product = np.empty_like(x), np.empty_like(x)

    def quantize() -> None:
        np.subtract(x, minimum, out=q)
        rounded(np.multiply(inverse, q, out=q), 0, n_max)

    def error(scale: F32, minimum: F32) -> F32:
        np.add(np.multiply(scale, q, out=product), minimum, out=product)
        np.subtract(product, x, out=product)
        np.abs(product, out=product) if absolute else np.multiply(product, product, out=product)
        return total(np.multiply(weights, product, out=product))

    quantize()
    best = error(scale, minimum)
    chosen = inverse, minimum  # that gave the best q
    first, step, number = candidates
    for i in range(number + 1):
        inverse = (np.float32(first) + np.float32(step) * np.float32(i) + np.float32(n_max)) / (high - minimum)
        quantize()
        sum_q = total(np.multiply(weights, q, out=product))
        sum_xq = total(product * x)
        sum_qq = total(np.multiply(product, q, out=product))
        determinant = sum_w * sum_qq - sum_q * sum_q
        new_scale = np.divide(sum_w * sum_xq - sum_x * sum_q, determinant)
        new_minimum = np.divide(sum_qq * sum_x - sum_q * sum_xq, determinant)
        positive = new_minimum > 0
        new_scale = np.where(positive, sum_xq / sum_qq, new_scale)
        new_minimum = np.where(positive, _ZERO, new_minimum)
        error_here = error(new_scale, new_minimum)
        better = (determinant > 0) & (error_here < best)
        chosen = np.where(better, inverse, chosen[0]), np.where(better, minimum, chosen[1])
        best = np.where(better, error_here, best)
        scale, minimum = np.where(better, new_scale, scale), np.where(better, new_minimum, minimum)
    final = -minimum
    inverse, minimum = chosen
    quantize()
    q[:, flat] = 0
    return np.where(flat, _ZERO, scale), np.where(flat, -low, final), q


def positive_scale(x: F32, n_max: int, weights: F32) -> tuple[F32, F32]:
    """x ≈ scale · q for x ≥ 0 and integers q from 0 to n_max: (scale, q). The best of nine scales, then moves of single
    elements."""
    top = np.maximum(x.max(axis=0), _ZERO)
    zeros = top < TINY
    inverse, best = np.zeros_like(top), np.full_like(top, np.inf)
    for step in (0, *range(-4, 0), *range(1, 5)):
        candidate = (np.float32(0.1) * np.float32(step) + np.float32(n_max)) / top
        rest = x - np.float32(1) / candidate * rounded(candidate * x, 0, n_max)
        error = total(weights * rest * rest)
        better = error < best
        inverse, best = np.where(better, candidate, inverse), np.where(better, error, best)
    q = rounded(inverse * x, 0, n_max)
    scale = _moved(x, q, weights, 0, n_max)
    q[:, zeros] = 0
    return np.where(zeros, _ZERO, scale), q


def _moved(x: F32, q: F32, weights: F32, low: float, high: float) -> F32:
    """The best multiple of q. Before, one element of q after the other is moved, in place, to where that leaves the
    least error; five rounds at most."""
    weighted = weights * x
    sum_xq, sum_qq = total(weighted * q), total(weights * q * q)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            rest_xq, rest_qq = sum_xq - weighted[i] * q[i], sum_qq - weights[i] * q[i] * q[i]
            new = rounded(x[i] * rest_qq / rest_xq, low, high)
            new_xq, new_qq = rest_xq + weighted[i] * new, rest_qq + weights[i] * new * new
            better = (rest_xq > 0) & (rest_qq > 0) & (new != q[i])
            better &= new_xq * new_xq * sum_qq > sum_xq * sum_xq * new_qq
            if better.any():
                changed = True
                q[i] = np.where(better, new, q[i])
                sum_xq, sum_qq = np.where(better, new_xq, sum_xq), np.where(better, new_qq, sum_qq)
        if not changed:
            break
    return np.where(sum_qq > 0, sum_xq / sum_qq, _ZERO)
