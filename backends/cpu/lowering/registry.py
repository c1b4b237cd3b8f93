"""Lowering registry: one function per op turns a node into tasks.

    @lower("rms_norm")
    def _(t, at):
        args = (at(t.src[0]), at(t.src[1]), at(t), n, bits(eps))
        return [Task("rms_norm", args, n_units=rows)]

`at(tensor)` is the tensor's address when the program runs: in the arena, in an input buffer, or a
state's (constant 2-D states are packed, see fusion/packing.py). An op without a rule, or whose rule
returns None for these shapes and dtypes, runs as its numpy reference. Where a kernel takes nothing but
addresses and numbers, `lower_plain` has a line an op.

A rewrite replaces a node by nodes that suit this backend (quantised activations, fused pairs). It
runs before memory is planned."""

from __future__ import annotations

from collections.abc import Callable

from logitless.backends.cpu.threads.pool import Task
from logitless.graph.backend import Rewrite, Rules
from logitless.graph.op import OPS
from logitless.graph.tensor import Tensor

At = Callable[[Tensor], int]
Lowering = Callable[[Tensor, At], list[Task] | None]
LOWERINGS, REWRITES = Rules[Lowering](), Rules[Rewrite]()
lower, rewrite = LOWERINGS.of, REWRITES.of
Work = tuple[tuple[int, ...], int, int]  # numbers behind the addresses, units, units of a chunk


def lower_plain(**ops: Callable[..., Work]) -> None:
    """Register ops whose kernel has their name and takes the addresses of the sources and the result, then
    numbers. The work of each is a function of what the op's declaration names (graph/declaration.py)."""

    def rule(t: Tensor, at: At) -> list[Task]:
        numbers, units, grain = ops[t.op](**OPS[t.op].signature.names(t.op, t.src, t.attrs))
        return [Task(t.op, (*map(at, t.src), at(t), *numbers), units, grain)]

    for name in ops:
        lower(name)(rule)
