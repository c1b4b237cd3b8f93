"""Every case of every op on every backend, from the registry."""

from __future__ import annotations

import pytest

from logitless.graph.backend import Backend
from logitless.graph.dtype import BLOCK_TYPES
from logitless.graph.op import OPS
from logitless.graph.testing.conformance import OK, UNSUPPORTED, Problem, problems, register_all, run

register_all()
# Products that unpack weights with the code of `linear`, which has a case of every type: here a type
# of each kind, all with --long. A kernel takes a second to compile.
LIKE_LINEAR = {"expert_linear", "expert_matmul", "expert_parts", "linear_add", "linear_glu", "linear_parts", "matmul"}
LIKE_KINDS = {*BLOCK_TYPES} - {"q8_0", "q4_k", "mxfp4"}
# GPUs have one way to read types of few bits, in all products, and compile long for each of them.
FEW_BITS = LIKE_KINDS - {"q4_0", "q4_1", "q5_0", "q5_1", "q5_k", "q6_k", "iq4_nl"}


@pytest.mark.parametrize("name", sorted(name for name in OPS if OPS[name].cases))
def test_op_matches_its_reference(name: str, backend: Backend, request: pytest.FixtureRequest) -> None:
    is_long = request.config.getoption("--long")
    cases = [p for p in problems(name) if is_long or worth_compiling(name, p, backend)]
    outcomes = [run(problem, [backend]) for problem in cases]
    wrong = [f"{o.case}: {o.detail} (error {o.error:.2g})" for o in outcomes if o.status not in (OK, UNSUPPORTED)]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(outcomes)} cases of {name} are wrong:", *wrong])
    if backend.name == "cpu":
        assert all(o.status == OK for o in outcomes), "the CPU must be complete"


def worth_compiling(name: str, problem: Problem, backend: Backend) -> bool:
    """False for kernels whose code other cases test; of few bits, a GPU's `linear` has the one for many rows."""
    types, on_cpu = types_of_constants(problem), backend.name == "cpu"
    if name in LIKE_LINEAR or (name == "get_rows" and not on_cpu):
        return not types & LIKE_KINDS
    return on_cpu or name != "linear" or not types & FEW_BITS or problem.roots[0].shape[0] == 9


def types_of_constants(problem: Problem) -> set[str]:
    return {t.dtype for t, _ in problem.constants.values()}
