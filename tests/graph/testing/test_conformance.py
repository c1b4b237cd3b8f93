"""Conformance tests tested: every kind of fault of a backend is detected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import logitless.graph.ops.elementwise  # noqa: F401  (declares add)
from logitless.graph.backend import Backend, Location
from logitless.graph.op import OPS
from logitless.graph.tensor import Tensor
from logitless.graph.testing.conformance import OK, UNSUPPORTED, WRONG, difference, problems, register_all, run
from tests.helpers.paths import ROOT

register_all()
# the right result and the memory from there on, as f32
Fault = Callable[[np.ndarray, np.ndarray], None]


class FaultyBackend(Backend):
    """Runs references in numpy, then lets a fault spoil what it wrote."""

    name, alignment, memory_bytes = "faulty", 64, 0

    def __init__(self, fault: Fault | None = None, refuses: str = "") -> None:
        self.fault, self.refuses = fault, refuses

    def supports(self, t: Tensor) -> bool:
        return t.op != self.refuses

    def rewrite(self, t: Tensor) -> Tensor:
        return t

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        return fetches

    def alloc(self, nbytes: int, *, feeds: bool = False) -> Any:
        return SimpleNamespace(nbytes=nbytes, array=np.zeros(nbytes, np.uint8))

    def constant_nbytes(self, t: Tensor) -> int:
        return t.nbytes

    def load(self, t: Tensor, raw: np.ndarray) -> Any:
        return SimpleNamespace(nbytes=len(raw), array=np.array(raw))

    def upload(self, location: Location, data: np.ndarray) -> None:
        location.buffer.array[location.offset : location.offset + len(data)] = data

    def download(self, location: Location, nbytes: int) -> np.ndarray:
        return np.array(location.buffer.array[location.offset : location.offset + nbytes])

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Any:
        def view(t: Tensor, n: int | None = None) -> np.ndarray:
            at = locate(t)
            return at.buffer.array[at.offset : at.offset + (n or t.nbytes)].view(np.float32)

        def execute() -> None:
            for t in nodes:
                result = OPS[t.op].reference(*(view(s).reshape(s.shape) for s in t.src), **t.attrs)
                if self.fault is None:
                    view(t)[:] = result.reshape(-1)
                else:
                    self.fault(result.reshape(-1), view(t, t.nbytes + 64))

        return SimpleNamespace(run=execute)

    def close(self) -> None: ...


def right(result: np.ndarray, memory: np.ndarray) -> None:
    memory[: len(result)] = result


def one_off(result: np.ndarray, memory: np.ndarray) -> None:
    memory[: len(result)] = result
    memory[3] += 0.01


def one_missing(result: np.ndarray, memory: np.ndarray) -> None:
    memory[: len(result) - 1] = result[:-1]


def far_beside(result: np.ndarray, memory: np.ndarray) -> None:
    memory[: len(result)] = result
    memory[-1] = 0


@pytest.mark.parametrize(
    ("fault", "status", "detail"),
    [
        (None, OK, ""),
        (right, OK, ""),
        (one_off, WRONG, "at (0, 3)"),
        (one_missing, WRONG, "nan, expected"),
        (far_beside, WRONG, "written after a buffer"),
    ],
)
def test_conformance_run_finds_faults(fault: Fault | None, status: str, detail: str) -> None:
    outcomes = [run(problem, [FaultyBackend(fault)]) for problem in problems("add")]  # type: ignore[list-item]
    assert {o.status for o in outcomes} == {status}
    assert all(detail in o.detail for o in outcomes[:1])


class SpoilsSource(FaultyBackend):
    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Any:
        def execute() -> None:
            super_program.run()
            at = locate(nodes[0].src[0])
            at.buffer.array[at.offset] ^= 1

        super_program = super().compile(nodes, locate)
        return SimpleNamespace(run=execute)


def test_conformance_run_finds_changed_inputs() -> None:
    outcome = run(next(problems("add")), [SpoilsSource()])
    assert (outcome.status, outcome.detail) == (WRONG, "the input s0 was modified")


def test_refused_ops_are_not_counted_as_passed() -> None:
    outcomes = [run(problem, [FaultyBackend(refuses="add")]) for problem in problems("add")]  # type: ignore[list-item]
    assert {o.status for o in outcomes} == {UNSUPPORTED}


def test_problems_include_odd_offsets() -> None:
    labels = [p.label for p in problems("add")]
    assert any(label.endswith("at odd offsets") for label in labels)


def test_difference() -> None:
    inf, nan = np.inf, np.nan
    assert difference(np.array([1.0, inf, nan]), np.array([1.0, inf, nan])) == (0.0, "at (0,): 1.0, expected 1.0")
    assert difference(np.array([1.0, inf]), np.array([1.0, -inf]))[0] == inf
    assert difference(np.array([1.0]), np.array([nan]))[0] == inf
    assert difference(np.array([10.0, 1.0]), np.array([10.0, 2.0]))[0] == 0.1
    assert difference(np.array([1000, 1]), np.array([1000, 2]))[0] == 1.0
    assert difference(np.zeros(2), np.zeros(3))[0] == inf


def test_every_module_of_ops_is_registered() -> None:
    """A fresh process registers all ops; other tests here have imported some."""
    script = """
import sys
from logitless.graph.testing.conformance import register_all
register_all()
print(*(name for name in sys.modules if name.startswith("logitless.graph.ops.")))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    files = [path for path in (ROOT / "graph" / "ops").rglob("*.py") if path.name != "__init__.py"]
    names = {".".join(("logitless", *path.relative_to(ROOT).with_suffix("").parts)) for path in files}
    assert names <= set(ran.stdout.split())
