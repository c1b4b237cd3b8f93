"""Cases of ops that tests run: all of them with --long, else without kernels whose code others test.

A kernel of the CPU or of a GPU takes a second to compile. A weight type has one way to unpack its
blocks, which every product uses, and the numbers of rows of a kernel are copies of one loop."""

from __future__ import annotations

import pytest

from logitless.graph.backend import Backend
from logitless.graph.dtype import BLOCK_TYPES
from logitless.graph.testing.conformance import Problem, problems

# A device for what a model does on a GPU: every op runs on both, whose kernels are one text.
ONE_GPU = ["vulkan:0", pytest.param("opencl:0", marks=pytest.mark.long)]
KINDS = {"q8_0", "q4_0", "q4_k", "mxfp4", "iq2_s"}  # a weight type of each kind, tested in every kernel
# Products that unpack weights with the code of `linear`, which has a case of every type.
LIKE_LINEAR = {"expert_linear", "expert_matmul", "expert_parts", "linear_add", "linear_glu", "linear_parts", "matmul"}
LIKE_KINDS = {*BLOCK_TYPES} - {"q8_0", "q4_k", "mxfp4"}
# GPUs have one way to read types of few bits, in all products, and compile long for each of them.
FEW_BITS = LIKE_KINDS - {"q4_0", "q4_1", "q5_0", "q5_1", "q5_k", "q6_k", "iq4_nl"}
ON_OPENCL = {*KINDS, "q5_0", "q6_k", "q3_k", "iq1_m"}  # Vulkan, whose kernels are the same text, has the others
ON_CPU, ON_GPU = {1, 33}, {9}  # rows of `linear` for types that are not of KINDS: one and many


def cases(request: pytest.FixtureRequest, name: str, backend: Backend | None = None) -> list[Problem]:
    """Cases of an op on a backend; None: the CPU's, or another's that is like it."""
    is_long, device = request.config.getoption("--long"), backend.name if backend else "cpu"
    return [p for p in problems(name) if is_long or worth_compiling(name, p, device)]


def worth_compiling(name: str, problem: Problem, device: str) -> bool:
    """False for kernels whose code other cases test."""
    types, on_cpu = types_of_constants(problem), device == "cpu"
    if name in LIKE_LINEAR or (name == "get_rows" and not on_cpu):
        return not types & LIKE_KINDS
    if name == "cast":
        return not {s.dtype for s in problem.roots[0].src} & {*BLOCK_TYPES} - KINDS
    if name == "linear" and device.startswith("opencl") and types & ({*BLOCK_TYPES} - ON_OPENCL):
        return False
    if name == "linear" and types & ({*BLOCK_TYPES} - KINDS if on_cpu else FEW_BITS):
        return problem.roots[0].shape[0] in (ON_CPU if on_cpu else ON_GPU)
    return True


def types_of_constants(problem: Problem) -> set[str]:
    return {t.dtype for t, _ in problem.constants.values()}
