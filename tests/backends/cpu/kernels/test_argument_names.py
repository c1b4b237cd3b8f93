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
CPUBackend(1).close()  # its lowerings are registered
# families that read the argument block themselves
BLOCK = {"attention", "attention_join", "linear", "linear_glu", "map", "norm_of_sums", "sample", "sparse_attention"}


@pytest.mark.parametrize("name", sorted(LOWERINGS.keys() & OPS.keys()))
def test_kernel_with_named_arguments_gets_as_many(name: str) -> None:
    tasks = [task for problem in problems(name) for task in LOWERINGS[name](problem.roots[0], lambda t: 0) or ()]
    for kernel, n_args in {(task.kernel, len(task.args)) for task in tasks}:
        family, *params = kernel.split(":")
        importlib.import_module(f"logitless.backends.cpu.kernels.{_module_of(family)}")
        names = names_of(KERNELS[family](*params))
        assert names or family in BLOCK, f"{family} names no arguments"
        assert len(names) in (0, n_args), kernel
