"""`logitless bench --ops`: time of each kind of op in a step, and its distance from the machine's limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from logitless.graph.execution.cost import Cost, cost
from logitless.graph.tensor import Tensor

if TYPE_CHECKING:
    from rich.table import Table

STEP = "between ops"  # Python, feeds and results


@dataclass
class Spent:
    calls: int = 0
    seconds: float = 0.0
    cost: Cost = field(default_factory=Cost)


Ops = dict[str, Spent]
Run = tuple[Sequence[Tensor], Sequence[float], Mapping[str, npt.NDArray[Any]]]


class Profile:
    """An observer of a session's plans (graph/execution/profiler.py). Durations are added up later: that takes
    time, too."""

    def __init__(self) -> None:
        self._runs: list[Run] = []

    def add(self, *run: *Run) -> None:
        self._runs.append(run)

    def take(self) -> Ops:
        """Time by kind of op since the last call."""
        runs, self._runs = self._runs, []
        spent_by_kind: Ops = defaultdict(Spent)
        spent_by_kind[STEP].calls = len(runs)
        for nodes, seconds, feeds in runs:
            for t, s in zip(nodes, seconds, strict=True):
                spent = spent_by_kind[kind(t)]
                spent.calls += 1
                spent.seconds += s
                spent.cost += cost(t, feeds)
        return spent_by_kind


def kind(t: Tensor) -> str:
    """Name of a node's kind: its op; for products also type, output rows and columns of the weights."""
    weights = [s for s in t.src if s.op == "variable" and s.attrs["constant"] and len(s.shape) == 2]
    if not weights:
        return t.op
    sizes = "+".join(str(w.shape[0]) for w in weights)
    return f"{t.op} {weights[0].dtype} {sizes}x{weights[0].shape[1]}"


def profiled(ops: Ops, seconds: float, machine: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """A row for each kind, the longest first: calls and milliseconds of a step, its share of the step's time, and what
    part of its own time its bytes take at the machine's bandwidth, and its multiply-adds at the peaks (None where these
    are not known: a device other than the CPU)."""
    ops[STEP].seconds = seconds - sum(spent.seconds for spent in ops.values())
    n_steps = ops[STEP].calls
    rows = []
    for name, spent in sorted(ops.items(), key=lambda item: -item[1].seconds):
        fractions: list[float | None] = [None, None]
        if machine is not None:
            fractions = [round(least / max(spent.seconds, 1e-9), 4) for least in spent.cost.seconds(machine)]
        rows.append(
            {
                "op": name,
                "calls": spent.calls // n_steps,
                "ms": round(1e3 * spent.seconds / n_steps, 4),
                "share": round(spent.seconds / seconds, 4),
                "bandwidth_fraction": fractions[0],
                "peak_fraction": fractions[1],
            }
        )
    return rows


def table_of(row: Mapping[str, Any]) -> Table:
    from rich.table import Table

    title = f"{row['test']}, batch {row['batch']}, threads {row['threads']}"
    table = Table("op", "calls", "ms", "share", "bandwidth", "peak", box=None, title=title, title_justify="left")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for r in row["ops"]:
        fractions = (f"{100 * r[key]:.1f} %" if r[key] else "" for key in ("bandwidth_fraction", "peak_fraction"))
        table.add_row(r["op"], str(r["calls"]), f"{r['ms']:.3f}", f"{100 * r['share']:.1f} %", *fractions)
    return table
