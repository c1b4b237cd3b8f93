"""Paged attention on the CPU: attention scores and values with an online softmax (flash attention).

A sequence's KV cells are split into spans of 256. Each span has a softmax of its own, and a row's
spans are joined in order. So threads can share the spans of one sequence, and even a decode step of
one token has work for as many threads as its context has spans.

A unit is a few neighbouring tokens of a batch, one KV head, and all or some of their spans
(`work_split.py`). The tokens' query rows walk a span in blocks of 32 cells (two pages), which are
converted to f32 once for all of them. A token without a neighbour of its sequence reads the pages
in place. If no token has a neighbour, a unit is a token with all its KV heads, whose pages are
contiguous.

Batch invariance: a row's arithmetic does not depend on the rows beside it, nor on whether it sees
all or part of a block. Its order is always scores, a new top if one is due, weights, values cell by
cell.

When spans are split, units write their partial states to memory that all threads share, and
`attention_join` combines them."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.tile import (
    BLOCK,
    PAGE,
    clear_rows,
    divide,
    join_rows,
    page_converter,
    page_nbytes,
    page_transposer,
    scores,
    softmax_step,
    weighted_sum,
    weighted_sum_of_pages,
)
from logitless.backends.cpu.kernels.attention.work_split import (
    BLOCKS,
    all_independent,
    first_block,
    first_span,
    pages_of,
    parts_of,
    unit_at,
    visible,
)
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, i64p, kernel
from logitless.backends.cpu.kernels.ir.scalar_math import exp_exact
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, ATTENTION_SPAN
from logitless.backends.cpu.kernels.matmul.quantize_activations import panel_of, row_quantizer
from logitless.backends.cpu.kernels.runtime.control_block import SHARED_MEMORY

LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
MAX_SINGLE_ROWS = 8  # query heads of a KV head: as many rows as scores take at once


@kernel("attention")
def attention(key_dtype, value_dtype, head_size, group_size, variant=""):
    """Paged attention.

    a: q, k, v, tables, slot, pos, y, T, H_kv, pages of a table, window, scale bits, cap bits,
    tokens of a unit, most parts that their spans are split into, cores, T if pos has the positions
    from which windows count behind those that tokens see as the last, else 0. Then, with variant
    "act" (quantised output): panel rows, panels. With variant "sinks": a score of each query head that
    adds to the sum of weights and to nothing else. With variant "bias": what is added to the scores of
    each query head by the distance of cell and token, that of 0 as the last. `value_dtype` "keys": the keys
    are the values too, and v is k.

    Scratch per thread, with R = max(tokens, KV heads) · query heads of a KV head: a block's keys or
    values (32, D), scores (R, 32), q (R, D), the visible cells of each row (R, 2), and the states
    of R rows in a span and in those before it. Shared memory: the states of all rows in each span
    of a table.
    """
    size, group = int(head_size), int(group_size)
    page_nbytes_f32 = PAGE * size * 4
    max_single = 0 if value_dtype == "keys" else MAX_SINGLE_ROWS
    has_bias = variant == "bias"
    walk_one = _unused
    if max_single:
        walk_one = _one_token(key_dtype, value_dtype, size, min(group, MAX_SINGLE_ROWS), has_bias)
    walk_several = _several_tokens(key_dtype, value_dtype, size, group, has_bias)
    clear, join, write = clear_rows(size), join_rows(size), _write(size, group, variant)

    def run(a, begin, end, scratch):
        n_tokens, kv_heads, table_pages, window = a[7], a[8], a[9], a[10]
        scale, cap = bits_f32(a[11]) * LOG2_E, bits_f32(a[12]) * LOG2_E
        slot, pos, own = i32p(a[4]), i32p(a[5]), i32p(a[5] + a[16] * 4)
        tokens, parts = a[13], parts_of(pos, own, n_tokens, window, a[14])
        independent = parts == 1 and group <= max_single and all_independent(slot, pos, own, n_tokens, window, a[15])
        max_rows = max(tokens, kv_heads) * group
        s_at = scratch + 2 * page_nbytes_f32
        q_at = s_at + max_rows * BLOCK * 4
        visible_at = q_at + max_rows * size * 4
        states_at = visible_at + (max_rows * 8 + 63) // 64 * 64
        span_state, total_state = (
            _state(states_at, 2 * max_rows, size, 0),
            _state(states_at, 2 * max_rows, size, max_rows),
        )
        area, q = (scratch, s_at, q_at, visible_at), f32p(q_at)
        shared_states = i64p(scratch - SHARED_MEMORY)[0]
        n_shared = (table_pages * PAGE + ATTENTION_SPAN - 1) // ATTENTION_SPAN * kv_heads * n_tokens * group
        for unit in range(begin, end):
            first, h, part = unit_at(unit, kv_heads, n_tokens, tokens, a[14])
            last, heads = min(first + tokens, n_tokens), 1
            if independent:
                h, heads, part, n_units = 0, kv_heads, 0, (n_tokens + tokens - 1) // tokens * kv_heads * a[14]
                first, last = n_tokens * unit // n_units, n_tokens * (unit + 1) // n_units
            while first < last and part < parts:
                n = 1  # tokens first…first+n−1 belong to one sequence
                lowest = highest = pos[first]
                nearest = farthest = own[first]
                while not independent and first + n < last and slot[first + n] == slot[first]:
                    lowest, highest = min(lowest, pos[first + n]), max(highest, pos[first + n])
                    nearest, farthest = min(nearest, own[first + n]), max(farthest, own[first + n])
                    n += 1
                span = first_span(nearest, window)
                spans = highest // ATTENTION_SPAN + 1 - span
                span, stop = span + spans * part // parts, span + spans * (part + 1) // parts
                rows = n * heads * group
                for t in range(n):
                    source = f32p(a[0] + ((first + t) * kv_heads + h) * group * size * 4)
                    for i in range(heads * group * size):
                        q[t * heads * group * size + i] = source[i] * scale
                table = i32p(a[3] + slot[first] * table_pages * 4)
                is_single = group <= max_single and n == 1
                end_block = min(stop * BLOCKS, highest // BLOCK + 1)
                after0, after1 = np.int64(0), np.int64(0)
                if is_single:
                    token, head = first + 1, h  # the thread's next reads, as far as known here
                    if token == last and not independent:
                        token, head, _ = unit_at(unit + a[14], kv_heads, n_tokens, tokens, a[14])
                    token = first if token < 0 or token == n_tokens else token
                    next_table, block = i32p(a[3] + slot[token] * table_pages * 4), first_block(own[token], window)
                    if part + 1 < parts:
                        next_table, block, token, head = table, end_block, first, h
                    after0, after1 = pages_of(next_table, block, pos[token], kv_heads, head)
                for i in range(span, stop):
                    begin_block = max(i * BLOCKS, first_block(nearest, window))
                    blocks = (begin_block, min(i * BLOCKS + BLOCKS, end_block), end_block)
                    at = total_state if i == span else span_state
                    if parts > 1:
                        at = _state(shared_states, n_shared, size, ((i * kv_heads + h) * n_tokens + first) * group)
                    clear(at[0], at[1], at[2], rows)
                    if is_single:
                        seen = (pos[first], own[first])
                        walk_one(a, table, seen, window, cap, h, heads, blocks, after0, after1, area, at)
                    else:
                        seen = (lowest, highest, farthest)
                        walk_several(a, table, pos, own, first, n, seen, window, cap, h, blocks, area, at)
                    if i > span and parts == 1:
                        join(
                            span_state[0],
                            span_state[1],
                            span_state[2],
                            total_state[0],
                            total_state[1],
                            total_state[2],
                            rows,
                        )
                # of the token first + t, or of the head h + t
                for t in range(n * heads if parts == 1 else 0):
                    token, head = (first + t, h) if heads == 1 else (first, h + t)
                    write(a, token, head, total_state, t * group)
                first += n

    return run


@kernel("attention_join")
def attention_join(head_size, group_size, variant=""):
    """Join the spans of each token. a: as `attention`. A unit is a token.

    Nothing to do when the spans were not split. Scratch per thread: the states of a KV head's rows.
    """
    size, group = int(head_size), int(group_size)
    clear, join, write = clear_rows(size), join_rows(size), _write(size, group, variant)

    def run(a, begin, end, scratch):
        n_tokens, kv_heads, table_pages, window = a[7], a[8], a[9], a[10]
        pos, own = i32p(a[5]), i32p(a[5] + a[16] * 4)
        if parts_of(pos, own, n_tokens, window, a[14]) == 1:
            return
        shared_states = i64p(scratch - SHARED_MEMORY)[0]
        n_shared = (table_pages * PAGE + ATTENTION_SPAN - 1) // ATTENTION_SPAN * kv_heads * n_tokens * group
        total_state = _state(scratch, group, size, 0)
        for token in range(begin, end):
            for h in range(kv_heads):
                clear(total_state[0], total_state[1], total_state[2], group)
                for i in range(first_span(own[token], window), pos[token] // ATTENTION_SPAN + 1):
                    at = _state(shared_states, n_shared, size, ((i * kv_heads + h) * n_tokens + token) * group)
                    join(at[0], at[1], at[2], total_state[0], total_state[1], total_state[2], group)
                write(a, token, h, total_state, 0)

    return run


@njit(forceinline=True)
def _state(base, rows, size, row):
    """Addresses of the states from `row` on, among those of `rows` rows.

    A state is the weighted values (rows, D), floats whose sum is that of the weights (rows, 16),
    and tops (rows). A line behind them belongs to `join_rows`.
    """
    sums, tops = base + rows * size * 4, base + rows * (size + PAGE) * 4
    return base + row * size * 4, sums + row * PAGE * 4, tops + row * 4


def _write(size, group, variant):
    """f(a, token, head, state, row): writes the output of a token and KV head.

    It comes from the `group` rows from `row` on.
    """
    finish, quantize_row = divide(size), row_quantizer(32)
    quantized, with_sinks = variant == "act", variant == "sinks"

    @njit(forceinline=True)
    def write(a, token, head, state, row):
        o_at, l_at, tops = state[0] + row * size * 4, state[1] + row * PAGE * 4, f32p(state[2])
        out = o_at if quantized else a[6] + (token * a[8] + head) * group * size * 4
        for g in range(group):
            if with_sinks:
                below = f32p(a[17])[head * group + g] - tops[row + g] * LN_2
                f32p(l_at)[g * PAGE] += exp_exact(below)
            finish(o_at + g * size * 4, l_at + g * PAGE * 4, out + g * size * 4)
        if quantized:
            count = group * size // 32
            r0, panel = panel_of(token, a[7], a[17], a[18])
            y = a[6] + ((r0 * a[8] + head * panel) * count + token - r0) * ACT_BLOCK
            quantize_row(o_at, y, panel * ACT_BLOCK, count)

    return write


@njit(forceinline=True)
def _unused(a, table, seen, window, cap, h, heads, blocks, after0, after1, area, state):
    """Stands in for `_one_token` where keys are the values, which are transposed once for all rows."""


@njit(forceinline=True)
def _add_bias(s_at, a, head, distance):
    """Add a head's bias to the scores of a block's cells up to the token; `distance`: that of the first cell."""
    s, bias = f32p(s_at), f32p(a[17] + ((head + 1) * a[9] * PAGE - 1 - distance) * 4)
    for c in range(min(BLOCK, distance + 1)):
        s[c] += bias[c] * LOG2_E


def _one_token(key_dtype, value_dtype, size, group, has_bias):
    """f(…): the rows of one token, of `heads` KV heads from h on, walk a span, `group` rows at a
    time.

    blocks: the first block, the end, and the end of the spans that follow. The scores and sums of a
    block prefetch the same pages of the next block. The last block prefetches those at after0,
    after1.
    """
    key_page, value_page = page_nbytes(key_dtype, size), page_nbytes(value_dtype, size)
    score = scores(size, group, key_dtype, (key_page, key_page, 0, 0))
    softmax, add = softmax_step(size, group, masked=True), weighted_sum_of_pages(size, group, value_dtype)

    @njit(forceinline=True)
    def walk(a, table, seen, window, cap, h, heads, blocks, after0, after1, area, state):
        position, own = seen
        _, s, q, visible_at = area
        o, l, tops = state
        visible_cells, kv_heads = i32p(visible_at), a[8]
        start, end, stop = blocks
        at0, at1 = pages_of(table, start, position, kv_heads, h)
        for block in range(start, end):
            next0, next1 = after0, after1
            if block + 1 < stop:
                next0, next1 = pages_of(table, block + 1, position, kv_heads, h)
            lo, hi = visible(position, own, block, window)
            for g in range(group):
                visible_cells[2 * g], visible_cells[2 * g + 1] = lo, hi
            for j in range(heads):
                row = j * group
                k0, k1 = a[1] + (at0 + j) * key_page, a[1] + (at1 + j) * key_page
                v0, v1 = a[2] + (at0 + j) * value_page, a[2] + (at1 + j) * value_page
                k2, k3 = a[1] + (next0 + j) * key_page, a[1] + (next1 + j) * key_page
                v2, v3 = a[2] + (next0 + j) * value_page, a[2] + (next1 + j) * value_page
                score(q + row * size * 4, k0, k1, s, k2, k3, s, s)
                for g in range(group if has_bias else 0):
                    _add_bias(s + g * BLOCK * 4, a, h * group + row + g, position - block * BLOCK)
                softmax(s, tops + row * 4, l + row * PAGE * 4, o + row * size * 4, visible_at, cap)
                add(s, v0, v1, o + row * size * 4, lo, hi, v2, v3)
            at0, at1 = next0, next1

    return walk


def _several_tokens(key_dtype, value_dtype, size, group, has_bias):
    """f(…): the rows of n neighbouring tokens of a sequence, of one KV head, walk a span together.

    `blocks`: as for one token.
    """
    convert_keys = page_converter(key_dtype, size, keys=True)
    convert_values = (
        page_transposer(key_dtype, size) if value_dtype == "keys" else page_converter(value_dtype, size, keys=False)
    )
    value_dtype = key_dtype if value_dtype == "keys" else value_dtype
    softmax8 = softmax_step(size, 8, masked=False)
    softmax_masked8, softmax4, softmax2, softmax1 = (softmax_step(size, n, masked=True) for n in (8, 4, 2, 1))
    whole4 = weighted_sum(size, 4, whole=True)
    sum4, sum2, sum1 = (weighted_sum(size, n) for n in (4, 2, 1))
    key_page, value_page = page_nbytes(key_dtype, size), page_nbytes(value_dtype, size)
    ahead = (key_page, key_page, value_page, value_page)
    score8, score4, score2, score1 = (scores(size, n, "f32", ahead) for n in (8, 4, 2, 1))
    page_nbytes_f32 = PAGE * size * 4
    # remainders of rows taken 8 at a time
    some4, some2, some1 = group % 8 > 0, group % 4 > 0, group % 2 > 0

    @njit(forceinline=True)
    def add_bias(a, s, row, n_rows, pos, first, h, block):
        for r in range(row, row + n_rows if has_bias else row):
            distance = pos[first + r // group] - block * BLOCK
            _add_bias(s + (r - row) * BLOCK * 4, a, h * group + r % group, distance)

    @njit(forceinline=True)
    def walk(a, table, pos, own, first, n, seen, window, cap, h, blocks, area, state):
        lowest, highest, farthest = seen
        block_at, s_at, q_at, visible_at = area
        o_at, l_at, tops_at = state
        visible_cells, kv_heads, rows = i32p(visible_at), a[8], n * group
        start, end, stop = blocks
        next0, next1 = pages_of(table, start, highest, kv_heads, h)
        for block in range(start, end):
            whole = (
                visible(lowest, lowest, block, window)[1] == BLOCK and visible(highest, farthest, block, window)[0] == 0
            )
            for t in range(0 if whole and rows % 8 == 0 else n):  # otherwise unused
                lo, hi = visible(pos[first + t], own[first + t], block, window)
                for g in range(group):
                    visible_cells[2 * (t * group + g)] = lo
                    visible_cells[2 * (t * group + g) + 1] = hi
            at0, at1 = next0, next1
            if block + 1 < stop:
                next0, next1 = pages_of(table, block + 1, highest, kv_heads, h)
            n_pages = 1 + (at1 != at0)
            for i in range(n_pages):
                convert_keys(a[1] + (at1 if i else at0) * key_page, block_at + i * page_nbytes_f32)
            # The first rows' scores leave time to prefetch these values and the next keys; pages
            # lie anywhere.
            k0, k1 = a[1] + next0 * key_page, a[1] + next1 * key_page
            v0, v1 = a[2] + at0 * value_page, a[2] + at1 * value_page
            row = 0
            while row < rows:
                n_rows = min(8, rows - row)
                n_rows = 4 if 4 <= n_rows < 8 else (2 if n_rows == 3 else n_rows)
                x, s, sr = q_at + row * size * 4, s_at + row * BLOCK * 4, visible_at + row * 8
                tr, lr, y = tops_at + row * 4, l_at + row * PAGE * 4, o_at + row * size * 4
                if n_rows == 8:
                    score8(x, block_at, block_at + page_nbytes_f32, s, k0, k1, v0, v1)
                    add_bias(a, s, row, 8, pos, first, h, block)
                    if whole:
                        softmax8(s, tr, lr, y, sr, cap)
                    else:
                        softmax_masked8(s, tr, lr, y, sr, cap)
                elif some4 and n_rows == 4:
                    score4(x, block_at, block_at + page_nbytes_f32, s, k0, k1, v0, v1)
                    add_bias(a, s, row, 4, pos, first, h, block)
                    softmax4(s, tr, lr, y, sr, cap)
                elif some2 and n_rows == 2:
                    score2(x, block_at, block_at + page_nbytes_f32, s, k0, k1, v0, v1)
                    add_bias(a, s, row, 2, pos, first, h, block)
                    softmax2(s, tr, lr, y, sr, cap)
                elif some1:
                    score1(x, block_at, block_at + page_nbytes_f32, s, k0, k1, v0, v1)
                    add_bias(a, s, row, 1, pos, first, h, block)
                    softmax1(s, tr, lr, y, sr, cap)
                row += n_rows
                k0 = k1 = v0 = v1 = block_at
            for i in range(n_pages):  # overwrites the keys: all stays in the L1 cache
                convert_values(a[2] + (at1 if i else at0) * value_page, block_at + i * page_nbytes_f32)
            row = 0
            while whole and rows - row >= 4:
                whole4(s_at + row * BLOCK * 4, block_at, o_at + row * size * 4, 0, BLOCK)
                row += 4
            while row < rows:
                n_rows = 4 if rows - row >= 4 else (2 if rows - row >= 2 else 1)
                lo, hi = BLOCK, 0  # cells that any of the rows sees
                for r in range(row, row + n_rows):
                    if visible_cells[2 * r] < visible_cells[2 * r + 1]:
                        lo, hi = min(lo, visible_cells[2 * r]), max(hi, visible_cells[2 * r + 1])
                if lo < hi:
                    s, y = s_at + row * BLOCK * 4, o_at + row * size * 4
                    if n_rows == 4:
                        sum4(s, block_at, y, lo, hi)
                    elif some2 and n_rows == 2:
                        sum2(s, block_at, y, lo, hi)
                    elif some1:
                        sum1(s, block_at, y, lo, hi)
                row += n_rows

    return walk
