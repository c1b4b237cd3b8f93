"""Describe a measured graph as text: device, memory and copies of every node."""

from __future__ import annotations

from collections.abc import Sequence

from logitless.graph.execution.memory import ArenaLayout
from logitless.graph.execution.partition import TRANSFER, Placement


def describe(placement: Placement, layout: ArenaLayout, devices: Sequence[str]) -> str:
    """Format a graph: a line a segment (`gpu: 2 nodes`, `copy to cpu`), a line a node below it.

    A node reads `%3 = add f32[4, 6] (%1, %2) @ 0 +96`: offset in its arena and bytes.
    """
    lines = [f"{devices[b]}: arena of {size} bytes" for b, size in layout.sizes.items()]
    number = {t: i for i, t in enumerate(placement.order)}
    for segment in placement.segments:
        if segment.nodes[0].op == TRANSFER:
            lines.append(f"copy to {devices[segment.backend]}")
        else:
            lines.append(f"{devices[segment.backend]}: {len(segment.nodes)} nodes")
        for t in segment.nodes:
            owner, at = layout.owners[t]
            where = f"{at} of {owner.name!r}" if owner.is_leaf else str(layout.offsets[owner] + at)
            args = ", ".join(repr(s.name) if s.name and s.is_leaf else f"%{number[s]}" for s in t.src)
            lines.append(f"  %{number[t]} = {t.op} {t.dtype}{list(t.shape)} ({args}) @ {where} +{t.nbytes}")
    return "\n".join(lines)
