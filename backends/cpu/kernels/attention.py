"""Attention over page tables with an online softmax.

A unit is a few neighbouring tokens of a batch and one key head. The tokens' query rows walk their sequence in blocks
of 32 positions (two pages), which are turned to f32 once for all of them. A token that has no neighbour of its sequence
reads them where they lie; if no token has one, a unit is a token with all key heads, whose pages are one stretch of
memory. A row's arithmetic is the same alone and in company, in a block that it sees wholly or in part: scores, a new
top where one is due, weights, cells in order.
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
    weighted_sum_of_pages,
    widen,
)
from backends.cpu.kernels.layout import ACT_BLOCK
from backends.cpu.kernels.mathf import exp_exact
from backends.cpu.kernels.quantize import panel_of, row_rounder
from backends.cpu.kernels.registry import bits_f32, f32p, i32p, kernel

LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
MOST_ALONE = 8  # query heads of a key head: as many rows as scores take at once


@kernel("attention")
def attention(key_dtype, value_dtype, head_size, group_size, then=""):
    """a: q, k, v, tables, slot, pos, y, T, H_kv, pages a table, window, scale bits, cap bits, tokens of a unit; and
    where y is to be rounded (`then` "act"), its panel rows and panels; or the sinks (`then` "sinks"): a score of each
    query head that adds to the weights' sum and to nothing else.

    Units of the last tokens come first, as they see most. Scratch per thread, with R = tokens · query heads of a key
    head, or all query heads if that is more: a block's keys or values (32, D), scores (R, 32), q and sums (R, D), sums
    of weights (R, 16), the cells that each row sees (R, 2), and its top (R).
    """
    size, group = int(head_size), int(group_size)
    wide_page = PAGE * size * 4
    alone = _one_token(key_dtype, value_dtype, size, min(group, MOST_ALONE))
    together = _several_tokens(key_dtype, value_dtype, size, group)
    finish = divide(size)
    rounded, round_row, with_sinks = then == "act", row_rounder(32), then == "sinks"

    def run(a, begin, end, scratch):
        n_tokens, kv_heads, table_pages, window = a[7], a[8], a[9], a[10]
        scale, cap, tokens = bits_f32(a[11]) * LOG2_E, bits_f32(a[12]) * LOG2_E, a[13]
        slot, pos = i32p(a[4]), i32p(a[5])
        n_units = (n_tokens + tokens - 1) // tokens * kv_heads
        apart = group <= MOST_ALONE and all_apart(slot, pos, n_tokens, window)
        most = max(tokens, kv_heads) * group
        s_at = scratch + 2 * wide_page
        q_at = s_at + most * BLOCK * 4
        o_at = q_at + most * size * 4
        l_at = o_at + most * size * 4
        seen_at = l_at + most * PAGE * 4
        tops_at = seen_at + most * 8
        area = (scratch, s_at, q_at, o_at, l_at, seen_at, tops_at)
        q, o, l, tops = f32p(q_at), f32p(o_at), f32p(l_at), f32p(tops_at)
        for unit in range(begin, end):
            h, heads = unit % kv_heads, 1
            first = first_token(unit, kv_heads, n_tokens, tokens)
            last = min(first + tokens, n_tokens)
            if apart:
                h, heads = 0, kv_heads
                first, last = n_tokens * unit // n_units, n_tokens * (unit + 1) // n_units
            while first < last:
                n = 1  # tokens first…first+n−1 belong to one sequence
                while not apart and first + n < last and slot[first + n] == slot[first]:
                    n += 1
                of_token = heads * group  # rows
                for t in range(n):
                    source = f32p(a[0] + ((first + t) * kv_heads + h) * group * size * 4)
                    for i in range(of_token * size):
                        q[t * of_token * size + i] = source[i] * scale
                        o[t * of_token * size + i] = np.float32(0)
                for i in range(n * of_token):
                    tops[i] = np.float32(LOWEST)
                for i in range(n * of_token * PAGE):
                    l[i] = np.float32(0)
                table = i32p(a[3] + slot[first] * table_pages * 4)
                if group <= MOST_ALONE and n == 1:
                    token, head = first + 1, h  # what this thread reads next, as far as that is known here
                    if token == last and not apart:
                        token, head = first_token(unit + 1, kv_heads, n_tokens, tokens), (unit + 1) % kv_heads
                    token = first if token < 0 or token == n_tokens else token
                    next_table = i32p(a[3] + slot[token] * table_pages * 4)
                    then0, then1 = pages_of(next_table, first_block(pos[token], window), pos[token], kv_heads, head)
                    alone(a, table, pos[first], window, cap, h, heads, then0, then1, area)
                else:
                    together(a, table, pos, first, n, window, cap, h, area)
                for t in range(n * heads):  # of the token first + t, or of the head h + t
                    at, head = (first + t, h) if heads == 1 else (first, h + t)
                    rows_at = o_at + t * group * size * 4
                    out = rows_at if rounded else a[6] + (at * kv_heads + head) * group * size * 4
                    for g in range(group):
                        if with_sinks:
                            row = t * group + g
                            below = f32p(a[14])[head * group + g] - tops[row] * LN_2
                            l[row * PAGE] += exp_exact(below)
                        finish(rows_at + g * size * 4, l_at + (t * group + g) * PAGE * 4, out + g * size * 4)
                    if rounded:
                        count = group * size // 32
                        r0, panel = panel_of(at, n_tokens, a[14], a[15])
                        y = a[6] + ((r0 * kv_heads + head * panel) * count + at - r0) * ACT_BLOCK
                        round_row(rows_at, y, panel * ACT_BLOCK, count)
                first += n

    return run


def _one_token(key_dtype, value_dtype, size, group):
    """f(…): a token's rows of `heads` key heads from h on walk its sequence, `group` rows at once.

    Each block's scores and sums ask for the same pages of the next block; the last block's for those at then0, then1.
    """
    key_page, value_page = page_nbytes(key_dtype, size), page_nbytes(value_dtype, size)
    score = scores(size, group, key_dtype, (key_page, key_page, 0, 0))
    weigh, add = softmax_step(size, group, masked=True), weighted_sum_of_pages(size, group, value_dtype)

    @njit(forceinline=True)
    def walk(a, table, position, window, cap, h, heads, then0, then1, area):
        _, s, q, o, l, seen_at, tops = area
        seen, kv_heads = i32p(seen_at), a[8]
        start, end = first_block(position, window), position // BLOCK + 1
        at0, at1 = pages_of(table, start, position, kv_heads, h)
        for block in range(start, end):
            next0, next1 = then0, then1
            if block + 1 < end:
                next0, next1 = pages_of(table, block + 1, position, kv_heads, h)
            lo, hi = visible(position, block, window)
            for g in range(group):
                seen[2 * g], seen[2 * g + 1] = lo, hi
            for j in range(heads):
                row = j * group
                k0, k1 = a[1] + (at0 + j) * key_page, a[1] + (at1 + j) * key_page
                v0, v1 = a[2] + (at0 + j) * value_page, a[2] + (at1 + j) * value_page
                k2, k3 = a[1] + (next0 + j) * key_page, a[1] + (next1 + j) * key_page
                v2, v3 = a[2] + (next0 + j) * value_page, a[2] + (next1 + j) * value_page
                score(q + row * size * 4, k0, k1, s, k2, k3, s, s)
                weigh(s, tops + row * 4, l + row * PAGE * 4, o + row * size * 4, seen_at, cap)
                add(s, v0, v1, o + row * size * 4, lo, hi, v2, v3)
            at0, at1 = next0, next1

    return walk


def _several_tokens(key_dtype, value_dtype, size, group):
    """f(…): the rows of n neighbouring tokens of a sequence and of one key head walk it together."""
    widen_keys, widen_values = widen(key_dtype, size, keys=True), widen(value_dtype, size, keys=False)
    weigh8 = softmax_step(size, 8, masked=False)
    masked8, weigh4, weigh2, weigh1 = (softmax_step(size, n, masked=True) for n in (8, 4, 2, 1))
    whole4 = weighted_sum(size, 4, whole=True)
    sum4, sum2, sum1 = (weighted_sum(size, n) for n in (4, 2, 1))
    key_page, value_page = page_nbytes(key_dtype, size), page_nbytes(value_dtype, size)
    ahead = (key_page, key_page, value_page, value_page)
    score8, score4, score2, score1 = (scores(size, n, "f32", ahead) for n in (8, 4, 2, 1))
    wide_page = PAGE * size * 4
    some4, some2, some1 = group % 8 > 0, group % 4 > 0, group % 2 > 0  # what can be left of rows taken 8 at once

    @njit(forceinline=True)
    def walk(a, table, pos, first, n, window, cap, h, area):
        wide_at, s_at, q_at, o_at, l_at, seen_at, tops_at = area
        seen, kv_heads, rows = i32p(seen_at), a[8], n * group
        lowest, highest = pos[first], pos[first]
        for t in range(n):
            lowest, highest = min(lowest, pos[first + t]), max(highest, pos[first + t])
        start, end = first_block(lowest, window), highest // BLOCK + 1
        next0, next1 = pages_of(table, start, highest, kv_heads, h)
        for block in range(start, end):
            whole = visible(lowest, block, window)[1] == BLOCK and visible(highest, block, window)[0] == 0
            for t in range(0 if whole and rows % 8 == 0 else n):  # else nobody will ask
                lo, hi = visible(pos[first + t], block, window)
                for g in range(group):
                    seen[2 * (t * group + g)] = lo
                    seen[2 * (t * group + g) + 1] = hi
            at0, at1 = next0, next1
            if block + 1 < end:
                next0, next1 = pages_of(table, block + 1, highest, kv_heads, h)
            n_pages = 1 + (at1 != at0)
            for i in range(n_pages):
                widen_keys(a[1] + (at1 if i else at0) * key_page, wide_at + i * wide_page)
            # The first rows' scores have time to fetch these values and the next keys; pages lie anywhere.
            k0, k1 = a[1] + next0 * key_page, a[1] + next1 * key_page
            v0, v1 = a[2] + at0 * value_page, a[2] + at1 * value_page
            row = 0
            while row < rows:
                alike = min(8, rows - row)
                alike = 4 if 4 <= alike < 8 else (2 if alike == 3 else alike)
                x, s, sr = q_at + row * size * 4, s_at + row * BLOCK * 4, seen_at + row * 8
                tr, lr, y = tops_at + row * 4, l_at + row * PAGE * 4, o_at + row * size * 4
                if alike == 8:
                    score8(x, wide_at, wide_at + wide_page, s, k0, k1, v0, v1)
                    if whole:
                        weigh8(s, tr, lr, y, sr, cap)
                    else:
                        masked8(s, tr, lr, y, sr, cap)
                elif some4 and alike == 4:
                    score4(x, wide_at, wide_at + wide_page, s, k0, k1, v0, v1)
                    weigh4(s, tr, lr, y, sr, cap)
                elif some2 and alike == 2:
                    score2(x, wide_at, wide_at + wide_page, s, k0, k1, v0, v1)
                    weigh2(s, tr, lr, y, sr, cap)
                elif some1:
                    score1(x, wide_at, wide_at + wide_page, s, k0, k1, v0, v1)
                    weigh1(s, tr, lr, y, sr, cap)
                row += alike
                k0 = k1 = v0 = v1 = wide_at
            for i in range(n_pages):  # in the keys' place: all stays in the first cache
                widen_values(a[2] + (at1 if i else at0) * value_page, wide_at + i * wide_page)
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
                    elif some2 and alike == 2:
                        sum2(s, wide_at, y, lo, hi)
                    elif some1:
                        sum1(s, wide_at, y, lo, hi)
                row += alike

    return walk


@njit(forceinline=True)
def first_token(unit, kv_heads, n_tokens, tokens):
    """Of a unit; less than 0 behind the last unit."""
    return ((n_tokens + tokens - 1) // tokens - 1 - unit // kv_heads) * tokens


@njit(forceinline=True)
def first_block(position, window):
    return max(0, position - window + 1) // BLOCK if window > 0 else 0


@njit(forceinline=True)
def pages_of(table, block, position, kv_heads, h):
    """A block's two pages of a key head, counted in such pages; the first again where there is no second."""
    first, second = 2 * block, min(2 * block + 1, position // PAGE)
    return np.int64(table[first]) * kv_heads + h, np.int64(table[second]) * kv_heads + h


@njit(forceinline=True)
def visible(position, block, window):
    """The cells lo…hi−1 of a block that a token at this position sees."""
    lo = position - window + 1 - block * BLOCK if window > 0 else 0
    return max(0, lo), min(BLOCK, position + 1 - block * BLOCK)


@njit(forceinline=True)
def all_apart(slot, pos, n_tokens, window):
    """Whether no token has a neighbour of its sequence, and whole tokens are work that threads can share evenly: none
    sees more than a quarter of all cells. Rows that fill a batch up, all at one position, are nobody's neighbours."""
    total = longest = 0
    for t in range(n_tokens):
        if t > 0 and slot[t] == slot[t - 1] and pos[t] != pos[t - 1]:
            return False
        cells = np.int64(pos[t]) + 1 if window <= 0 else min(np.int64(pos[t]) + 1, window)
        total, longest = total + cells, max(longest, cells)
    return 4 * longest <= total
