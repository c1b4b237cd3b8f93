"""GGUF string arrays: offsets of all strings, found fast.

Strings are length-prefixed, so the n-th is found only after the n-1 before it; a Python loop over
the 400,000 strings of a 128k BPE vocabulary (tokens and merges) takes 100-160 ms. Nearly all
lengths are below 256, so a prefix is nearly always one byte followed by seven zeros, which text
hardly ever contains: numpy finds those places for a whole block at once (20 ms in all), and they
are accepted only as far as they form a chain in which each string ends where the next begins. Where
the chain breaks (a long or an empty string, a NUL in a string), an exact loop steps over the place."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 18  # bytes searched at once: its temporaries stay in the second-level cache
_FIRST_STEPS = 16  # strings walked exactly where a chain breaks; doubles while breaks keep coming
_MOST_STEPS = 1 << 16


def scan_strings(buffer: mmap.mmap, begin: int, count: int) -> tuple[NDArray[np.int64], int]:
    """Offsets of the length prefixes of `count` strings from byte `begin` on, and the offset after
    the last one.

    Fewer offsets than `count` mean that the string after them does not end inside the file; the
    offset is then its own. Time and memory are linear in the strings found, whatever `count`
    claims."""
    data = np.frombuffer(buffer, np.uint8)
    chunks: list[NDArray[np.int64]] = []
    n_found, pos, steps = 0, begin, _FIRST_STEPS
    chained = False  # true after a chain that broke: then the next step is a walk
    while n_found < count:
        n_wanted = count - n_found
        if chained:
            starts, after = _walk(buffer, pos, min(steps, n_wanted))
            if len(starts) == 0:
                break
            steps = min(2 * steps, _MOST_STEPS)
            chained = False
        else:
            starts, after, whole = _chain(data, pos, n_wanted)
            chained = not whole
            if whole:
                steps = _FIRST_STEPS
        chunks.append(starts)
        n_found += len(starts)
        pos = after
    return (np.concatenate(chunks) if chunks else np.empty(0, np.int64)), pos


def _chain(data: NDArray[np.uint8], pos: int, n_wanted: int) -> tuple[NDArray[np.int64], int, bool]:
    """Up to `wanted` strings shorter than 256 bytes that follow one another from `pos` in one
    block.

    Also where the last of them ends, and whether the chain went on to the end of the block (or of
    what was wanted)."""
    zero = data[pos + 1 : pos + _BLOCK] == 0
    if len(zero) < 7:
        return np.empty(0, np.int64), pos, False
    two = zero[:-1] & zero[1:]  # two zeros from here on
    four = two[:-2] & two[2:]
    starts = np.flatnonzero(four[:-3] & four[3:]) + pos  # seven zeros after the byte here
    if len(starts) == 0 or starts[0] != pos:
        return np.empty(0, np.int64), pos, False
    ends = starts + data[starts] + 8
    breaks = np.flatnonzero(ends[:-1] != starts[1:])
    run = min(int(breaks[0]) + 1 if len(breaks) else len(starts), n_wanted)
    # only the last can be cut off: each other one ends at the next one's prefix
    if ends[run - 1] > len(data):
        run -= 1
        return starts[:run], int(starts[run]), False
    return starts[:run], int(ends[run - 1]), run == n_wanted or len(breaks) == 0


def _walk(buffer: mmap.mmap, pos: int, n: int) -> tuple[NDArray[np.int64], int]:
    """The next `n` strings from `pos`, of any length, as far as they end inside the file; and where the last ends."""
    starts, size = [], len(buffer)
    for _ in range(n):
        after = pos + 8 + int.from_bytes(buffer[pos : pos + 8], "little")
        if pos + 8 > size or after > size:
            break
        starts.append(pos)
        pos = after
    return np.array(starts, np.int64), pos
