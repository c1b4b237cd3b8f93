"""Block encoders: float rows to the bytes of GGUF's block types, with or without an importance matrix.

Each takes blocks (n, numbers of a block) and the importance of their elements, of the same shape, or None, and the mean
square of each block's row, and gives (n, bytes of a block)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from logitless.graph.dtype import DTYPES as BLOCK_TYPES
from logitless.models.quantization.scale_search import (
    F32,
    TINY,
    descended_scale,
    extreme,
    positive_scale,
    rounded,
    scale_and_minimum,
    symmetric_scale,
    total,
)

Bytes = NDArray[np.uint8]
Encoder = Callable[[F32, F32 | None, F32 | None], Bytes]
_WEIGHTED = (-0.9, 0.05, 36)  # candidates of `scale_and_minimum` with importances
_CODES = np.array(BLOCK_TYPES["iq4_nl"].codes, np.float32)
# place of the nearest code of each number from -128 in steps of a half, where all bounds between codes lie
_NEAREST = np.searchsorted((_CODES[1:] + _CODES[:-1]) / 2, np.arange(-128, 128, 0.5), side="right").astype(np.uint8)


def _groups(blocks: F32, size: int) -> F32:
    """(n, k · size) → (size, n · k)."""
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def _importance(blocks: F32, importance: F32, mean_square: F32) -> F32:
    """Weights of errors: an element's importance times √(mean square + its own square)."""
    weights: F32 = importance * np.sqrt(mean_square[:, None] + blocks * blocks)
    return weights


def _mean_square(blocks: F32, factor: float) -> F32:
    squares = blocks * blocks
    sums = np.cumsum(squares, axis=1, dtype=np.float32)[:, -1]  # one element after the other
    return np.asarray(np.float32(factor) * sums / np.float32(blocks.shape[1]))


def _half(d: F32) -> Bytes:
    """(n,) → (n, 2)."""
    return d.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _rounded_half(d: F32) -> F32:
    return d.astype(np.float16).astype(np.float32)


def _rows(q: F32, size: int) -> Bytes:
    """(size of a group, n · k) → (n, size of a block)."""
    return np.ascontiguousarray(q.T.astype(np.uint8)).reshape(-1, size)


def _nibbles(q: Bytes) -> Bytes:
    """(n, 32) of 4 bits → (n, 16)."""
    return np.asarray(q[:, :16] & 15 | q[:, 16:] << 4)


def _32_symmetric(bits: int, x: F32, importance: F32 | None, mean_square: F32 | None) -> Bytes:
    """Q4_0 and Q5_0 with importances: x ≈ d · (q - half of the range)."""
    assert importance is not None
    assert mean_square is not None
    weights = _importance(x, importance, mean_square)
    d, q = symmetric_scale(_groups(x, 32), 1 << (bits - 1), _groups(weights, 32))
    return np.concatenate([_half(d), *_high_bits(bits, rows := _rows(q, 32)), _nibbles(rows)], axis=1)


def _32_with_minimum(bits: int, x: F32, importance: F32 | None, mean_square: F32 | None) -> Bytes:
    """Q4_1 and Q5_1 with importances: x ≈ d · q + m."""
    assert importance is not None
    assert mean_square is not None
    weights = _importance(x, importance, mean_square)
    d, minimum, q = scale_and_minimum(_groups(x, 32), (1 << bits) - 1, _groups(weights, 32), _WEIGHTED)
    rows = _rows(q, 32)
    return np.concatenate([_half(d), _half(-minimum), *_high_bits(bits, rows), _nibbles(rows)], axis=1)


def _high_bits(bits: int, q: Bytes) -> list[Bytes]:
    return [] if bits == 4 else [np.packbits(q >> 4, axis=1, bitorder="little")]


def _q2_k(x: F32, importance: F32 | None, _: F32 | None) -> Bytes:
    """x ≈ d · scale · q - dmin · min: 16 groups of 16 with scales and mins of 4 bits, q of 2."""
    groups = _groups(x, 16)
    if importance is None:
        candidates = (-0.5, 0.1, 15)
        scale, minimum, q = scale_and_minimum(groups, 3, np.abs(groups), candidates, absolute=True)
        (d, scales), (dmin, mins) = (_greatest_scale(values.reshape(-1, 16), 15) for values in (scale, minimum))
    else:
        weights = _groups(_importance(x, importance, _mean_square(x, 1)), 16)
        scale, minimum, q = scale_and_minimum(groups, 3, weights, _WEIGHTED)
        (d, scales), (dmin, mins) = _scales_of_groups(scale, minimum, weights, 16, 15)
    q = _with_minimum(groups, q, d[:, None] * scales, dmin[:, None] * mins, 3)
    packed = scales.astype(np.uint8) | mins.astype(np.uint8) << 4
    return np.concatenate([packed, _crumbs(_rows(q, 256)), _half(d), _half(dmin)], axis=1)


