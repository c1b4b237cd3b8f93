"""A model's kernels, known before any of them runs: the first start compiles them side by side, and no request waits.

`begin` starts with those that every model needs, the slowest first; `prepare` goes on with those of a model's graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from backends.cpu import jit
from backends.cpu.isa import isa
from backends.cpu.kernels.layout import tiles
from backends.cpu.lower_linear import ROWS_OF_PLAIN
from backends.cpu.lowering import LOWERINGS
from backends.cpu.packing import packed
from graph.ops.samplers import LAYOUT
from graph.tensor import Tensor

GENERAL = (f"sample:{LAYOUT}", "step", "worker", "rms_norm", "rope_angles", "copy_pages", f"log_probs:{LAYOUT}")


def begin() -> None:
    """Start compiling what is not cached; returns at once."""
    jit.prefetch(GENERAL)


def prepare(nodes: Iterable[Tensor]) -> None:
    """Load every kernel that a graph with these nodes runs, for any number of rows."""
    jit.load((*GENERAL, *(name for t in nodes for name in _kernels(t))))


def _kernels(t: Tensor) -> Iterator[str]:
    yield from (f"pack:{s.dtype}" for s in t.src if packed(s))
    rule = LOWERINGS.get(t.op)
    for instruction in (rule(t, lambda _: 0) if rule else None) or ():
        family, *params = instruction.kernel.split(":")
        if family == "linear":
            yield from (f"linear:{params[0]}:{rows}x{groups}" for rows, groups in tiles(params[0], isa()))
        elif family == "linear_rows":
            yield from (f"linear_rows:{rows}" for rows in (1, ROWS_OF_PLAIN))
        else:
            yield instruction.kernel
