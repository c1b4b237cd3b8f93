"""Attention over page tables with an online softmax, and the writes into the cache.

A unit is a few neighbouring tokens of a batch and one key head. The tokens' query rows walk their sequence in blocks
of 32 positions (two pages), which are turned to f32 once for all of them. A row's arithmetic is the same alone and in
company, in a block that it sees wholly or in part: scores, a new top where one is due, weights, cells in order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from backends.cpu.kernels.attention_tile import (
    BLOCK,
    LOWEST,
    PAGE,
    divide,
    page_nbytes,
    scores,
    softmax_step,
    weighted_sum,
    widen,
)
from backends.cpu.kernels.layout import ACT_BLOCK
from backends.cpu.kernels.quantize import panel_of, row_rounder
from backends.cpu.kernels.registry import (
    abs_f32,
    bits_f32,
    f16_to_f32,
    f32_to_f16,
    f32p,
    i8p,
    i32p,
    kernel,
    max_f32,
    rint_f32,
    u8p,
    u16p,
)

LOG2_E = np.float32(1.4426950408889634)


@kernel("attention")
def attention(key_dtype, value_dtype, head_size, group_size, then=""):
    """a: q, k, v, tables, slot, pos, y, T, H_kv, pages a table, window, scale bits, cap bits, tokens of a unit; and
    where y is to be rounded (`then` "act"), its panel rows and panels.

    Units of the last tokens come first, as they see most. Scratch per thread, with R = tokens · query heads of a key
    head: a block's keys or values (32, D), scores (R, 32), q and sums (R, D), sums of weights (R, 16), the cells that
    each row sees (R, 2), and its top (R).
    """
    size, group = int(head_size), int(group_size)
    widen_keys, widen_values = widen(key_dtype, size, keys=True), widen(value_dtype, size, keys=False)
    weigh8 = softmax_step(size, 8, masked=False)
    masked8, weigh4, weigh2, weigh1 = (softmax_step(size, n, masked=True) for n in (8, 4, 2, 1))
    whole4 = weighted_sum(size, 4, whole=True)
    sum4, sum2, sum1 = (weighted_sum(size, n, whole=False) for n in (4, 2, 1))
    key_page, value_page = page_nbytes(key_dtype, size), page_nbytes(value_dtype, size)
    score8, score4, score2, score1 = (scores(size, n, (key_page, value_page)) for n in (8, 4, 2, 1))
    finish = divide(size)
    rounded, round_row = then == "act", row_rounder(32)
    wide_page = PAGE * size * 4

    def run(a, begin, end, scratch):
        n_tokens, kv_heads, table_pages, window = a[7], a[8], a[9], a[10]
        scale, cap, tokens = bits_f32(a[11]) * LOG2_E, bits_f32(a[12]) * LOG2_E, a[13]
        max_rows = tokens * group
        slot, pos = i32p(a[4]), i32p(a[5])
        wide_at = scratch
        s_at = wide_at + 2 * wide_page
        q_at = s_at + max_rows * BLOCK * 4
        o_at = q_at + max_rows * size * 4
        l_at = o_at + max_rows * size * 4
        seen_at = l_at + max_rows * PAGE * 4
        tops_at = seen_at + max_rows * 8
        q, o, l, seen, tops = f32p(q_at), f32p(o_at), f32p(l_at), i32p(seen_at), f32p(tops_at)
        for unit in range(begin, end):
            h = unit % kv_heads
            first = ((n_tokens + tokens - 1) // tokens - 1 - unit // kv_heads) * tokens
            last = min(first + tokens, n_tokens)
            while first < last:
                n = 1  # tokens first…first+n−1 belong to one sequence
                while first + n < last and slot[first + n] == slot[first]:
                    n += 1
                rows = n * group
                lowest, highest = pos[first], pos[first]
                for t in range(n):
                    p = pos[first + t]
                    lowest, highest = min(lowest, p), max(highest, p)
                    source = f32p(a[0] + ((first + t) * kv_heads + h) * group * size * 4)
                    for i in range(group * size):
                        q[t * group * size + i] = source[i] * scale
                        o[t * group * size + i] = np.float32(0)
                    for g in range(group):
                        tops[t * group + g] = np.float32(LOWEST)
                    for i in range(group * PAGE):
                        l[t * group * PAGE + i] = np.float32(0)
                table = i32p(a[3] + slot[first] * table_pages * 4)
                start = max(0, lowest - window + 1) // BLOCK if window > 0 else 0
                for block in range(start, highest // BLOCK + 1):
                    whole = visible(lowest, block, window)[1] == BLOCK and visible(highest, block, window)[0] == 0
                    for t in range(0 if whole and rows % 8 == 0 else n):  # else nobody will ask
                        lo, hi = visible(pos[first + t], block, window)
                        for g in range(group):
                            seen[2 * (t * group + g)] = lo
                            seen[2 * (t * group + g) + 1] = hi
                    n_pages = min(2, highest // PAGE + 1 - 2 * block)
                    for i in range(n_pages):
                        at = np.int64(table[2 * block + i]) * kv_heads + h
                        widen_keys(a[1] + at * key_page, wide_at + i * wide_page)
                    # The first rows' scores have time to fetch these values and the next keys; pages lie anywhere.
                    k0 = k1 = v1 = wide_at  # which is near, so it costs nothing where there is no such page
                    v0 = a[2] + (np.int64(table[2 * block]) * kv_heads + h) * value_page
                    if n_pages == 2:
                        v1 = a[2] + (np.int64(table[2 * block + 1]) * kv_heads + h) * value_page
                    if 2 * block + 2 <= highest // PAGE:
                        k0 = a[1] + (np.int64(table[2 * block + 2]) * kv_heads + h) * key_page
                    if 2 * block + 3 <= highest // PAGE:
                        k1 = a[1] + (np.int64(table[2 * block + 3]) * kv_heads + h) * key_page
                    row = 0
                    while row < rows:
                        alike = min(8, rows - row)
                        alike = 4 if 4 <= alike < 8 else (2 if alike == 3 else alike)
                        x, s, sr = q_at + row * size * 4, s_at + row * BLOCK * 4, seen_at + row * 8
                        tr, lr, y = tops_at + row * 4, l_at + row * PAGE * 4, o_at + row * size * 4
                        if alike == 8:
                            score8(x, wide_at, s, k0, k1, v0, v1)
                            if whole:
                                weigh8(s, tr, lr, y, sr, cap)
                            else:
                                masked8(s, tr, lr, y, sr, cap)
                        elif alike == 4:
                            score4(x, wide_at, s, k0, k1, v0, v1)
                            weigh4(s, tr, lr, y, sr, cap)
                        elif alike == 2:
                            score2(x, wide_at, s, k0, k1, v0, v1)
                            weigh2(s, tr, lr, y, sr, cap)
                        else:
                            score1(x, wide_at, s, k0, k1, v0, v1)
                            weigh1(s, tr, lr, y, sr, cap)
                        row += alike
                        k0 = k1 = v0 = v1 = wide_at
                    for i in range(n_pages):  # in the keys' place: all stays in the first cache
                        at = np.int64(table[2 * block + i]) * kv_heads + h
                        widen_values(a[2] + at * value_page, wide_at + i * wide_page)
                    row = 0
                    while whole and rows - row >= 4:
                        whole4(s_at + row * BLOCK * 4, wide_at, o_at + row * size * 4, 0, BLOCK)
                        row += 4
                    while row < rows:
                        alike = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
                        lo, hi = BLOCK, 0  # what any of them sees
                        for r in range(row, row + alike):
                            if seen[2 * r] < seen[2 * r + 1]:
                                lo, hi = min(lo, seen[2 * r]), max(hi, seen[2 * r + 1])
                        if lo < hi:
                            s, y = s_at + row * BLOCK * 4, o_at + row * size * 4
                            if alike == 4:
                                sum4(s, wide_at, y, lo, hi)
                            elif alike == 2:
                                sum2(s, wide_at, y, lo, hi)
                            else:
                                sum1(s, wide_at, y, lo, hi)
                        row += alike
                for t in range(n):
                    rows_at = o_at + t * group * size * 4
                    out = rows_at if rounded else a[6] + ((first + t) * kv_heads + h) * group * size * 4
                    for g in range(group):
                        finish(rows_at + g * size * 4, l_at + (t * group + g) * PAGE * 4, out + g * size * 4)
                    if rounded:
                        count = group * size // 32
                        r0, panel = panel_of(first + t, n_tokens, a[14], a[15])
                        y = a[6] + ((r0 * kv_heads + h * panel) * count + first + t - r0) * ACT_BLOCK
                        round_row(rows_at, y, panel * ACT_BLOCK, count)
                first += n

    return run


@njit(forceinline=True)
def visible(position, block, window):
    """The cells lo…hi−1 of a block that a token at this position sees."""
    lo = position - window + 1 - block * BLOCK if window > 0 else 0
    return max(0, lo), min(BLOCK, position + 1 - block * BLOCK)


@njit(forceinline=True)
def _block_scale(x, j):
    """max|x| / 127 of the j-th 32 elements: q8_0's scale."""
    top = np.float32(0)
    for i in range(32):
        top = max_f32(top, abs_f32(x[j * 32 + i]))
    return top / np.float32(127)