def _q45_k(bits: int, x: F32, importance: F32 | None, _: F32 | None) -> Bytes:
    """x ≈ d · scale · q - dmin · min: 8 groups of 32 with scales and mins of 6 bits, q of 4 or 5."""
    groups, most = _groups(x, 32), (1 << bits) - 1
    if importance is None:
        root = np.sqrt(total(groups * groups) / np.float32(32))
        candidates = (-1.0, 0.1, 20) if bits == 4 else (-0.5, 0.1, 15)
        scale, minimum, q = scale_and_minimum(groups, most, root + np.abs(groups), candidates)
        (d, scales), (dmin, mins) = (_greatest_scale(values.reshape(-1, 8), 63) for values in (scale, minimum))
    else:
        weights = _groups(_importance(x, importance, _mean_square(x, 2)), 32)
        scale, minimum, q = scale_and_minimum(groups, most, weights, _WEIGHTED)
        (d, scales), (dmin, mins) = _scales_of_groups(scale, minimum, weights, 8, 63)
    q = _with_minimum(groups, q, d[:, None] * scales, dmin[:, None] * mins, most)

    # four scales, four mins, then the low bits of the other four of each
    s, m = scales.astype(np.uint8), mins.astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    rows = _rows(q, 256).reshape(-1, 8, 32)
    nibbles = (rows[:, ::2] & 15 | (rows[:, 1::2] & 15) << 4).reshape(-1, 128)
    # byte i: bit j is the fifth bit of element i of group j
    high = [] if bits == 4 else [np.packbits(rows >> 4, axis=1, bitorder="little").reshape(-1, 32)]
    return np.concatenate([_half(d), _half(dmin), *packed, *high, nibbles], axis=1)


def _greatest_scale(values: F32, most: int) -> tuple[F32, F32]:
    """Non-negative (n, groups) as d (n,), rounded to 16 bits, times integers up to `most`, which the greatest gets."""
    top = values.max(axis=1) + np.float32(0)  # -0 becomes 0
    inverse = np.where(top > 0, np.float32(most) / top, np.float32(0))
    return _rounded_half(top / np.float32(most)), rounded(inverse[:, None] * values, 0, most)


def _scales_of_groups(
    scale: F32, minimum: F32, weights: F32, n: int, most: int
) -> tuple[tuple[F32, F32], tuple[F32, F32]]:
    """Scales and minima of a block's n groups as d, rounded to 16 bits, times integers; groups count by weights."""
    sums = _groups(total(weights)[None], n)
    fits = (positive_scale(_groups(values[None], n), most, sums) for values in (scale, minimum))
    first, second = ((_rounded_half(d), np.ascontiguousarray(q.T)) for d, q in fits)
    return first, second


def _with_minimum(groups: F32, q: F32, step: F32, minimum: F32, most: int) -> F32:
    """q for the rounded scales and minima; as it was where the scale is 0."""
    step, minimum = step.reshape(-1), minimum.reshape(-1)
    new = rounded((groups + minimum) / step, 0, most)
    return np.where(step != 0, new, q)


def _without_minimum(groups: F32, q: F32, step: F32, n_max: int) -> F32:
    step = step.reshape(-1)
    new = rounded(groups / step, -n_max, n_max - 1) + np.float32(n_max)
    return np.where(step != 0, new, q)


def _crumbs(q: Bytes) -> Bytes:
    """(n, 256) of 2 bits → (n, 64): of each half of a block four quarters."""
    quarters = (q & 3).reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(quarters, axis=2).reshape(-1, 64)
    return packed


