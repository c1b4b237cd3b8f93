"""Weights that are read past the caches.

A step reads each weight once. If they are more than the third level holds, none of them is there when the next step
begins; what Python and the step's other ops need still would be. A Zen core can have a line brought into its first
level alone (`prefetchnta`). Kernels of one row and quantised weights, for which memory is the limit, have a variant
that asks so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from backends.cpu.isa import cache_nbytes, compiled_for
from backends.cpu.kernels.layout import asks
from backends.cpu.pool import Instruction


def too_many(nbytes: int) -> bool:
    """Whether a step's weights leave each other no place in the third level."""
    return nbytes > cache_nbytes(3)


def variant(kernel: str) -> str:
    """Of a kernel the variant that reads weights past the caches; the kernel itself where there is none."""
    family, *params = kernel.split(":")
    of_one_row = (family == "linear" and params[1:] == ["1x1"]) or (family == "linear_glu" and params[2:] == ["1"])
    return f"{kernel}:past" if of_one_row and compiled_for().is_zen and asks(params[0], 1) else kernel


def past_caches(instructions: Iterable[Instruction]) -> list[Instruction]:
    """A step's instructions, with the variants that suit what they stream."""
    instructions = list(instructions)
    if not too_many(sum(i.n_units * i.streams[1] for i in instructions)):
        return instructions
    return [replace(i, kernel=variant(i.kernel)) for i in instructions]
