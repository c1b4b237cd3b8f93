"""Which launches of a plan are one, where a CPU runs Vulkan; the kernel is backends/gpu/software/chain.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby

from logitless.backends.gpu.language.dialect import KERNELS, Shape
from logitless.backends.gpu.lowering import Dispatch
from logitless.backends.gpu.software.chain import LANES, PATIENCE, PIECES, TRIES

LEAST = 2 * TRIES  # launches that are worth those of a chain
WORKERS = min(os.cpu_count() or 1, 64)  # more than the driver has threads do no harm
KERNEL = KERNELS["chain_texels"]


def parts(dispatches: Sequence[Dispatch], shape: Shape) -> Iterator[tuple[bool, list[Dispatch]]]:
    """Launches in order: whether these are to be one, or on their own."""
    held = set(PIECES) if shape.texels and shape.lanes == LANES else set()
    for chained, found in groupby(dispatches, lambda d: (d.kernel, d.defines) in held):
        part = list(found)
        yield chained and len(part) >= LEAST, part


def special(dispatches: Sequence[Dispatch]) -> tuple[int, ...]:
    """The kernel's constants: which pieces it is compiled with, and the patience of its workers."""
    used = {(d.kernel, d.defines) for d in dispatches}
    return (*(int(piece in used) for piece in PIECES), PATIENCE)
