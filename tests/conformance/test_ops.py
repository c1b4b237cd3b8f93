"""Every case of every op on every backend, from the registry."""

from __future__ import annotations

import pytest

from logitless.graph.backend import Backend
from logitless.graph.op import OPS
from logitless.graph.testing.conformance import OK, UNSUPPORTED, Problem, problems, register_all, run

register_all()
# Products that unpack weights with the code of `linear`, which has a case of every type: here the
# types whose way to unpack no other has. A kernel takes a second or two to compile.
LIKE_LINEAR = {"expert_linear", "expert_matmul", "expert_parts", "linear_add", "linear_glu", "linear_parts", "matmul"}
NEAR_OTHERS = {"q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_k", "iq4_nl", "iq4_xs", "nvfp4", "tq1_0", "tq2_0"}
NEAR_OTHERS |= {"iq2_xxs", "iq2_xs", "iq3_s", "iq1_s", "iq1_m"}
# GPUs have one way to read types of few bits, in all products, and compile long for each of them.
NEAR_ON_GPUS = {"q3_k", "tq1_0", "iq2_s", "iq3_xxs"}
FEW_BITS = (NEAR_OTHERS | NEAR_ON_GPUS | {"q2_k"}) - {"q4_0", "q4_1", "q5_0", "q5_k", "iq4_nl"}


@pytest.mark.parametrize("name", sorted(name for name in OPS if OPS[name].cases))
def test_op_matches_its_reference(name: str, backend: Backend) -> None:
    cases = list(problems(name))
    if backend.name == "cpu":
        cases = [p for p in cases if name not in LIKE_LINEAR or not NEAR_OTHERS & types_of_constants(p)]
    else:
        cases = [p for p in cases if worth_compiling(name, p)]
    outcomes = [run(problem, [backend]) for problem in cases]
    wrong = [f"{o.case}: {o.detail} (error {o.error:.2g})" for o in outcomes if o.status not in (OK, UNSUPPORTED)]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(outcomes)} cases of {name} are wrong:", *wrong])
    if backend.name == "cpu":
        assert all(o.status == OK for o in outcomes), "the CPU must be complete"


def worth_compiling(name: str, problem: Problem) -> bool:
    """False for kernels of a GPU whose code other cases test; of few bits, `linear` has the one for many rows."""
    types = types_of_constants(problem)
    if name in LIKE_LINEAR or name == "get_rows":
        return not types & (NEAR_OTHERS | NEAR_ON_GPUS)
    return name != "linear" or not types & FEW_BITS or problem.roots[0].shape[0] == 9


def types_of_constants(problem: Problem) -> set[str]:
    return {t.dtype for t, _ in problem.constants.values()}
