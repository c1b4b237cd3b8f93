"""Sparse attention: the choice of cells (graph/ops/attention/mla.py), and attention over those; compressed attention.

Keys and values of 32 cells at a time are converted to f32 side by side, wherever they lie, so that a token costs
what it attends to, not its whole context. Its arithmetic does not depend on other tokens: what is chosen for it
stands in its own list, whose order is that of sums."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.kv_store import row_mover
from logitless.backends.cpu.kernels.attention.paged_attention import LN_2, LOG2_E
from logitless.backends.cpu.kernels.attention.tile import (
    BLOCK,
    PAGE,
    clear_rows,
    divide,
    page_converter,
    page_nbytes,
    page_transposer,
    row_converter,
    scores,
    softmax_step,
    weighted_sum,
)
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel, u32p
from logitless.backends.cpu.kernels.ir.scalar_math import exp_exact
from logitless.backends.cpu.kernels.matmul.layout import LIST_TOKENS

TOP_BIT, ALL_BITS = np.uint32(1 << 31), np.uint32((1 << 32) - 1)


def _gather_keys(dtype, size):
    """f(k, page stride, table, cells, n, block, rows, page, with_rows): n ≤ 32 keys as two f32 pages (2, D, 16); with
    rows also as rows (32, D), which are its room. A whole page of neighbours is converted at once; of other pages rows
    are copied."""
    convert, transpose = page_converter(dtype, size, keys=True), page_transposer(dtype, size)

    @njit(forceinline=True)
    def gather(k_at, stride, table, cells_at, n, block_at, rows_at, page_at, with_rows):
        cells, source, last = f32p(cells_at), f32p(page_at), np.int64(-1)
        for first in range(0, n, PAGE):
            cell = np.int64(cells[first])
            block, rows = f32p(block_at + first * size * 4), f32p(rows_at + first * size * 4)
            if cell % PAGE == 0 and first + PAGE <= n and cells[first + PAGE - 1] == cell + PAGE - 1:
                convert(k_at + table[cell // PAGE] * stride, block_at + first * size * 4)
                if with_rows:
                    transpose(k_at + table[cell // PAGE] * stride, rows_at + first * size * 4)
                continue
            for i in range(min(PAGE, n - first)):
                cell = np.int64(cells[first + i])
                if cell // PAGE != last:
                    last = cell // PAGE
                    transpose(k_at + table[last] * stride, page_at)
                for d in range(size):
                    rows[i * size + d] = source[cell % PAGE * size + d]
            for d in range(size):
                for i in range(PAGE):
                    block[d * PAGE + i] = rows[i * size + d]

    return gather


def _gather_values(dtype, size):
    """f(v, page stride, table, cells, n, rows, page): the values of n ≤ 32 cells as rows (32, D) of f32."""
    convert = page_converter(dtype, size, keys=False)

    @njit(forceinline=True)
    def gather(v_at, stride, table, cells_at, n, rows_at, page_at):
        cells, source, rows, last = f32p(cells_at), f32p(page_at), f32p(rows_at), np.int64(-1)
        for i in range(n):
            cell = np.int64(cells[i])
            if cell // PAGE != last:
                last = cell // PAGE
                convert(v_at + table[last] * stride, page_at)
            for d in range(size):
                rows[i * size + d] = source[cell % PAGE * size + d]

    return gather


@njit(forceinline=True)
def _length(cells_at, n):
    """Cells of a list before the first −1."""
    cells, low, high = f32p(cells_at), 0, n
    while low < high:
        middle = (low + high) // 2
        if cells[middle] >= 0:
            low = middle + 1
        else:
            high = middle
    return low


def _block_step(size, some4=True, some2=True, some1=True):
    """f(q, s, block, values, tops, l, o, seen, n, rows): the softmax step of n ≤ 32 cells for rows of queries.

    8 rows at a time have scores, 4 sums of values. `some4`, `some2`, `some1`: so many rows may be left.
    `seen`: the visible cells of 8 rows, which all rows have."""
    score8, score4, score2, score1 = (scores(size, n, "f32", (0, 0, 0, 0)) for n in (8, 4, 2, 1))
    softmax8, softmax4, softmax2, softmax1 = (softmax_step(size, n, masked=True) for n in (8, 4, 2, 1))
    sum4, sum2, sum1 = (weighted_sum(size, n) for n in (4, 2, 1))

    @njit(forceinline=True)
    def of_block(q, s, block_at, values_at, tops, l, o, seen, n, rows):
        row, cap, second = 0, np.float32(0), block_at + PAGE * size * 4
        while row + 8 <= rows:
            x, at = q + row * size * 4, s + row * BLOCK * 4
            score8(x, block_at, second, at, q, q, q, q)
            softmax8(at, tops + row * 4, l + row * PAGE * 4, o + row * size * 4, seen, cap)
            row += 8
        if some4 and row + 4 <= rows:
            x, at = q + row * size * 4, s + row * BLOCK * 4
            score4(x, block_at, second, at, q, q, q, q)
            softmax4(at, tops + row * 4, l + row * PAGE * 4, o + row * size * 4, seen, cap)
            row += 4
        if some2 and row + 2 <= rows:
            x, at = q + row * size * 4, s + row * BLOCK * 4
            score2(x, block_at, second, at, q, q, q, q)
            softmax2(at, tops + row * 4, l + row * PAGE * 4, o + row * size * 4, seen, cap)
            row += 2
        if some1 and row < rows:
            x, at = q + row * size * 4, s + row * BLOCK * 4
            score1(x, block_at, second, at, q, q, q, q)
            softmax1(at, tops + row * 4, l + row * PAGE * 4, o + row * size * 4, seen, cap)
        row = 0
        while row + 4 <= rows:
            sum4(s + row * BLOCK * 4, values_at, o + row * size * 4, 0, n)
            row += 4
        if some2 and row + 2 <= rows:
            sum2(s + row * BLOCK * 4, values_at, o + row * size * 4, 0, n)
            row += 2
        if some1 and row < rows:
            sum1(s + row * BLOCK * 4, values_at, o + row * size * 4, 0, n)

    return of_block


@kernel("sparse_attention")
def sparse_attention(key_dtype, value_dtype, head_size, group_size, variant=""):
    """Attention over lists of cells. A unit is some query heads of a key head of a token.

    a: q, k, v, tables, slot, cells, y, H_kv, pages of a table, lists of a token, their length, query heads of a
    unit, scale bits; with variant "sinks" the sinks. `value_dtype` "keys": the keys are the values too, and v is k.

    Scratch per thread, for R query heads: a page, two blocks (32, D), q (R, D), scores (R, 32), visible cells (R, 2),
    sums (R, D), weights (R, 16), tops (R)."""
    size, group = int(head_size), int(group_size)
    latent, with_sinks = value_dtype == "keys", variant == "sinks"
    keys, values = _gather_keys(key_dtype, size), None if latent else _gather_values(value_dtype, size)
    key_page, value_page = page_nbytes(key_dtype, size), 0 if latent else page_nbytes(value_dtype, size)
    of_block = _block_step(size, group % 8 > 3, group % 4 > 1, group % 2 > 0)
    clear, finish = clear_rows(size), divide(size)
    page_nbytes_f32 = PAGE * size * 4

    def run(a, begin, end, scratch):
        kv_heads, table_pages, lists, length, most = a[7], a[8], a[9], a[10], a[11]
        scale, slot, parts = bits_f32(a[12]) * LOG2_E, i32p(a[4]), (group + a[11] - 1) // a[11]
        page_at = scratch
        block_at = page_at + page_nbytes_f32
        values_at = block_at + 2 * page_nbytes_f32
        q_at = values_at + 2 * page_nbytes_f32
        s_at = q_at + most * size * 4
        seen_at = s_at + most * BLOCK * 4
        o_at = seen_at + 8 * 8
        l_at = o_at + most * size * 4
        tops_at = l_at + most * PAGE * 4
        q, seen = f32p(q_at), i32p(seen_at)
        for unit in range(begin, end):
            t, h, part = unit // parts // kv_heads, unit // parts % kv_heads, unit % parts
            first, rows = part * most, min(most, group - part * most)
            row = (t * kv_heads + h) * group + first
            source = f32p(a[0] + row * size * 4)
            for i in range(rows * size):
                q[i] = source[i] * scale
            clear(o_at, l_at, tops_at, rows)
            table = i32p(a[3] + slot[t] * table_pages * 4)
            cells_at = a[5] + (t * lists + (h if lists > 1 else 0)) * length * 4
            count = _length(cells_at, length)
            for block in range((count + BLOCK - 1) // BLOCK):
                at, n = cells_at + block * BLOCK * 4, min(BLOCK, count - block * BLOCK)
                for r in range(8):
                    seen[2 * r], seen[2 * r + 1] = 0, n
                keys_at, stride = a[1] + h * key_page, kv_heads * key_page
                keys(keys_at, stride, table, at, n, block_at, values_at, page_at, latent)
                if not latent:
                    values(a[2] + h * value_page, kv_heads * value_page, table, at, n, values_at, page_at)
                of_block(q_at, s_at, block_at, values_at, tops_at, l_at, o_at, seen_at, n, rows)
            for r in range(rows):
                if with_sinks:
                    below = f32p(a[13])[h * group + first + r] - f32p(tops_at)[r] * LN_2
                    f32p(l_at)[r * PAGE] += exp_exact(below)
                finish(o_at + r * size * 4, l_at + r * PAGE * 4, a[6] + (row + r) * size * 4)

    return run


@njit(forceinline=True)
def _threshold(bits, count, n):
    """The n-th greatest of so many numbers, as unsigned integers in their order."""
    least = np.uint32(0)
    for i in range(32):
        greater, above = least | np.uint32(TOP_BIT >> np.uint32(i)), 0
        for c in range(count):
            above += bits[c] >= greater
        if above >= n:
            least = greater
    return least


@njit(forceinline=True)
def _write_best(bits, count, n, size, end, y_at):
    """Write the cells of the n greatest of so many scores, those of blocks of `size` cells, up to `end`, in order, of
    equal scores the first; returns their number. The scores become integers."""
    y, written = f32p(y_at), 0
    least, left = np.uint32(0), n
    if count > n:
        for c in range(count):
            bits[c] ^= ALL_BITS if bits[c] & TOP_BIT else TOP_BIT
        least = _threshold(bits, count, n)
        for c in range(count):
            left -= bits[c] > least
    for c in range(count):
        chosen = count <= n or bits[c] >= least
        if chosen and count > n and bits[c] == least:
            chosen = left > 0
            left -= 1
        for cell in range(c * size, min(c * size + size, end) if chosen else 0):
            y[written] = np.float32(cell)
            written += 1
    return written


def _index_scores(size, heads):
    """f(q, weights, block, s, total): scores of 32 cells, whose keys are (2, D, 16); s: room for 8 rows of them."""
    score8, score4, score2, score1 = (scores(size, n, "f32", (0, 0, 0, 0)) for n in (8, 4, 2, 1))
    some4, some2, some1 = heads % 8 > 3, heads % 4 > 1, heads % 2 > 0
    page_nbytes_f32 = PAGE * size * 4

    @njit(forceinline=True)
    def add(total, s_at, w, rows):
        s = f32p(s_at)
        for r in range(rows):
            for c in range(BLOCK):
                total[c] += max(s[r * BLOCK + c], np.float32(0)) * w[r]

    @njit(forceinline=True)
    def of_block(q, w_at, block_at, s_at, total_at):
        total, second = f32p(total_at), block_at + page_nbytes_f32
        for c in range(BLOCK):
            total[c] = 0
        row = 0
        while row + 8 <= heads:
            score8(q + row * size * 4, block_at, second, s_at, q, q, q, q)
            add(total, s_at, f32p(w_at + row * 4), 8)
            row += 8
        if some4:
            score4(q + row * size * 4, block_at, second, s_at, q, q, q, q)
            add(total, s_at, f32p(w_at + row * 4), 4)
            row += 4
        if some2:
            score2(q + row * size * 4, block_at, second, s_at, q, q, q, q)
            add(total, s_at, f32p(w_at + row * 4), 2)
            row += 2
        if some1:
            score1(q + row * size * 4, block_at, second, s_at, q, q, q, q)
            add(total, s_at, f32p(w_at + row * 4), 1)

    return of_block


@kernel("chosen_cells")
def chosen_cells(dtype, head_size, n_heads):
    """Lists of the cells of the n pools with the greatest scores. A unit is a token.

    Scratch per thread: scores of all pools, numbers of 32 cells, a page and a block of keys, scores of 8 heads."""
    size, heads = int(head_size), int(n_heads)
    gather, key_page = _gather_keys(dtype, size), page_nbytes(dtype, size)
    of_block, page_nbytes_f32 = _index_scores(size, heads), PAGE * size * 4

    def run(q_at, w_at, k_at, tables_at, slot_at, pos_at, y_at, table_pages, n, pool, begin, end, scratch):
        cells_at = scratch + (table_pages * PAGE // pool + BLOCK) * 4
        page_at = cells_at + BLOCK * 4
        rows_at = page_at + page_nbytes_f32
        block_at = rows_at + 2 * page_nbytes_f32
        s_at = block_at + 2 * page_nbytes_f32
        cells, slot, pos, length = f32p(cells_at), i32p(slot_at), i32p(pos_at), (n + 1) * pool - 1
        for t in range(begin, end):
            whole, table = (pos[t] + 1) // pool, i32p(tables_at + slot[t] * table_pages * 4)
            for block in range((whole + BLOCK - 1) // BLOCK if whole > n else 0):
                some = min(BLOCK, whole - block * BLOCK)
                for c in range(some):
                    cells[c] = np.float32((block * BLOCK + c + 1) * pool - 1)
                gather(k_at, key_page, table, cells_at, some, block_at, rows_at, page_at, False)
                of_block(q_at + t * heads * size * 4, w_at + t * heads * 4, block_at, s_at, scratch + block * BLOCK * 4)
            y_of = y_at + t * length * 4
            y, written = f32p(y_of), _write_best(u32p(scratch), whole, n, pool, whole * pool, y_of)
            for cell in range(whole * pool, pos[t] + 1):
                y[written] = np.float32(cell)
                written += 1
            for i in range(written, length):
                y[i] = np.float32(-1)

    return run


@kernel("chosen_blocks")
def chosen_blocks(dtype, head_size):
    """Lists of the cells of the n blocks with the greatest scores, for a head of a token, which is a unit.

    Scratch per thread: scores of all blocks, of 32 cells, and a block of keys."""
    size = int(head_size)
    convert, key_page = page_converter(dtype, size, keys=True), page_nbytes(dtype, size)
    score, page_nbytes_f32 = scores(size, 1, "f32", (0, 0, 0, 0)), PAGE * size * 4

    def run(
        q_at, k_at, tables_at, slot_at, pos_at, y_at, heads, table_pages, n, block, last, begin, end, scratch
    ):  # a unit is a head of a token
        s_at = scratch + (table_pages * PAGE // block + BLOCK) * 4
        keys_at = s_at + BLOCK * 4
        best, s, slot, pos = f32p(scratch), f32p(s_at), i32p(slot_at), i32p(pos_at)
        for unit in range(begin, end):
            t = unit // heads
            count, table = pos[t] // block + 1, i32p(tables_at + slot[t] * table_pages * 4)
            q = q_at + unit * size * 4
            for i in range(count):
                best[i] = np.float32(-np.inf)
            for tile in range(pos[t] // BLOCK + 1 if count > n else 0):
                for i in range(2):
                    page = min(2 * tile + i, pos[t] // PAGE)
                    convert(k_at + table[page] * key_page, keys_at + i * page_nbytes_f32)
                score(q, keys_at, keys_at + page_nbytes_f32, s_at, q, q, q, q)
                for c in range(min(BLOCK, pos[t] + 1 - tile * BLOCK)):
                    of = (tile * BLOCK + c) // block
                    best[of] = max(best[of], s[c])
            for i in range(max(0, count - last), count):
                best[i] = np.float32(1e30)
            y_of = y_at + unit * n * block * 4
            y = f32p(y_of)
            for i in range(_write_best(u32p(scratch), count, n, block, pos[t] + 1, y_of), n * block):
                y[i] = np.float32(-1)

    return run


def _row_reader(dtype, size):
    """f(row, lane, keys, values): a row as f32, in a lane of keys [2][D][16] and as the values of one cell."""
    convert = row_converter(dtype, size)

    @njit(forceinline=True)
    def read(row, lane, keys_at, values_at):
        convert(row, values_at)
        values, keys = f32p(values_at), f32p(keys_at + (lane // PAGE * PAGE * size + lane % PAGE) * 4)
        for d in range(size):
            keys[d * PAGE] = values[d]

    return read


@njit(forceinline=True)
def _block_cell(table, block, block_size, page_cells):
    """Cell, of `page_cells` a page, of a block of tokens."""
    last = block * block_size + block_size - 1
    return np.int64(table[last // PAGE]) * page_cells + last % PAGE // min(block_size, PAGE)


@kernel("chosen_rows")
def chosen_rows(dtype, head_size, n_heads):
    """Lists of the n blocks of tokens with the greatest scores. A unit is a token; neighbours of a sequence share keys.

    Scratch per thread: scores of all blocks of LIST_TOKENS tokens, a block of keys, scores of 8 heads, a row."""
    size, heads = int(head_size), int(n_heads)
    read, row_nbytes, of_block = _row_reader(dtype, size), page_nbytes(dtype, size) // PAGE, _index_scores(size, heads)

    def run(
        q_at, w_at, k_at, tables_at, slot_at, pos_at, y_at, table_pages, n, block_size, page_cells, begin, end, scratch
    ):
        width = (table_pages * PAGE // block_size + BLOCK) * 4
        block_at = scratch + LIST_TOKENS * width
        s_at, slot, pos = block_at + BLOCK * size * 4, i32p(slot_at), i32p(pos_at)
        row_at, first = s_at + 8 * BLOCK * 4, begin
        while first < end:
            stop, most = first, np.int64(0)
            while stop < end and stop - first < LIST_TOKENS and slot[stop] == slot[first]:
                most = max(most, (np.int64(pos[stop]) + 1) // block_size)
                stop += 1
            table = i32p(tables_at + np.int64(slot[first]) * table_pages * 4)
            for start in range(0, most if most > n else 0, BLOCK):
                for lane in range(min(BLOCK, most - start)):
                    cell = _block_cell(table, start + lane, block_size, page_cells)
                    read(k_at + cell * row_nbytes, lane, block_at, row_at)
                for t in range(first, stop):
                    if (np.int64(pos[t]) + 1) // block_size > max(start, n):
                        to = scratch + (t - first) * width + start * 4
                        of_block(q_at + t * heads * size * 4, w_at + t * heads * 4, block_at, s_at, to)
            for t in range(first, stop):
                count, y_of = (np.int64(pos[t]) + 1) // block_size, y_at + np.int64(t) * n * 4
                for i in range(_write_best(u32p(scratch + (t - first) * width), count, n, 1, count, y_of), n):
                    f32p(y_of)[i] = np.float32(-1)
            first = stop

    return run


@kernel("compressed_attention")
def compressed_attention(dtype, head_size):
    """Attention over a window and rows of blocks, in blocks of 32 rows. A unit is some heads of a token.

    Scratch per thread: 32 rows as keys and as values, and for each head of a unit scores (32), query (D), visible
    cells (2), and its state as in attention."""
    size = int(head_size)
    row_nbytes, tile_nbytes = page_nbytes(dtype, size) // PAGE, BLOCK * size * 4
    read, clear, finish = _row_reader(dtype, size), clear_rows(size), divide(size)
    of_block = _block_step(size)

    def run(
        q_at, k_at, tables_at, slot_at, pos_at, sinks_at, blocks_at, block_tables_at, chosen_at, y_at, heads, group,
        table_pages, window, block_size, page_cells, n_chosen, scale_bits, begin, end, scratch,
    ):  # fmt: skip
        scale, slot, pos, sinks = bits_f32(scale_bits) * LOG2_E, i32p(slot_at), i32p(pos_at), f32p(sinks_at)
        values_at = scratch + tile_nbytes
        s_at = values_at + tile_nbytes
        q_at_, seen_at = s_at + group * BLOCK * 4, s_at + group * (BLOCK + size) * 4
        o_at = seen_at + 8 * 8
        l_at = o_at + group * size * 4
        tops_at = l_at + group * PAGE * 4
        q, seen, tops = f32p(q_at_), i32p(seen_at), f32p(tops_at)
        groups = (heads + group - 1) // group
        for unit in range(begin, end):
            t, head = unit // groups, unit % groups * group
            rows, at = min(group, heads - head), (t * heads + head) * size * 4
            source = f32p(q_at + at)
            for i in range(rows * size):
                q[i] = source[i] * scale
            clear(o_at, l_at, tops_at, rows)
            table = i32p(tables_at + np.int64(slot[t]) * table_pages * 4)
            block_table = i32p(block_tables_at + np.int64(slot[t]) * table_pages * 4)
            chosen_of = chosen_at + np.int64(t) * n_chosen * 4
            chosen = f32p(chosen_of)
            in_window = min(window, np.int64(pos[t]) + 1)
            first, n_blocks = np.int64(pos[t]) + 1 - in_window, 0
            if page_cells:
                n_blocks = _length(chosen_of, n_chosen) if n_chosen else (np.int64(pos[t]) + 1) // block_size
            for start in range(0, in_window + n_blocks, BLOCK):
                count = min(BLOCK, in_window + n_blocks - start)
                for lane in range(count):
                    i = start + lane
                    if i < in_window:
                        row = k_at + (np.int64(table[(first + i) // PAGE]) * PAGE + (first + i) % PAGE) * row_nbytes
                    else:
                        block = np.int64(chosen[i - in_window]) if n_chosen else i - in_window
                        row = blocks_at + _block_cell(block_table, block, block_size, page_cells) * row_nbytes
                    read(row, lane, scratch, values_at + lane * size * 4)
                for r in range(8):
                    seen[2 * r], seen[2 * r + 1] = 0, count
                of_block(q_at_, s_at, scratch, values_at, tops_at, l_at, o_at, seen_at, count, rows)
            for r in range(rows):
                f32p(l_at)[r * PAGE] += exp_exact(sinks[head + r] - tops[r] * LN_2)
                finish(o_at + r * size * 4, l_at + r * PAGE * 4, y_at + at + r * size * 4)

    return run


@kernel("block_pool")
def block_pool(
    k_at, bias_at, tables_at, slot_at, pos_at, y_at, block_size, width, half, table_pages, begin, end, scratch
):
    """Rows of blocks of tokens: for each element a softmax over the block. A unit is a token.

    Scratch per thread: greatest scores, sums of weights."""
    slot, pos, top, total = i32p(slot_at), i32p(pos_at), f32p(scratch), f32p(scratch + half * 4)
    for t in range(begin, end):
        y, stop = f32p(y_at + np.int64(t) * half * 4), np.int64(pos[t]) + 1
        for j in range(half):
            y[j], top[j], total[j] = np.float32(0), np.float32(-np.inf), np.float32(0)
        if stop % block_size:
            continue
        table = i32p(tables_at + np.int64(slot[t]) * table_pages * 4)
        first = max(0, stop - block_size * (width // half))
        for again in range(2):
            for p in range(first, stop):
                cell = np.int64(table[p // PAGE]) * PAGE + p % PAGE
                start = half if width > half and p >= stop - block_size else 0
                value = f32p(k_at + (cell * 2 * width + start) * 4)
                score = f32p(k_at + ((cell * 2 + 1) * width + start) * 4)
                bias = f32p(bias_at + (p % block_size * width + start) * 4)
                if again == 0:
                    for j in range(half):
                        top[j] = max(top[j], score[j] + bias[j])
                else:
                    for j in range(half):
                        weight = exp_exact(score[j] + bias[j] - top[j])
                        total[j] += weight
                        y[j] += weight * value[j]
        for j in range(half):
            y[j] /= total[j]


@kernel("block_starts")
def block_starts(pos_at, y_at, size, begin, end, scratch):
    """First positions of blocks. A unit is a position."""
    for t in range(begin, end):
        i32p(y_at)[t] = i32p(pos_at)[t] // size * size


@kernel("block_cells")
def block_cells(pos_at, cells_at, y_at, size, spare, begin, end, scratch):
    """Cells of blocks, by their last tokens. A unit is a token."""
    for t in range(begin, end):
        ends = (i32p(pos_at)[t] + 1) % size == 0
        i32p(y_at)[t] = i32p(cells_at)[t] // min(size, PAGE) if ends else spare


@kernel("store_blocks")
def store_blocks(dtype):
    """Store rows into cells that lie one behind the other. A unit is a row; cells outside the cache are skipped."""
    move, row_nbytes = row_mover(dtype), page_nbytes(dtype, 1)

    def run(cache_at, rows_at, cells_at, size, n_cells, begin, end, scratch):
        for t in range(begin, end):
            cell = np.int64(i32p(cells_at)[t])
            if 0 <= cell < n_cells:
                move(rows_at + np.int64(t) * size * 4, cache_at + cell * (size * row_nbytes // PAGE), size)

    return run
