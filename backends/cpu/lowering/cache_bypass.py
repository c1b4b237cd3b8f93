"""Weights that are read past the caches.

A step reads each weight once. If they are more than the third level holds, none of them is there when the next step
begins; what Python and the step's other ops need still would be. A Zen core can have a line brought into its first
level alone (`prefetchnta`). Kernels of one row and quantised weights, for which memory is the limit, have a variant
that asks so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from logitless.backends.cpu.fusion.packed_weights import packed_nbytes
from logitless.backends.cpu.fusion.packing import packed
from logitless.backends.cpu.isa import cache_nbytes, compiled_for
from logitless.backends.cpu.kernels.matmul.layout import asks_ahead
from logitless.backends.cpu.threads.pool import Instruction
from logitless.graph.tensor import Tensor


def too_many(nodes: Iterable[Tensor]) -> bool:
    """Whether the weights of a step's nodes leave each other no place in the third level."""
    weights = {id(s): packed_nbytes(s.dtype, *s.shape) for t in nodes for s in t.src if packed(s)}
    return sum(weights.values()) > cache_nbytes(3)


def variant(kernel: str) -> str:
    """Of a kernel the variant that reads weights past the caches; the kernel itself where there is none."""
    family, *params = kernel.split(":")
    of_one_row = (family == "linear" and params[1:] == ["1x1"]) or (family == "linear_glu" and params[2:] == ["1"])
    return f"{kernel}:past" if of_one_row and compiled_for().is_zen and asks_ahead(params[0], 1) else kernel


def past_caches(instructions: Iterable[Instruction]) -> list[Instruction]:
    """The same instructions by the variants of their kernels."""
    return [replace(i, kernel=variant(i.kernel)) for i in instructions]
