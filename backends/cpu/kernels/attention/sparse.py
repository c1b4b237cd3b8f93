"""Choice of the cells of sparse attention (graph/ops/attention/mla.py)."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.tile import BLOCK, PAGE, page_converter, page_nbytes, scores
from logitless.backends.cpu.kernels.ir.registry import f32p, i32p, kernel, u32p

TOP_BIT, ALL_BITS = np.uint32(1 << 31), np.uint32((1 << 32) - 1)


@kernel("chosen_cells")
def chosen_cells(dtype, head_size, n_heads):
    """Masks of the n cells with the greatest scores. A unit is a token.

    Scratch per thread: scores of all cells, a block of keys, a block's scores of 8 heads."""
    size, heads = int(head_size), int(n_heads)
    convert, key_page = page_converter(dtype, size, keys=True), page_nbytes(dtype, size)
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
        """Scores of 32 cells."""
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

    @njit(forceinline=True)
    def threshold(bits, count, n):
        """The n-th greatest of so many numbers, as unsigned integers in their order."""
        least = np.uint32(0)
        for i in range(32):
            greater, above = least | np.uint32(TOP_BIT >> np.uint32(i)), 0
            for c in range(count):
                above += bits[c] >= greater
            if above >= n:
                least = greater
        return least

    def run(q_at, w_at, k_at, tables_at, slot_at, pos_at, y_at, table_pages, n, begin, end, scratch):
        width = (table_pages * PAGE + BLOCK - 1) // BLOCK * BLOCK
        total_at = scratch
        block_at = total_at + width * 4
        s_at = block_at + 2 * page_nbytes_f32
        bits, slot, pos = u32p(total_at), i32p(slot_at), i32p(pos_at)
        for t in range(begin, end):
            count, table = pos[t] + 1, i32p(tables_at + slot[t] * table_pages * 4)
            y = f32p(y_at + t * width * 4)
            if count <= n:
                for c in range(width):
                    y[c] = np.float32(0) if c < count else np.float32(-1e30)
                continue
            for block in range((count + BLOCK - 1) // BLOCK):
                for i in range(2):
                    page = min(2 * block + i, table_pages - 1)
                    convert(k_at + table[page] * key_page, block_at + i * page_nbytes_f32)
                of_block(
                    q_at + t * heads * size * 4, w_at + t * heads * 4, block_at, s_at, total_at + block * BLOCK * 4
                )
            for c in range(count):
                bits[c] ^= ALL_BITS if bits[c] & TOP_BIT else TOP_BIT
            least, left = threshold(bits, count, n), n
            for c in range(count):
                left -= bits[c] > least
            for c in range(width):
                chosen = c < count and bits[c] >= least
                if chosen and bits[c] == least:
                    chosen = left > 0
                    left -= 1
                y[c] = np.float32(0) if chosen else np.float32(-1e30)

    return run
