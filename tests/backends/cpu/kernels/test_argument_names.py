"""Arguments of CPU kernels: a lowering passes as many as the kernel names."""

from __future__ import annotations

import importlib

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.cpu.compiler.kernel_source import _module_of
from logitless.backends.cpu.compiler.numba_frontend import names_of
from logitless.backends.cpu.kernels.ir.registry import KERNELS
from logitless.backends.cpu.lowering.registry import LOWERINGS
from logitless.graph.op import OPS
from logitless.graph.testing.conformance import problems, register_all

register_all()
ATTENTION = ("attention_back", "causal_attention", "causal_attention_back", "chunk_ends", "chunk_starts", "clear_cells")


@pytest.mark.parametrize("name", [*ATTENTION, "full_attention", "layer_norm", "mean_rows"])
def test_kernel_with_named_arguments_gets_as_many(name: str) -> None:
    CPUBackend(1).close()  # its lowerings are registered
    assert name in OPS
    tasks = [task for problem in problems(name) for task in LOWERINGS[name](problem.roots[0], lambda t: 0) or ()]
    assert tasks
    for task in tasks:
        family, *params = task.kernel.split(":")
        importlib.import_module(f"logitless.backends.cpu.kernels.{_module_of(family)}")
        assert len(names_of(KERNELS[family](*params))) == len(task.args), family
