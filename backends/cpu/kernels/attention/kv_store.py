"""KV cache kernels: store rows into pages, load them, copy pages (layout: graph/dtype.py)."""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.attention.kv_blocks import block_mover
from logitless.backends.cpu.kernels.attention.tile import page_nbytes
from logitless.backends.cpu.kernels.ir.registry import (
    bf16_to_f32,
    bits_of,
    f16_to_f32,
    f32_to_f16,
    f32p,
    i32p,
    kernel,
    u8p,
    u16p,
)
from logitless.backends.cpu.kernels.matmul.round_bf16 import to_bf16
from logitless.graph.dtype import KV_TYPES


def _row_mover(dtype, cells_last, *, load):
    """Kernel that stores rows into the cache or, with `load`, reads them as f32. A unit is a token.

    `cells_last`: keys; otherwise values. Rows whose cell is outside the cache are skipped.
    """
    kind = KV_TYPES[dtype]
    page_of_element = page_nbytes(dtype, 1)
    make = partial(block_mover, kind) if kind.bits else partial(number_mover, dtype)
    move = make(cells_last=cells_last, load=load)

    def run(cache_at, rows_at, cells_at, heads, size, n_cells, begin, end, scratch):
        cells = i32p(cells_at)
        page = size * page_of_element
        for t in range(begin, end):
            if cells[t] < 0 or cells[t] >= n_cells:
                continue
            for h in range(heads):
                x_at = rows_at + (t * heads + h) * size * 4
                move(x_at, cache_at + (np.int64(cells[t] // 16) * heads + h) * page, np.int64(cells[t] % 16), size)

    return run


@njit(forceinline=True)
def _f32_to_bf16(x):
    return np.uint16(to_bf16(np.uint32(bits_of(x))) >> np.uint32(16))


def number_mover(dtype, *, cells_last, load):
    """f(x, page, cell, size): store a row of plain numbers, or load it."""
    pointer, to_cache, from_cache = {
        "f32": (f32p, np.float32, np.float32),
        "f16": (u16p, f32_to_f16, f16_to_f32),
        "bf16": (u16p, _f32_to_bf16, bf16_to_f32),
    }[dtype]
    step = 16 if cells_last else 1  # distance between elements of a row

    @njit(forceinline=True)
    def move(x_at, page, cell, size):
        x, numbers, first = f32p(x_at), pointer(page), cell if cells_last else cell * size
        for i in range(size):
            if load:
                x[i] = from_cache(numbers[first + i * step])
            else:
                numbers[first + i * step] = to_cache(x[i])

    return move


def row_mover(dtype):
    """f(x, row, size): store a row of a cache whose cells are rows by themselves."""
    kind = KV_TYPES[dtype]
    if kind.bits:
        move = block_mover(kind, cells_last=False, load=False, cells=1)
    else:
        move = number_mover(dtype, cells_last=False, load=False)

    @njit(forceinline=True)
    def store(x_at, row, size):
        move(x_at, row, np.int64(0), size)

    return store


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
def copy_pages(cache_at, pairs_at, count, size, n, begin, end, scratch):
    """Copy pages of `size` bytes within the cache of n pages, in order. One unit.

    Pairs with a page outside the cache are skipped.
    """
    pairs = i32p(pairs_at)
    for i in range(count):
        least, most = min(pairs[2 * i], pairs[2 * i + 1]), max(pairs[2 * i], pairs[2 * i + 1])
        if 0 <= least < most < n:
            source = u8p(cache_at + np.int64(pairs[2 * i]) * size)
            destination = u8p(cache_at + np.int64(pairs[2 * i + 1]) * size)
            for j in range(size):
                destination[j] = source[j]