def _q3_k(x: F32, importance: F32 | None, _: F32 | None) -> Bytes:
    """x ≈ d · (scale - 32) · (q - 4): 16 groups of 16 with scales of 6 bits, q of 3."""
    groups = _groups(x, 16)
    if importance is None:
        scale, q = descended_scale(groups, 4)
        scale = scale.reshape(-1, 16)
        top = extreme(scale.T)
        inverse = np.float32(-32) / top
        d = np.where(top != 0, np.float32(1) / inverse, np.float32(0))
        scales = rounded(inverse[:, None] * scale, -32, 31) + np.float32(32)
        scales[top == 0] = 0
    else:
        weights = _groups(_importance(x, importance, _mean_square(x, 2)), 16)
        scale, q = symmetric_scale(groups, 4, weights)
        d, by_group = symmetric_scale(_groups(scale[None], 16), 32, _groups(total(weights)[None], 16))
        scales = by_group.T
    q = _without_minimum(groups, q, _rounded_half(d)[:, None] * (scales - np.float32(32)), 4)
    s, rows = np.ascontiguousarray(scales).astype(np.uint8), _rows(q, 256)
    high = s >> 4
    top_bits = high[:, :4] | high[:, 4:8] << 2 | high[:, 8:12] << 4 | high[:, 12:] << 6
    mask = np.packbits(rows.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate([mask, _crumbs(rows), s[:, :8] & 15 | s[:, 8:] << 4, top_bits, _half(d)], axis=1)


def _q6_k(x: F32, importance: F32 | None, _: F32 | None) -> Bytes:
    """x ≈ d · scale · (q - 32): 16 groups of 16 with signed 8-bit scales, q of 6 bits."""
    groups = _groups(x, 16)
    weights = groups * groups if importance is None else _groups(importance, 16)
    scale, q = symmetric_scale(groups, 32, weights)
    scale = scale.reshape(-1, 16)
    top = extreme(scale.T)
    zeros = np.abs(top) < TINY
    inverse = np.float32(-128) / top
    d = np.where(zeros, np.float32(0), np.float32(1) / inverse)
    scales = np.where(zeros[:, None], np.float32(0), rounded(inverse[:, None] * scale, -128, 127))
    q = _without_minimum(groups, q, _rounded_half(d)[:, None] * scales, 32)
    rows = _rows(q, 256)
    rows[zeros] = 0
    halves = rows.reshape(-1, 2, 2, 64)
    low = (halves[:, :, 0] & 15 | (halves[:, :, 1] & 15) << 4).reshape(-1, 128)
    return np.concatenate(
        [low, _crumbs(np.asarray(rows >> 4, np.uint8)), scales.astype(np.int8).view(np.uint8), _half(d)], axis=1
    )


def _codes_scale(groups: F32, weights: F32) -> F32:
    """x ≈ scale · one of IQ4_NL's codes: of 16 scales, in which the largest magnitude becomes about the end of the
    codes' longer side, the best multiple of the best."""
    top = extreme(groups)
    scale = best = np.zeros_like(top)
    first = np.float32(1) / (-top / _CODES[0])
    for i, inverse in enumerate((first, *((np.float32(step) + _CODES[0]) / top for step in range(-7, 8)))):
        values = _CODES[_nearest(groups, inverse)]
        weighted = weights * values
        sum_xq, sum_qq = total(weighted * groups), total(np.multiply(weighted, values, out=weighted))
        better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq) if i else np.ones_like(top, np.bool_)
        scale = np.where(better, np.where(sum_qq > 0, sum_xq / sum_qq, np.float32(0)), scale)
        best = np.where(better, scale * sum_xq, best)
    return np.where(np.abs(top) < TINY, np.float32(0), scale)


def _nearest(x: F32, inverse: F32) -> Bytes:
    """The place of the code that is nearest to inverse · x."""
    steps = np.floor((inverse * x) * np.float32(2)) + np.float32(256)
    return np.asarray(_NEAREST[np.clip(np.nan_to_num(steps), 0, 511).astype(np.int16)])


def _inverse(d: F32) -> F32:
    """1/d, and 0 where d is 0."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _iq4_nl(x: F32, importance: F32 | None, _: F32 | None) -> Bytes:
    """x ≈ d · one of 16 codes."""
    weights = x * x if importance is None else _importance(x, importance, _mean_square(x, 2))
    groups = _groups(x, 32)
    d = _codes_scale(groups, _groups(weights, 32))
    return np.concatenate([_half(d), _nibbles(_nearest(groups, _inverse(d)).T)], axis=1)


def _iq4_xs(x: F32, importance: F32 | None, _: F32 | None) -> Bytes:
    """x ≈ d · (scale - 32) · one of IQ4_NL's codes: 8 groups of 32 with scales of 6 bits."""
    weights = x * x if importance is None else _importance(x, importance, _mean_square(x, 2))
    groups = _groups(x, 32)
    scale = _codes_scale(groups, _groups(weights, 32)).reshape(-1, 8)
    d = -extreme(scale.T) / np.float32(32)
    scales = rounded(_inverse(d)[:, None] * scale, -32, 31)
    places = _nearest(groups, _inverse((d[:, None] * scales).reshape(-1)))
    nibbles = _nibbles(places.T).reshape(-1, 128)
    s = (scales + np.float32(32)).astype(np.uint8)
    low = s[:, ::2] & 15 | s[:, 1::2] << 4
    high = (s >> 4).reshape(-1, 2, 4) << np.arange(0, 8, 2, dtype=np.uint8)
    return np.concatenate([_half(d), np.bitwise_or.reduce(high, axis=2), low, nibbles], axis=1)


def _mxfp4(x: F32, _importance: F32 | None, _mean_square: F32 | None) -> Bytes:
    """x ≈ 2^(e − 128) · one of 16 codes; e as OCP says: of the codes' power of two the largest has
    none above it."""
    codes = np.array(BLOCK_TYPES["mxfp4"].codes, np.float32)
    most = np.abs(x).max(axis=1, keepdims=True)
    e = np.where(most >= 2.0**-124, np.frexp(most)[1] + 124, 0)
    ascending, places = np.unique(codes, return_index=True)
    nearest = places[np.searchsorted((ascending[1:] + ascending[:-1]) / 2, np.ldexp(x, 128 - e))]
    return np.concatenate([e.astype(np.uint8), _nibbles(nearest.astype(np.uint8))], axis=1)


# gguf-py has the types of 32 numbers without importances, and Q8_0, which has no use for them
WEIGHTED_ENCODERS: dict[str, Encoder] = {
    "q4_0": partial(_32_symmetric, 4),
    "q5_0": partial(_32_symmetric, 5),
    "q4_1": partial(_32_with_minimum, 4),
    "q5_1": partial(_32_with_minimum, 5),
}
ENCODERS: dict[str, Encoder] = {
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": partial(_q45_k, 4),
    "q5_k": partial(_q45_k, 5),
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}
