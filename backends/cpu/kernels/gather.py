"""Gather of table rows: `get_rows:<dtype>` from a packed weight, `get_rows:rows` from plain f32."""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.ir.grid import grid_address
from logitless.backends.cpu.kernels.ir.registry import (
    bf16_to_f32,
    f16_to_f32,
    f32p,
    from_bits,
    i8p,
    i32p,
    i64p,
    kernel,
    u8p,
    u16p,
    u32p,
)
from logitless.backends.cpu.kernels.matmul.layout import LAYOUTS
from logitless.backends.cpu.kernels.matmul.unpack_blocks import float_index, places_of_trits, section_finder


@kernel("get_rows")
def get_rows(dtype):
    """Gather rows of k as f32 from a table in packed groups. A unit is a row."""
    if dtype == "rows":
        return gather_f32
    layout = LAYOUTS[dtype]
    if layout.block == 1:
        return gather_floats(dtype)
    return gather_blocks(layout)


def gather_f32(table_at, ids_at, y_at, k, group_nbytes, begin, end, scratch):
    for t in range(begin, end):
        x, y = f32p(table_at + i32p(ids_at)[t] * k * 4), f32p(y_at + t * k * 4)
        for i in range(k):
            y[i] = x[i]


@kernel("get_ids")
def get_ids(table_at, ids_at, y_at, k, limit, begin, end, scratch):
    """Gather rows of indices, within their bounds. A unit is a row."""
    for t in range(begin, end):
        x, y = i32p(table_at + np.int64(i32p(ids_at)[t]) * k * 4), i32p(y_at + t * k * 4)
        for i in range(k):
            y[i] = min(max(x[i], 0), limit - 1)


def float_reader(dtype):
    """f(group, k, r): one element of a packed group of floats, as f32."""
    k_interleave = LAYOUTS[dtype].k_interleave

    @njit(forceinline=True)
    def get(group, k, r):
        i = float_index(k_interleave, k, r)
        if dtype == "f32":
            return f32p(group)[i]
        elif dtype == "f16":
            return f16_to_f32(u16p(group)[i])
        else:
            return bf16_to_f32(u16p(group)[i])

    return get


def gather_floats(dtype):
    get = float_reader(dtype)

    def run(table_at, ids_at, y_at, k, group_nbytes, begin, end, scratch):
        for t in range(begin, end):
            row = np.int64(i32p(ids_at)[t])
            group, y = table_at + row // 16 * group_nbytes, f32p(y_at + t * k * 4)
            for i in range(k):
                y[i] = get(group, i, row % 16)

    return run


def codebook_reader(codes):
    """f(quant): its value in the codebook; the quant itself without one. The table is two words."""
    low, high = (int.from_bytes(bytes(code & 255 for code in half), "little") for half in (codes[:8], codes[8:]))
    low, high = np.uint64(low), np.uint64(high)

    @njit(forceinline=True)
    def read_code(v):
        if codes:
            word = high if v > 7 else low
            return np.int32(np.int8((word >> np.uint64(v % 8 * 8)) & np.uint64(255)))
        else:
            return v

    return read_code


