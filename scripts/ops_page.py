"""Writes docs/ops.md from the registries: every op, and how each backend runs its cases."""

from __future__ import annotations

import sys
from pathlib import Path

from logitless.backends.gpu import device
from logitless.backends.gpu.language.dialect import CPU, SIMT, SOFT, Shape
from logitless.backends.registry import has_cpu_kernel, open_backends
from logitless.graph.backend import Backend
from logitless.graph.execution.partition import partition
from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import ALIASES
from logitless.graph.testing.conformance import Problem, problems, register_all

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ops.md"
HEAD = """# Ops and backends

Written by `scripts/support` from the registries; a test compares. OpenCL and Vulkan share their
kernels. `logitless selftest` checks every case against the float64 reference.

| entry | meaning |
|---|---|
| `kernel` | the backend has a kernel |
| `reference` | the op's numpy reference: complete but slow, never part of a decode step |
| `–` | the next device runs it |
| `no bytes` | an alias of its source |
| `within others` | part of fused kernels only |

Products with quantized weights use integer dot products where a Vulkan device accelerates them, and
cooperative matrices of bytes for many rows; both give the same bits and the faster is found by a
trial. [Devices](devices.md) has the variables that decide instead.

| op | cases | gradient | writes | cpu | opencl | vulkan |
|---|---|---|---|---|---|---|
"""


SHAPES = {"opencl": (CPU, SIMT), "vulkan": (SIMT, SOFT)}  # the classes of devices that a backend drives


def page() -> str:
    """The page as text."""
    register_all()
    (backend,) = open_backends(("cpu",), 1)
    rows = []
    for name in sorted(OPS):
        op, cases = OPS[name], list(problems(name))
        native = sum(name not in _references(problem, backend) for problem in cases)
        how = _how(name, native, len(cases), "reference")
        for shapes in SHAPES.values():
            runs = sum(all(_runs(problem, shape) for shape in shapes) for problem in cases)
            how += " | " + _how(name, runs, len(cases), "–")
        gradient, writes = ("yes" if op.vjp_rule else "–"), ", ".join(map(str, op.writes)) or "–"
        rows.append(f"| `{name}` | {len(op.cases)} | {gradient} | {writes} | {how} |")
    backend.close()
    return HEAD + "\n".join(rows) + "\n"


def _references(problem: Problem, backend: Backend) -> set[str]:
    """The ops of a case that the CPU has no kernel for. Nothing is compiled."""
    order = partition(problem.roots, [backend]).order
    nodes = [t for t in order if not t.is_leaf and t.op not in ALIASES]
    return {t.op for t in nodes if not has_cpu_kernel(t)}


def _runs(problem: Problem, shape: Shape) -> bool:
    """True if a device of a class has kernels for all of a case."""
    return all(device.supports(t, shape, "") for t in toposort(problem.roots) if not t.is_leaf)


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
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else "docs/ops.md is old: run scripts/support")
    PAGE.write_text(text, encoding="utf-8")
