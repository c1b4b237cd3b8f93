"""KV cache kernels: store rows into pages, load them, copy pages (layout: tile.py)."""

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
    """q8_0 scale of the j-th 32 elements: max|x| / 127."""
    top = np.float32(0)
    for i in range(32):
        top = max_f32(top, abs_f32(x[j * 32 + i]))
    return top / np.float32(127)


def _row_mover(dtype, cells_last, *, load):
    """Kernel that stores rows into the cache or, with `load`, reads them as f32. A unit is a token.

    `cells_last`: keys; otherwise values. Rows whose cell is outside the cache are skipped.
    """
    block_nbytes = page_nbytes(dtype, 32)  # bytes of 32 elements of a page's cells
    step = 16 if cells_last else 1  # distance between elements of a row
    cache_pointer, to_cache, from_cache = (
        (u16p, f32_to_f16, f16_to_f32) if dtype == "f16" else (f32p, np.float32, np.float32)
    )

    def run(cache_at, rows_at, cells_at, heads, size, n_cells, begin, end, scratch):
        cells = i32p(cells_at)
        page = size * block_nbytes // 32
        for t in range(begin, end):
            if cells[t] < 0 or cells[t] >= n_cells:
                continue
            cell = cells[t] % 16
            first = cell if cells_last else cell * size
            for h in range(heads):
                x = f32p(rows_at + (t * heads + h) * size * 4)
                base = cache_at + (np.int64(cells[t] // 16) * heads + h) * page
                if dtype == "q8_0":
                    q, scales = i8p(base), u16p(base + size * 16)
                    first_scale = cell if cells_last else cell * (size // 32)
                    for j in range(size // 32):
                        if load:
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
                    numbers = cache_pointer(base)
                    for i in range(size):
                        if load:
                            x[i] = from_cache(numbers[first + i * step])
                        else:
                            numbers[first + i * step] = to_cache(x[i])

    return run


@kernel("store_k")
def store_k(dtype):
    return _row_mover(dtype, True, load=False)


@kernel("store_v")
def store_v(dtype):
    return _row_mover(dtype, False, load=False)


@kernel("load_k")
def load_k(dtype):
    return _row_mover(dtype, True, load=True)


@kernel("load_v")
def load_v(dtype):
    return _row_mover(dtype, False, load=True)


@kernel("copy_pages")
def copy_pages():
    """Copy pages of `size` bytes within the cache of n pages, in order. One unit.

    Pairs with a page outside the cache are skipped.
    """

    def run(cache_at, pairs_at, count, size, n, begin, end, scratch):
        pairs = i32p(pairs_at)
        for i in range(count):
            least, most = min(pairs[2 * i], pairs[2 * i + 1]), max(pairs[2 * i], pairs[2 * i + 1])
            if 0 <= least < most < n:
                source = u8p(cache_at + np.int64(pairs[2 * i]) * size)
                destination = u8p(cache_at + np.int64(pairs[2 * i + 1]) * size)
                for j in range(size):
                    destination[j] = source[j]

    return run
