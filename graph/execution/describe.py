"""A measured graph as text: what runs where, what is copied, and which bytes of an arena each result takes."""

from __future__ import annotations

from collections.abc import Sequence

from logitless.graph.execution.memory import ArenaLayout
from logitless.graph.execution.partition import TRANSFER, Placement


def describe(placement: Placement, arenas: ArenaLayout, devices: Sequence[str]) -> str:
    """One line per segment (`gpu: 2 nodes`, `copy to cpu`) and below it one per node: `%3 = add f32[4, 6] @ 0 +96`."""
    lines = [f"{devices[b]}: arena of {size} bytes" for b, size in arenas.sizes.items()]
    number = {t: i for i, t in enumerate(placement.order)}
    for segment in placement.segments:
        if segment.nodes[0].op == TRANSFER:
            lines.append(f"copy to {devices[segment.backend]}")
        else:
            lines.append(f"{devices[segment.backend]}: {len(segment.nodes)} nodes")
        for t in segment.nodes:
            root, at = arenas.owners[t]
            where = f"{at} of {root.name!r}" if root.is_leaf else str(arenas.offsets[root] + at)
            args = ", ".join(repr(s.name) if s.name and s.is_leaf else f"%{number[s]}" for s in t.src)
            lines.append(f"  %{number[t]} = {t.op} {t.dtype}{list(t.shape)} ({args}) @ {where} +{t.nbytes}")
    return "\n".join(lines)
