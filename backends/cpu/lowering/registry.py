"""From a node to instructions: one small function per op, registered by the op's name.

    @lower("rms_norm")
    def _(t, at): return [Instruction("rms_norm", (at(t.src[0]), at(t.src[1]), at(t), n, bits(eps)), n_units=rows)]

`at(tensor)` is the tensor's address when the program runs: an arena offset, a feed's buffer, or a state's (constant
2-D states are packed, see weights.py). An op without an entry, or whose rule returns None because it has no kernel for
these shapes or types, runs as its numpy reference, outside the native call.
A rewrite replaces a node by nodes that suit this backend (quantised activations, fused pairs) before memory is laid
out.
"""

from __future__ import annotations

from collections.abc import Callable

from logitless.backends.cpu.threads.pool import Instruction
from logitless.graph.backend import Rewrite, Rules
from logitless.graph.tensor import Tensor

At = Callable[[Tensor], int]
Lowering = Callable[[Tensor, At], list[Instruction] | None]
LOWERINGS, REWRITES = Rules[Lowering](), Rules[Rewrite]()
lower, rewrite = LOWERINGS.of, REWRITES.of
