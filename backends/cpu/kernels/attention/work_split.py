"""Work split of paged attention: units of tokens, KV heads and spans, and the visible cells."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.tile import BLOCK, PAGE
from logitless.backends.cpu.kernels.matmul.layout import ATTENTION_SPAN

BLOCKS = ATTENTION_SPAN // BLOCK


@njit(forceinline=True)
def parts_of(pos, own, n_tokens, window, most):
    """Parts that each token's spans are split into: the spans of the longest, `most` at most.

    pos: the last position that each token sees; own: the one from which its window counts.
    """
    longest = 1
    for t in range(n_tokens if most > 1 else 0):
        longest = max(longest, pos[t] // ATTENTION_SPAN + 1 - first_span(own[t], window))
    return min(longest, most)


@njit(forceinline=True)
def unit_at(unit, kv_heads, n_tokens, tokens, most):
    """First token of a unit, its KV head, and its part out of `most`.

    Units of the last tokens, which see most, come first. Behind the last unit the token is
    negative.
    """
    group = unit // most // kv_heads
    return ((n_tokens + tokens - 1) // tokens - 1 - group) * tokens, unit // most % kv_heads, unit % most


@njit(forceinline=True)
def first_block(position, window):
    return max(0, position - window + 1) // BLOCK if window > 0 else 0


@njit(forceinline=True)
def first_span(position, window):
    return first_block(position, window) // BLOCKS


@njit(forceinline=True)
def pages_of(table, block, position, kv_heads, h):
    """A block's two pages of a KV head, in units of such pages; the first twice if it is the last."""
    first, second = 2 * block, min(2 * block + 1, position // PAGE)
    return np.int64(table[first]) * kv_heads + h, np.int64(table[second]) * kv_heads + h


@njit(forceinline=True)
def visible(position, own, block, window):
    """Visible cells lo…hi−1 of a block, for a token that sees this position as the last."""
    lo = own - window + 1 - block * BLOCK if window > 0 else 0
    return max(0, lo), min(BLOCK, position + 1 - block * BLOCK)


@njit(forceinline=True)
def all_independent(slot, pos, own, n_tokens, window, cores):
    """True when no token has a neighbour of its sequence, and whole tokens balance the cores.

    Balanced: no token sees more than half of a core's part. Padding rows, all at one position, are
    not neighbours.
    """
    total = longest = 0
    for t in range(n_tokens):
        if t > 0 and slot[t] == slot[t - 1] and (own[t] != own[t - 1] or pos[t] != pos[t - 1]):
            return False
        cells = np.int64(pos[t]) + 1 - (max(0, np.int64(own[t]) + 1 - window) if window > 0 else 0)
        total, longest = total + cells, max(longest, cells)
    return 2 * cores * longest <= total
