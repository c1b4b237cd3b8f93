"""Candidate lists of the samplers: sortable integer keys, the k largest, full sorts.

A logit becomes a signed 32-bit key in the same order (-0 as +0, NaN as -inf). A candidate is one
int64 with the key above and ~id below, so a greater word is a greater logit, or the same logit and
a lower id. That makes ties definite and every comparison one instruction. Addresses are int64;
nothing here allocates."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir.registry import _unary, f32p, i32p, i64p

F32, I32 = ir.FloatType(), ir.IntType(32)
BLOCK = 64  # values under one maximum
helper = njit(error_model="numpy")
LOWEST = np.int32(-0x80000000)
DEAD = np.int32(-0x7F800001)  # key of -inf: in a list only if nothing else is left


def _order(b, word):
    """Bits of a float to a key and back: negative numbers are reversed."""
    sign = b.ashr(word, ir.Constant(I32, 31))
    return b.xor(word, b.and_(sign, ir.Constant(I32, 0x7FFFFFFF)))


def _emit_key(b, x):
    word = b.bitcast(b.fadd(x, ir.Constant(F32, 0.0)), I32)
    return b.select(b.fcmp_unordered("uno", x, x), ir.Constant(I32, int(DEAD)), _order(b, word))


key_of = _unary(types.int32, types.float32, _emit_key)
value_of = _unary(types.float32, types.int32, lambda b, key: b.bitcast(_order(b, key), F32))


@intrinsic
def larger(typingctx, x, y):
    def codegen(ctx, b, sig, args):
        return b.select(b.icmp_signed(">", *args), *args)

    return types.int32(types.int32, types.int32), codegen


@njit(forceinline=True)
def candidate(key, id):
    return (np.int64(key) << 32) | (0xFFFFFFFF - np.int64(id))


@njit(forceinline=True)
def key_part(word):
    return np.int32(word >> 32)


@njit(forceinline=True)
def id_part(word):
    return 0xFFFFFFFF - (word & 0xFFFFFFFF)


@njit(forceinline=True)
def logit_part(word):
    return value_of(np.int32(word >> 32))


@helper
def block_maxima(x_at, n, blocks_at):
    """Largest key of every 64 values of x; returns the largest of all."""
    blocks = i32p(blocks_at)
    top = LOWEST
    for b in range(n >> 6):
        x = f32p(x_at + b * (BLOCK * 4))
        m = LOWEST
        for i in range(BLOCK):
            m = larger(m, key_of(x[i]))
        blocks[b] = m
        top = larger(top, m)
    if n & (BLOCK - 1):
        x = f32p(x_at)
        m = LOWEST
        for i in range(n & ~(BLOCK - 1), n):
            m = larger(m, key_of(x[i]))
        blocks[n >> 6] = m
        top = larger(top, m)
    return top


@helper
def first_at(x_at, n, blocks_at, key):
    """Lowest index of a value with this key, which is some block's maximum."""
    x, blocks = f32p(x_at), i32p(blocks_at)
    b = 0
    while blocks[b] != key:
        b += 1
    i = b * BLOCK
    while key_of(x[i]) != key:
        i += 1
    return i


@helper
def _kth_largest(blocks_at, n, k, heap_at):
    """The k-th largest of n keys: the root of a heap of the k largest so far."""
    keys, heap = i32p(blocks_at), i32p(heap_at)
    for i in range(k):  # the heap grows by sifting up
        at = i
        while at > 0 and heap[(at - 1) >> 1] > keys[i]:
            heap[at] = heap[(at - 1) >> 1]
            at = (at - 1) >> 1
        heap[at] = keys[i]
    root = heap[0]
    for i in range(k, n):
        key = keys[i]
        if key > root:
            at = 0
            while True:
                child = 2 * at + 1
                if child >= k:
                    break
                if child + 1 < k and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] >= key:
                    break
                heap[at] = heap[child]
                at = child
            heap[at] = key
            root = heap[0]
    return root


@helper
def collect(x_at, n, blocks_at, threshold, list_at):
    """Candidates with a key ≥ `threshold` (and above -inf), in the order of ids. Returns their number."""
    blocks, words = i32p(blocks_at), i64p(list_at)
    count = 0
    for b in range((n + BLOCK - 1) >> 6):
        if blocks[b] >= threshold:
            x = f32p(x_at)
            for i in range(b * BLOCK, min(n, (b + 1) * BLOCK)):
                key = key_of(x[i])
                if key >= threshold and key > DEAD:
                    words[count] = candidate(key, i)
                    count += 1
    return count


@helper
def largest(x_at, n, k, blocks_at, list_at, tmp_at):
    """The k largest values above -inf, sorted, as candidates; returns their number.

    Block maxima have to be current. k blocks have a maximum of at least the k-th largest one, so no
    value below it is among the k largest."""
    n_blocks = (n + BLOCK - 1) >> 6
    threshold = LOWEST
    if 2 * k <= n_blocks:
        threshold = _kth_largest(blocks_at, n_blocks, k, tmp_at)
    count = collect(x_at, n, blocks_at, threshold, list_at)
    sort(list_at, count, tmp_at, True)
    return min(k, count)


@helper
def _sort_few(list_at, n):
    """Shell sort, greatest first, for up to a thousand candidates."""
    a = i64p(list_at)
    gap = 301
    while gap > 0:
        for i in range(gap, n):
            word = a[i]
            j = i
            while j >= gap and a[j - gap] < word:
                a[j] = a[j - gap]
                j -= gap
            a[j] = word
        gap = 132 if gap == 301 else 57 if gap == 132 else 23 if gap == 57 else 10 if gap == 23 else gap * 4 // 10


@helper
def sort(list_at, n, tmp_at, ids_ascend):
    """Radix sort, greatest first, with `tmp` (n words and 16 KiB more).

    `ids_ascend`: equal keys are in order already."""
    if n <= 1000:
        _sort_few(list_at, n)
        return
    counts = i64p(tmp_at + n * 8)  # (8, 256)
    for i in range(2048):
        counts[i] = 0
    first = 4 if ids_ascend else 0
    a = i64p(list_at)
    for i in range(n):
        # greatest first is smallest first of the unsigned complement
        word = ~a[i] ^ (-0x7FFFFFFFFFFFFFFF - 1)
        for digit in range(first, 8):
            counts[digit * 256 + ((word >> (digit * 8)) & 255)] += 1
    source, target = list_at, tmp_at
    for digit in range(first, 8):
        row = digit * 256
        total, most = 0, 0
        for i in range(256):
            c = counts[row + i]
            most = max(most, c)
            counts[row + i] = total
            total += c
        if most == n:
            continue  # one value only: nothing to move
        a, b = i64p(source), i64p(target)
        for i in range(n):
            word = ~a[i] ^ (-0x7FFFFFFFFFFFFFFF - 1)
            at = row + ((word >> (digit * 8)) & 255)
            b[counts[at]] = a[i]
            counts[at] += 1
        source, target = target, source
    if source != list_at:
        a, b = i64p(source), i64p(list_at)
        for i in range(n):
            b[i] = a[i]
