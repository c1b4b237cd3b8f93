"""Every case of every op on every backend, from the registry."""

from __future__ import annotations

import pytest

from logitless.graph.backend import Backend
from logitless.graph.op import OPS
from logitless.graph.testing.conformance import OK, UNSUPPORTED, register_all, run
from tests.helpers.op_cases import cases

register_all()


@pytest.mark.parametrize("name", sorted(name for name in OPS if OPS[name].cases))
def test_op_matches_its_reference(name: str, backend: Backend, request: pytest.FixtureRequest) -> None:
    outcomes = [run(problem, [backend]) for problem in cases(request, name, backend)]
    wrong = [f"{o.case}: {o.detail} (error {o.error:.2g})" for o in outcomes if o.status not in (OK, UNSUPPORTED)]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(outcomes)} cases of {name} are wrong:", *wrong])
    if backend.name == "cpu":
        assert all(o.status == OK for o in outcomes), "the CPU must be complete"
