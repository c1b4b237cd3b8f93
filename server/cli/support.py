"""Writes docs/SUPPORT.md from the registries: every op, and how each backend runs its cases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from backends.cpu.backend import CPUBackend, CPUProgram
from backends.kernels import device
from backends.kernels.dialect import CPU, SIMT, SOFT, Shape
from graph.backend import Place
from graph.conformance import Problem, problems, register_all, run
from graph.op import OPS
from graph.tensor import ALIASES, Tensor, toposort

PAGE = Path(__file__).resolve().parents[2] / "docs" / "SUPPORT.md"
HEAD = """# Ops and backends

Made by `scripts/support` from the registries; a test compares. In the column of a backend, `kernel` runs natively,
`reference` runs the declaration in numpy (complete but slow, never part of a decode step), `–` runs on the next device,
and `no bytes` is a name for memory of the source. OpenCL and Vulkan share their kernels. `logitless selftest` checks
every case against the float64 reference.

| op | cases | gradient | writes | cpu | opencl | vulkan |
|---|---|---|---|---|---|---|
"""


SHAPES = {"opencl": (CPU, SIMT), "vulkan": (SIMT, SOFT)}  # the classes of devices that a backend drives


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
        op, found = OPS[name], list(problems(name))
        native = 0
        for problem in found:
            backend.fallbacks.clear()
            run(problem, [backend])
            native += name not in backend.fallbacks
        how = _how(name, native, len(found), "reference")
        for shapes in SHAPES.values():
            runs = sum(all(_runs(problem, shape) for shape in shapes) for problem in found)
            how += " | " + _how(name, runs, len(found), "–")
        gradient, writes = ("yes" if op.vjp_rule else "–"), ", ".join(map(str, op.writes)) or "–"
        rows.append(f"| `{name}` | {len(op.cases)} | {gradient} | {writes} | {how} |")
    backend.close()
    return HEAD + "\n".join(rows) + "\n"


def _runs(problem: Problem, shape: Shape) -> bool:
    """Whether a device of a class has kernels for all of a case."""
    return all(device.supports(t, shape) for t in toposort(problem.roots) if not t.is_leaf)


def _how(name: str, native: int, total: int, otherwise: str) -> str:
    if name in ALIASES:
        return "no bytes"
    if total == 0:
        return "within others"
    if native in (0, total):
        return "kernel" if native else otherwise
    return f"kernel in {native} of {total} cases"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else "docs/SUPPORT.md is old: run scripts/support")
    PAGE.write_text(text, encoding="utf-8")
