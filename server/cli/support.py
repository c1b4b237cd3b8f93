"""Writes docs/SUPPORT.md from the registries: every op, and how each backend runs its cases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from backends.cpu.backend import CPUBackend, CPUProgram
from graph.backend import Place
from graph.conformance import problems, register_all, run
from graph.op import OPS
from graph.tensor import ALIASES, Tensor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "SUPPORT.md"
HEAD = """# Ops and backends

Made by `scripts/support` from the registries; a test compares. In the column of a backend, `kernel` runs natively,
`reference` runs the declaration in numpy (complete but slow, never part of a decode step), and `no bytes` is a name for
memory of the source. `logitless selftest` checks every case against the float64 reference.

| op | cases | gradient | writes | cpu |
|---|---|---|---|---|
"""


class Watched(CPUBackend):
    """Remembers which ops had to run as their reference."""

    def __init__(self) -> None:
        super().__init__(1)
        self.fallbacks: list[str] = []

    def compile(self, nodes: Sequence[Tensor], place: Callable[[Tensor], Place]) -> CPUProgram:
        program = super().compile(nodes, place)
        self.fallbacks += program.fallbacks
        return program


def page() -> str:
    """The whole text."""
    register_all()
    backend = Watched()
    rows = []
    for name in sorted(OPS):
        op, native, total = OPS[name], 0, 0
        for problem in problems(name):
            backend.fallbacks.clear()
            run(problem, [backend])
            native += name not in backend.fallbacks
            total += 1
        if name in ALIASES:
            how = "no bytes"
        elif total == 0:
            how = "within others"
        elif native in (0, total):
            how = "kernel" if native else "reference"
        else:
            how = f"kernel in {native} of {total} cases"
        gradient, writes = ("yes" if op.vjp_rule else "–"), ", ".join(map(str, op.writes)) or "–"
        rows.append(f"| `{name}` | {len(op.cases)} | {gradient} | {writes} | {how} |")
    backend.close()
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else "docs/SUPPORT.md is old: run scripts/support")
    PAGE.write_text(text, encoding="utf-8")
