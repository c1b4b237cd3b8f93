"""Blocks of 32 numbers in the KV cache, as llama.cpp's quantizers of a row make them.

Their layout: graph/dtype.py (`KVType`).
"""

from __future__ import annotations

import itertools

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.gather import codebook_reader
from logitless.backends.cpu.kernels.ir.registry import (
    abs_f32,
    f16_to_f32,
    f32_to_f16,
    f32p,
    max_f32,
    min_f32,
    rint_f32,
    u8p,
    u16p,
    u32p,
)

# A block with codes is all zeros if its largest magnitude is below this, as in llama.cpp (GROUP_MAX_EPS).
ZERO_BLOCK = np.float32(1e-15)


def _fit(kind):
    """f(x, first): the inverse of the scale that quants follow from, the scale to be stored, and the minimum."""
    bits, mins, codes = kind.bits, kind.mins, bool(kind.codes)
    most = np.float32((1 << bits) - 1)
    lowest = np.float32(-127 if codes else -(1 << bits - 1))
    quantize, value_of = _quantizer(kind), codebook_reader(kind.codes)

    @njit(forceinline=True)
    def fit(x, first):
        low, high, top = x[first], x[first], x[first]
        for i in range(32):
            v = x[first + i]
            low, high = min_f32(low, v), max_f32(high, v)
            if abs_f32(v) > abs_f32(top):
                top = v
        if mins:
            scale = (high - low) / most
        elif bits == 8:
            scale = max_f32(abs_f32(low), abs_f32(high)) / np.float32(127)
        else:
            scale, low = top / lowest, np.float32(0)
        inverse = np.float32(1) / scale if scale != np.float32(0) else np.float32(0)
        if codes:
            if abs_f32(top) < ZERO_BLOCK:
                return np.float32(0), np.float32(0), low
            product, square = np.float32(0), np.float32(0)
            for i in range(32):  # least squares, weighted with x²
                v = x[first + i]
                weight, q = v * v, np.float32(value_of(quantize(v, inverse, low)))
                term = weight * q
                product += term * v
                square += term * q
            scale = product / square if square > np.float32(0) else np.float32(0)
        return inverse, scale, low

    return fit


def _quantizer(kind):
    """f(x, inverse, low): the quant of a number."""
    bits, mins, most = kind.bits, kind.mins, np.int32((1 << kind.bits) - 1)
    half = np.float32(kind.offset + 0.5)
    codes = kind.codes or (0, 0)
    between = tuple(np.float32((a + b) / 2) for a, b in itertools.pairwise(codes))

    @njit(forceinline=True)
    def quantize(x, inverse, low):
        if bits == 8:
            return np.int32(rint_f32(x * inverse)) & np.int32(255)
        elif mins:
            return min(most, np.int32((x - low) * inverse + half)) & most
        elif len(codes) > 2:
            v, q = x * inverse, np.int32(0)
            for middle in between:
                q += np.int32(v >= middle)
            return q
        else:
            return min(most, np.int32(x * inverse + half)) & most

    return quantize


def block_mover(kind, *, cells_last, load, cells=16):
    """f(x, page, cell, size): store a row of a cell, or load it as f32. `cells_last`: of keys; `cells`: of a page."""
    bits, mins, offset, codes, scales_at = kind.bits, kind.mins, kind.offset, kind.codes, kind.scales_at
    step = 16 if cells_last else 1  # distance between blocks, and between bytes of a block
    n_bytes = 32 if bits == 8 else 16  # of a block
    apart = 1 if cells_last else 16  # elements in one byte
    fit, quantize, value_of = _fit(kind), _quantizer(kind), codebook_reader(codes)

    @njit(forceinline=True)
    def number(q):
        if bits == 8:
            return np.float32(np.int8(q))
        return np.float32(value_of(q) - offset)

    @njit(forceinline=True)
    def move(x_at, page, cell, size):
        part = size * cells // 16
        x, quants, high = f32p(x_at), u8p(page), u32p(page + part * 8)
        scales, minima = u16p(page + part * scales_at), u16p(page + part * (scales_at + 1))
        for j in range(size // 32):
            block = j * step + (cell if cells_last else cell * (size // 32))
            first = j * n_bytes * step + (cell if cells_last else cell * (size // 32) * n_bytes)
            fifth = np.uint32(0)
            if load:
                scale, low = f16_to_f32(scales[block]), np.float32(0)
                if mins:
                    low = f16_to_f32(minima[block])
                if bits == 5:
                    fifth = high[block]
            else:
                inverse, scale, low = fit(x, j * 32)
                scales[block] = f32_to_f16(scale)
                if mins:
                    minima[block] = f32_to_f16(low)
            for i in range(n_bytes):
                at = first + i * step
                one = j * 32 + (i * 2 if cells_last and bits < 8 else i)
                two, shift, shift2 = one + apart, np.uint32(one % 32), np.uint32((one + apart) % 32)
                if load:
                    byte = np.int32(quants[at])
                    if bits == 8:
                        x[one] = scale * number(byte)
                    else:
                        q1, q2 = byte & 15, byte >> 4
                        if bits == 5:
                            q1 |= np.int32((fifth >> shift) & np.uint32(1)) << 4
                            q2 |= np.int32((fifth >> shift2) & np.uint32(1)) << 4
                        x[one], x[two] = scale * number(q1) + low, scale * number(q2) + low
                else:
                    q1 = quantize(x[one], inverse, low)
                    if bits < 8:
                        q2 = quantize(x[two], inverse, low)
                        if bits == 5:
                            fifth |= np.uint32(q1 >> 4) << shift | np.uint32(q2 >> 4) << shift2
                        q1 = q1 & 15 | (q2 & 15) << 4
                    quants[at] = np.uint8(q1)
            if bits == 5 and not load:
                high[block] = fifth

    return move