def _moved(dtype, cells_last, *, back):
    """a: cache, rows, cells, H_kv, D: rows into the cache, or (`back`) out of it as f32. A unit is a token.

    `cells_last`: keys; else values (attention_tile.py).
    """
    block_nbytes = page_nbytes(dtype, 32)  # of 32 elements of a page's cells
    step = 16 if cells_last else 1  # from one element of a row to the next

    def run(a, begin, end, scratch):
        cells, heads, size = i32p(a[2]), a[3], a[4]
        page = size * block_nbytes // 32
        for t in range(begin, end):
            cell = cells[t] % 16
            first = cell if cells_last else cell * size
            for h in range(heads):
                x = f32p(a[1] + (t * heads + h) * size * 4)
                base = a[0] + (np.int64(cells[t] // 16) * heads + h) * page
                if dtype == "q8_0":
                    q, scales = i8p(base), u16p(base + size * 16)
                    first_scale = cell if cells_last else cell * (size // 32)
                    for j in range(size // 32):
                        if back:
                            scale = f16_to_f32(scales[first_scale + j * step])
                            for i in range(32):
                                x[j * 32 + i] = scale * np.float32(q[first + (j * 32 + i) * step])
                        else:
                            scale = _block_scale(x, j)
                            scales[first_scale + j * step] = f32_to_f16(scale)
                            inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
                            for i in range(32):
                                q[first + (j * 32 + i) * step] = np.int8(rint_f32(x[j * 32 + i] * inverse))
                elif dtype == "f16":
                    x16 = u16p(base)
                    for i in range(size):
                        if back:
                            x[i] = f16_to_f32(x16[first + i * step])
                        else:
                            x16[first + i * step] = f32_to_f16(x[i])
                else:
                    x32 = f32p(base)
                    for i in range(size):
                        if back:
                            x[i] = x32[first + i * step]
                        else:
                            x32[first + i * step] = x[i]

    return run


@kernel("store_k")
def store_k(dtype):
    return _moved(dtype, True, back=False)


@kernel("store_v")
def store_v(dtype):
    return _moved(dtype, False, back=False)


@kernel("load_k")
def load_k(dtype):
    return _moved(dtype, True, back=True)


@kernel("load_v")
def load_v(dtype):
    return _moved(dtype, False, back=True)


@kernel("copy_pages")
def copy_pages():
    """a: cache, pairs, n pairs, bytes of a page. One unit: the pairs are copied in order."""

    def run(a, begin, end, scratch):
        pairs, size = i32p(a[1]), a[3]
        for i in range(a[2]):
            if pairs[2 * i] != pairs[2 * i + 1]:
                source = u8p(a[0] + np.int64(pairs[2 * i]) * size)
                destination = u8p(a[0] + np.int64(pairs[2 * i + 1]) * size)
                for j in range(size):
                    destination[j] = source[j]

    return run
