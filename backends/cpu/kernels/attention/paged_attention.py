"""Attention over page tables with an online softmax.

A sequence's cells are taken in spans of 256, each with a softmax of its own, and a row's spans are joined in order: so
a span may be another thread's, and a step of one token has work for as many threads as its context has spans.

A unit is a few neighbouring tokens of a batch, one key head and all or some of their spans (`attention_units.py`). The
tokens' query rows walk a span in blocks of 32 positions (two pages), which are turned to f32 once for all of them. A
token that has no neighbour of its sequence reads them where they lie; if no token has one, a unit is a token with all
key heads, whose pages are one stretch of memory. A row's arithmetic is the same alone and in company, in a block that
it sees wholly or in part: scores, a new top where one is due, weights, cells in order.

Where spans are divided, units leave what they made of each in memory that all threads share, and `attention_join` goes
on from there.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.tile import (
    BLOCK,
    PAGE,
    clear_rows,
    divide,
    join_rows,
    page_nbytes,
    scores,
    softmax_step,
    weighted_sum,
    weighted_sum_of_pages,
    widen,
    widen_across,
)
from logitless.backends.cpu.kernels.attention.work_split import (
    BLOCKS,
    all_apart,
    first_block,
    first_span,
    pages_of,
    parts_of,
    place,
    visible,
)
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, i64p, kernel
from logitless.backends.cpu.kernels.ir.scalar_math import exp_exact
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, ATTENTION_SPAN, SHARED
from logitless.backends.cpu.kernels.matmul.quantize_activations import panel_of, row_rounder

LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
MOST_ALONE = 8  # query heads of a key head: as many rows as scores take at once


@kernel("attention")
def attention(key_dtype, value_dtype, head_size, group_size, then=""):
    """a: q, k, v, tables, slot, pos, y, T, H_kv, pages a table, window, scale bits, cap bits, tokens of a unit, in how
    many parts at most their spans are divided, cores; and where y is to be rounded (`then` "act"), its panel rows and
    panels; or the sinks (`then` "sinks"): a score of each query head that adds to the weights' sum and to nothing else.
    With a `value_dtype` of "keys" these are the values, too, and v is k.

    Scratch per thread, with R = tokens · query heads of a key head, or all query heads if that is more: a block's keys
    or values (32, D), scores (R, 32), q (R, D), the cells that each row sees (R, 2), and the states of R rows in a span
    and in those before it. Memory that threads share: the states of all rows in each span of a table.
    """
    size, group = int(head_size), int(group_size)
    wide_page = PAGE * size * 4
    most_alone = 0 if value_dtype == "keys" else MOST_ALONE
    alone = _one_token(key_dtype, value_dtype, size, min(group, MOST_ALONE)) if most_alone else _nobody
    together = _several_tokens(key_dtype, value_dtype, size, group)
    clear, join, write = clear_rows(size), join_rows(size), _write(size, group, then)

    def run(a, begin, end, scratch):
        n_tokens, kv_heads, table_pages, window = a[7], a[8], a[9], a[10]
        scale, cap = bits_f32(a[11]) * LOG2_E, bits_f32(a[12]) * LOG2_E
        slot, pos = i32p(a[4]), i32p(a[5])
        tokens, parts = a[13], parts_of(pos, n_tokens, window, a[14])
        apart = parts == 1 and group <= most_alone and all_apart(slot, pos, n_tokens, window, a[15])
        most = max(tokens, kv_heads) * group
        s_at = scratch + 2 * wide_page
        q_at = s_at + most * BLOCK * 4
        seen_at = q_at + most * size * 4
        states_at = seen_at + (most * 8 + 63) // 64 * 64
        own, total = _state(states_at, 2 * most, size, 0), _state(states_at, 2 * most, size, most)
        area, q = (scratch, s_at, q_at, seen_at), f32p(q_at)
        everyone = i64p(scratch - SHARED)[0]
        n_shared = (table_pages * PAGE + ATTENTION_SPAN - 1) // ATTENTION_SPAN * kv_heads * n_tokens * group
        for unit in range(begin, end):
            first, h, part = place(unit, kv_heads, n_tokens, tokens, a[14])
            last, heads = min(first + tokens, n_tokens), 1
            if apart:
                h, heads, part, n_units = 0, kv_heads, 0, (n_tokens + tokens - 1) // tokens * kv_heads * a[14]
                first, last = n_tokens * unit // n_units, n_tokens * (unit + 1) // n_units
            while first < last and part < parts:
                n = 1  # tokens first…first+n−1 belong to one sequence
                lowest = highest = pos[first]
                while not apart and first + n < last and slot[first + n] == slot[first]:
                    lowest, highest = min(lowest, pos[first + n]), max(highest, pos[first + n])
                    n += 1
                span = first_span(lowest, window)
                spans = highest // ATTENTION_SPAN + 1 - span
                span, stop = span + spans * part // parts, span + spans * (part + 1) // parts
                rows = n * heads * group
                for t in range(n):
                    source = f32p(a[0] + ((first + t) * kv_heads + h) * group * size * 4)
                    for i in range(heads * group * size):
                        q[t * heads * group * size + i] = source[i] * scale
                table = i32p(a[3] + slot[first] * table_pages * 4)
                by_one = group <= most_alone and n == 1
                end_block = min(stop * BLOCKS, highest // BLOCK + 1)
                then0, then1 = np.int64(0), np.int64(0)
                if by_one:
                    token, head = first + 1, h  # what this thread reads next, as far as that is known here
                    if token == last and not apart:
                        token, head, _ = place(unit + a[14], kv_heads, n_tokens, tokens, a[14])
                    token = first if token < 0 or token == n_tokens else token
                    next_table, block = i32p(a[3] + slot[token] * table_pages * 4), first_block(pos[token], window)
                    if part + 1 < parts:
                        next_table, block, token, head = table, end_block, first, h
                    then0, then1 = pages_of(next_table, block, pos[token], kv_heads, head)
                for i in range(span, stop):
                    begin_block = max(i * BLOCKS, first_block(lowest, window))
                    blocks = (begin_block, min(i * BLOCKS + BLOCKS, end_block), end_block)
                    at = total if i == span else own
                    if parts > 1:
                        at = _state(everyone, n_shared, size, ((i * kv_heads + h) * n_tokens + first) * group)
                    clear(at[0], at[1], at[2], rows)
                    if by_one:
                        alone(a, table, pos[first], window, cap, h, heads, blocks, then0, then1, area, at)
                    else:
                        together(a, table, pos, first, n, lowest, highest, window, cap, h, blocks, area, at)
                    if i > span and parts == 1:
                        join(own[0], own[1], own[2], total[0], total[1], total[2], rows)
                for t in range(n * heads if parts == 1 else 0):  # of the token first + t, or of the head h + t
                    token, head = (first + t, h) if heads == 1 else (first, h + t)
                    write(a, token, head, total, t * group)
                first += n

    return run


@kernel("attention_join")
def attention_join(head_size, group_size, then=""):
    """a: as `attention`. A unit is a token; where its spans were not divided, there is nothing to do.

    Scratch per thread: the states of a key head's rows.
    """
    size, group = int(head_size), int(group_size)
    clear, join, write = clear_rows(size), join_rows(size), _write(size, group, then)

    def run(a, begin, end, scratch):
        n_tokens, kv_heads, table_pages, window = a[7], a[8], a[9], a[10]
        pos = i32p(a[5])
        if parts_of(pos, n_tokens, window, a[14]) == 1:
            return
        everyone = i64p(scratch - SHARED)[0]
        n_shared = (table_pages * PAGE + ATTENTION_SPAN - 1) // ATTENTION_SPAN * kv_heads * n_tokens * group
        total = _state(scratch, group, size, 0)
        for token in range(begin, end):
            for h in range(kv_heads):
                clear(total[0], total[1], total[2], group)
                for i in range(first_span(pos[token], window), pos[token] // ATTENTION_SPAN + 1):
                    at = _state(everyone, n_shared, size, ((i * kv_heads + h) * n_tokens + token) * group)
                    join(at[0], at[1], at[2], total[0], total[1], total[2], group)
                write(a, token, h, total, 0)

    return run


@njit(forceinline=True)
def _state(base, rows, size, row):
    """Where, in the states of so many rows, those from `row` on are: weighted values (rows, D), floats whose sum is
    that of the weights (rows, 16), and tops (rows). Behind them is a line that `join_rows` may touch."""
    sums, tops = base + rows * size * 4, base + rows * (size + PAGE) * 4
    return base + row * size * 4, sums + row * PAGE * 4, tops + row * 4


def _write(size, group, then):
    """f(a, token, head, state, row): what a token and key head have seen, from the `group` rows from `row` on."""
    finish, round_row = divide(size), row_rounder(32)
    rounded, with_sinks = then == "act", then == "sinks"

    @njit(forceinline=True)
    def write(a, token, head, state, row):
        o_at, l_at, tops = state[0] + row * size * 4, state[1] + row * PAGE * 4, f32p(state[2])
        out = o_at if rounded else a[6] + (token * a[8] + head) * group * size * 4
        for g in range(group):
            if with_sinks:
                below = f32p(a[16])[head * group + g] - tops[row + g] * LN_2
                f32p(l_at)[g * PAGE] += exp_exact(below)
            finish(o_at + g * size * 4, l_at + g * PAGE * 4, out + g * size * 4)
        if rounded:
            count = group * size // 32
            r0, panel = panel_of(token, a[7], a[16], a[17])
            y = a[6] + ((r0 * a[8] + head * panel) * count + token - r0) * ACT_BLOCK
            round_row(o_at, y, panel * ACT_BLOCK, count)

    return write


@njit(forceinline=True)
def _nobody(a, table, position, window, cap, h, heads, blocks, then0, then1, area, state):
    """In the place of `_one_token` where values are keys, which are turned round once for all rows."""


def _one_token(key_dtype, value_dtype, size, group):
    """f(…): a token's rows of `heads` key heads from h on walk a span, `group` rows at once.

    blocks: the first, one behind the last, and one behind the last of the spans that follow. Each block's scores and
    sums ask for the same pages of the next block; the last block's for those at then0, then1.
    """
    key_page, value_page = page_nbytes(key_dtype, size), page_nbytes(value_dtype, size)
    score = scores(size, group, key_dtype, (key_page, key_page, 0, 0))
    weigh, add = softmax_step(size, group, masked=True), weighted_sum_of_pages(size, group, value_dtype)

    @njit(forceinline=True)
    def walk(a, table, position, window, cap, h, heads, blocks, then0, then1, area, state):
        _, s, q, seen_at = area
        o, l, tops = state
        seen, kv_heads = i32p(seen_at), a[8]
        start, end, stop = blocks
        at0, at1 = pages_of(table, start, position, kv_heads, h)
        for block in range(start, end):
            next0, next1 = then0, then1
            if block + 1 < stop:
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
    """f(…): the rows of n neighbouring tokens of a sequence and of one key head walk a span together; `blocks` as for
    one token."""
    widen_keys = widen(key_dtype, size, keys=True)
    widen_values = widen_across(key_dtype, size) if value_dtype == "keys" else widen(value_dtype, size, keys=False)
    value_dtype = key_dtype if value_dtype == "keys" else value_dtype
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
    def walk(a, table, pos, first, n, lowest, highest, window, cap, h, blocks, area, state):
        wide_at, s_at, q_at, seen_at = area
        o_at, l_at, tops_at = state
        seen, kv_heads, rows = i32p(seen_at), a[8], n * group
        start, end, stop = blocks
        next0, next1 = pages_of(table, start, highest, kv_heads, h)
        for block in range(start, end):
            whole = visible(lowest, block, window)[1] == BLOCK and visible(highest, block, window)[0] == 0
            for t in range(0 if whole and rows % 8 == 0 else n):  # else nobody will ask
                lo, hi = visible(pos[first + t], block, window)
                for g in range(group):
                    seen[2 * (t * group + g)] = lo
                    seen[2 * (t * group + g) + 1] = hi
            at0, at1 = next0, next1
            if block + 1 < stop:
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
