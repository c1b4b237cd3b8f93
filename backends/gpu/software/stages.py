"""Launches as rows of a table, for a kernel that walks it: each row is a *stage* of that kernel.

What such a kernel can do are its *pieces*, variants of other kernels. A row has the number of one of them, how many
groups there are, how many of them side by side, the addresses of its buffers, and its words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from logitless.backends.gpu.language.dialect import KERNELS, Defines
from logitless.backends.gpu.lowering import Dispatch

Piece = tuple[str, Defines]
HEAD = 3  # words of a row before the arguments
LINE = 16  # words of a cache line: what different threads count lies apart


def row_words(pieces: Sequence[Piece]) -> int:
    return HEAD + max(len(KERNELS[name].args) + len(KERNELS[name].words) for name, _ in pieces)


def table(
    pieces: Sequence[Piece], dispatches: Sequence[Dispatch], addresses: Iterable[Sequence[int]]
) -> npt.NDArray[np.uint64]:
    """A row for each launch, whose buffers begin at these addresses."""
    rows = np.zeros((len(dispatches), row_words(pieces)), np.uint64)
    number = {piece: i for i, piece in enumerate(pieces)}
    for row, d, buffers in zip(rows, dispatches, addresses, strict=True):
        gx, gy, _ = d.groups
        words = [number[d.kernel, d.defines], gx * gy, gx, *buffers, *d.words]
        row[: len(words)] = words
    return rows
