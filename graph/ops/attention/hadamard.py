"""Rotation of queries, keys and values by a Hadamard matrix, for KV caches of few bits.

An outlier spreads over its block, and products of queries and keys stay what they are (QuaRot, Ashkboos
et al., 2024)."""

from __future__ import annotations

import math

import numpy as np

from logitless.graph.op import Array, op

MAX_BLOCK = 128  # elements that are rotated together at most, as in llama.cpp


def block_size(size: int) -> int:
    """Elements that are rotated together: the largest power of two, up to MAX_BLOCK, that divides a head's."""
    return math.gcd(size, MAX_BLOCK)


@op("x f32 (…, D)", needs="D % 32 == 0")
def hadamard(x: Array) -> Array:
    """Each block of n elements of x's last axis (`block_size`) times H / √n, which is its own inverse:
    H[i][j] is −1 to the power of the number of bits that are set in both i and j. Sums are those of
    the fast Walsh-Hadamard transform, neighbours first."""
    n, y = block_size(x.shape[-1]), x
    for step in (1 << i for i in range(n.bit_length() - 1)):
        pairs = y.reshape(*x.shape[:-1], -1, 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack((a + b, a - b), -2).reshape(x.shape)
    return y * (1 / math.sqrt(n))


hadamard.vjp(lambda g, y, x: (hadamard(g),))
hadamard.inplace = (0,)
for _shape in ((3, 2, 96), (1, 5, 64), (2, 1, 576), (2, 3, 256)):
    hadamard.case(lambda r, s: ([r.normal(size=s)], {}), _shape)
