"""Rows into the pages of keys and values and out of them again, and copies of pages (layout: attention_tile.py)."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.tile import page_nbytes
from logitless.backends.cpu.kernels.ir.registry import (
    abs_f32,
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


@njit(forceinline=True)
def _block_scale(x, j):
    """max|x| / 127 of the j-th 32 elements: q8_0's scale."""
    top = np.float32(0)
    for i in range(32):
        top = max_f32(top, abs_f32(x[j * 32 + i]))
    return top / np.float32(127)


def _moved(dtype, cells_last, *, back):
    """a: cache, rows, cells, H_kv, D, n_cells: rows into the cache, or (`back`) out of it as f32. A unit is a token;
    rows whose cell the cache does not have are left out.

    `cells_last`: keys; else values.
    """
    block_nbytes = page_nbytes(dtype, 32)  # of 32 elements of a page's cells
    step = 16 if cells_last else 1  # from one element of a row to the next
    held, as_held, as_f32 = (u16p, f32_to_f16, f16_to_f32) if dtype == "f16" else (f32p, np.float32, np.float32)

    def run(a, begin, end, scratch):
        cells, heads, size, n_cells = i32p(a[2]), a[3], a[4], a[5]
        page = size * block_nbytes // 32
        for t in range(begin, end):
            if cells[t] < 0 or cells[t] >= n_cells:
                continue
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
                else:
                    numbers = held(base)
                    for i in range(size):
                        if back:
                            x[i] = as_f32(numbers[first + i * step])
                        else:
                            numbers[first + i * step] = as_held(x[i])

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
    """a: cache, pairs, n pairs, bytes of a page, n pages. One unit: the pairs are copied in order; one that names a
    page that the cache does not have is left out."""

    def run(a, begin, end, scratch):
        pairs, size, n = i32p(a[1]), a[3], a[4]
        for i in range(a[2]):
            least, most = min(pairs[2 * i], pairs[2 * i + 1]), max(pairs[2 * i], pairs[2 * i + 1])
            if 0 <= least < most < n:
                source = u8p(a[0] + np.int64(pairs[2 * i]) * size)
                destination = u8p(a[0] + np.int64(pairs[2 * i + 1]) * size)
                for j in range(size):
                    destination[j] = source[j]

    return run