def fine_reader(layout):
    """f(address, lane, part): scale and minimum of half `part` of a block, in units of the coarse ones.

    `address`: of the block's fine numbers."""
    fine, mins, parts, coarse = layout.fine, layout.mins, layout.parts, layout.coarse

    @njit(forceinline=True)
    def read(address, lane, part):
        if fine == 0:
            return np.float32(1), np.float32(1)
        elif fine == 24:
            pair = u8p(address + lane // 2 * 3 + lane % 2)
            both = np.int32(pair[0]) | np.int32(pair[1]) << 8
            return np.float32((both >> (lane % 2 * 4 + part * 6) & 63) - 32), np.float32(0)
        octet = u8p(address)[part * 16 + lane]
        if coarse == 0:
            return f16_to_f32(np.uint16(octet) << np.uint16(7)) * np.float32(128), np.float32(0)
        elif mins and parts == 2:
            return np.float32(octet & 15), -np.float32(octet >> 4)
        elif mins:
            return np.float32(octet), -np.float32(u8p(address)[16 + lane])
        else:
            return np.float32(np.int8(octet)), np.float32(0)

    return read


@njit(forceinline=True)
def trit(at, lane, step, t):
    """A digit of base 3 (layout.py) of a block whose quants are at an address."""
    five_at, three_at, bits_at = places_of_trits(at, lane)
    if step < 5:
        return ((np.int32(u8p(five_at)[t] ^ 128) * np.int32(3**step) & 255) * 3) >> 8
    three = np.int32(u8p(three_at)[t]) >> lane // 8 * 4 & 15
    three |= (np.int32(u8p(bits_at)[0]) >> (lane % 2 * 4 + t) & 1) << 4
    return three // 3 ** (7 - step) % 3


@njit(forceinline=True)
def three_bits(q, step, t):
    """A quant of q3_k (layout.py)."""
    if step < 6:
        return np.int32(q[step // 2 * 64 + t]) >> 3 * (step % 2) & 7
    return np.int32(q[(step - 6) * 64 + t]) >> 6 << 1 | np.int32(q[128 + t]) >> step & 1


def block_decoder(layout):
    """f(group, lane, i, first, last, out): part of one row's 32-element block i → f32 at out.

    The part is steps `first`…`last`, four elements each."""
    if layout.grid:
        return grid_decoder(layout)
    sections, low, high, step_of = section_finder(layout), layout.low_bits, layout.high, layout.step
    trits, mins, parts, coarse = layout.trits, layout.mins, layout.parts, layout.coarse
    offset = 0 if mins or layout.codes else layout.zero >> layout.shift
    code, read_fine, mask = codebook_reader(layout.codes), fine_reader(layout), (1 << low) - 1

    @njit(forceinline=True)
    def decode(group, lane, i, first, last, out):
        y = f32p(out)
        c, f, h_at, q_at = sections(group, i)
        h, q = u8p(h_at + lane * 4), u8p(q_at + lane * 4)
        d, m = np.float32(1), np.float32(0)
        if coarse == 16:
            d = from_bits(np.int32(u8p(c)[lane]) << 23) * np.float32(0.5)
        elif coarse:
            d = f16_to_f32(u16p(c)[lane])
        if mins:
            m = f16_to_f32(u16p(c)[16 + lane])
        for step in range(first, last):
            factor, least = read_fine(f, lane, step * parts // 8)
            scale, low_end = d * factor, m * least
            for e in range(4):
                if trits:
                    v = trit(q_at, lane, step, e)
                elif low == 3:
                    v = three_bits(q, step, e)
                else:
                    v = np.int32(q[step % low * 64 + e]) >> (step // low * low) & mask
                if high == 64:
                    v |= (np.int32(h[e]) >> step & 1) << low
                elif high == 128:
                    v |= (np.int32(h[step // 4 * 64 + e]) >> (step % 4 * 2) & 3) << 4
                y[(step - first) * 4 + e] = scale * np.float32(code(v) * step_of - offset) + low_end

    return decode


def grid_decoder(layout):
    """`block_decoder` of a type with a grid (layout.py)."""
    grid, sections, table = layout.grid, section_finder(layout), grid_address(layout.grid.dtype)
    size, words, planes, signs, scales = grid.size, grid.index_words, grid.index_bits - 8, grid.signs, grid.scales
    wide, unit = layout.high == 32, np.float32(grid.unit)

    @njit(forceinline=True)
    def scale_of(coarse, fine, lane, i, part, s):
        """Scale of half of a block; `s` is that of words."""
        if scales == "coarse":
            c = u16p(coarse)
            bits = np.int64(0)
            for n in range(4):
                bits |= (np.int64(c[16 * n + lane]) >> 12) << (4 * n)
            s = (np.int64(c[16 * (i % 8 // 2) + lane]) >> (i % 2 * 6 + part * 3)) & 7
            d = f16_to_f32(np.uint16(bits))
        else:
            d = f16_to_f32(u16p(coarse)[lane])
            if scales == "halves":
                s = np.int64(u8p(fine)[lane]) >> (4 * part) & 15
            elif scales == "pairs":
                s = np.int64(u8p(fine - i % 2 * 8)[lane]) >> (i % 2 * 4) & 15
        return d * unit * np.float32(2 * s + 1)

    @njit(forceinline=True)
    def decode(group, lane, i, first, last, out):
        y = f32p(out)
        c, f, h_at, q_at = sections(group, i)
        q = u32p(q_at + lane * 4)
        high, sign, s = np.int64(0), np.int64(0), np.int64(0)
        if signs:
            sign = np.int64(q[16 * words])
            if signs == 7:
                s = high = sign >> 28
                sign &= 0x0FFFFFFF
                odd = sign ^ (sign >> 16)
                odd ^= odd >> 8
                sign |= ((odd ^ (odd >> 4)) & 15) << 28
        if wide:
            high = np.int64(u16p(h_at)[lane])
            s = high >> 12 & 7
        elif planes > 0 and signs == 8:
            high = np.int64(u8p(h_at)[lane])
        for step in range(first, last):
            n = step * 4 // size
            index = np.int64(q[n // 4 * 16]) >> (n % 4 * 8) & 255
            for plane in range(planes):
                index |= (high >> (4 * (plane + n // 4) + n % 4) & 1) << (8 + plane)
            entry = i8p(table() + index * size + step * 4 % size)
            scale = scale_of(c, f, lane, i, step // 4, s)
            for t in range(4):
                v = np.int32(entry[t])
                if signs:
                    if sign >> (4 * (step % 2 * 4 + t) + step // 2) & 1:
                        v = -v
                elif scales == "high":
                    v += 1 - 2 * np.int32(high >> 15)
                else:
                    v += 1 - 2 * np.int32(high >> (12 + step // 2) & 1)
                y[(step - first) * 4 + t] = scale * np.float32(v)

    return decode


def gather_blocks(layout):
    decode = block_decoder(layout)

    def run(table_at, ids_at, y_at, k, group_nbytes, begin, end, scratch):
        for t in range(begin, end):
            row = np.int64(i32p(ids_at)[t])
            for i in range(k // 32):
                decode(table_at + row // 16 * group_nbytes, row % 16, i, 0, 8, y_at + (t * k + i * 32) * 4)

    return run


@kernel("unpack")
def unpack(dtype):
    """Unpack a weight to f32 rows of k. A unit is a row."""
    layout = LAYOUTS[dtype]
    decode = block_decoder(layout) if layout.block > 1 else None
    get = float_reader(dtype) if layout.block == 1 else None

    def blocks(table_at, y_at, k, group_nbytes, begin, end, scratch):
        for row in range(begin, end):
            for i in range(k // 32):
                decode(table_at + row // 16 * group_nbytes, row % 16, i, 0, 8, y_at + (row * k + i * 32) * 4)

    def floats(table_at, y_at, k, group_nbytes, begin, end, scratch):
        for row in range(begin, end):
            y = f32p(y_at + row * k * 4)
            for i in range(k):
                y[i] = get(table_at + row // 16 * group_nbytes, i, row % 16)

    return blocks if layout.block > 1 else floats


def strip_decoder(dtype, width):
    """f(table, group_nbytes, n, row, rows, column, columns, target): part of a packed table as f32.

    The table is (…, n), the target [rows][width]. Floats are zero beyond `columns`. Width and
    column are multiples of 16."""
    layout = LAYOUTS[dtype]
    if layout.block == 1:
        get = float_reader(dtype)

        @njit(forceinline=True)
        def floats(table, group_nbytes, n, row, rows, column, columns, target):
            for r in range(rows):
                group, out = table + (row + r) // 16 * group_nbytes, f32p(target + r * width * 4)
                for c in range(width):
                    out[c] = get(group, column + c, (row + r) % 16) if c < columns else np.float32(0)

        return floats
    decode = block_decoder(layout)

    @njit(forceinline=True)
    def blocks(table, group_nbytes, n, row, rows, column, columns, target):
        for r in range(rows):
            group = table + (row + r) // 16 * group_nbytes
            for c in range(column, column + columns, 16):
                first = c % 32 // 4
                decode(group, (row + r) % 16, c // 32, first, first + 4, target + (r * width + c - column) * 4)

    return blocks


@kernel("token_columns")
def token_columns(ids_at, y_at, n, begin, end, scratch):
    """Ids plus 1 in n columns. A unit is a token."""
    ids, y = i32p(ids_at), f32p(y_at)
    for t in range(begin, end):
        for i in range(n):
            y[t * n + i] = np.float32(ids[t] + 1)


@kernel("ngram_rows")
def ngram_rows(tokens_at, before_at, hashes_at, y_at, n_before, n_heads, stop, begin, end, scratch):
    """Rows of a table by hashes of n-grams. A unit is a token."""
    tokens, before, y = i32p(tokens_at), f32p(before_at), i32p(y_at)
    factors, heads = i64p(hashes_at), i32p(hashes_at + 8 * (n_before + 1))
    per_gram = n_heads // n_before
    for t in range(begin, end):
        mixed, cut = np.uint64(tokens[t]) * np.uint64(factors[0]), False
        for i in range(n_before):
            token = np.int64(before[t * n_before + i]) - 1
            cut = cut or token < 0 or token == stop
            mixed ^= np.uint64(stop if cut else token) * np.uint64(factors[i + 1])
            for h in range(i * per_gram, (i + 1) * per_gram):
                y[t * n_heads + h] = np.int32(np.int64(mixed % np.uint64(heads[2 * h])) + heads[2 * h + 1])
