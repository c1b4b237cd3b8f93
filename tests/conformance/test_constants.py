"""Constants as any source of any op: backends keep them in layouts of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from logitless.graph.backend import Backend
from logitless.graph.op import OPS
from logitless.graph.tensor import ALIASES, variable
from logitless.graph.testing.conformance import OK, UNSUPPORTED, Problem, problems, register_all, run

register_all()


@pytest.mark.parametrize("name", sorted(name for name in OPS if OPS[name].cases and name not in ALIASES))
def test_a_constant_is_as_good_as_a_feed(name: str, backend: Backend) -> None:
    outcomes = [run(problem, [backend]) for problem in with_constants(name)]
    wrong = [f"{o.case}: {o.detail} (error {o.error:.2g})" for o in outcomes if o.status not in (OK, UNSUPPORTED)]
    assert not wrong, "\n".join(wrong)


def with_constants(name: str) -> Iterator[Problem]:
    """The first case with a matrix of f32 in each position, which is a constant in its place."""
    positions: set[int] = set()
    for problem in problems(name):
        (root,) = problem.roots
        node = root if root.op == name else root.src[0]
        for i, source in enumerate(node.src):
            fits = source.op == "feed" and source.dtype == "f32" and len(source.shape) == 2 and min(source.shape) > 1
            if node.op != name or i in positions or not fits or node.src.count(source) > 1:
                continue
            positions.add(i)
            constant = variable(source.name, source.shape, "f32", constant=True)
            changed = replace(node, src=(*node.src[:i], constant, *node.src[i + 1 :]))
            data = np.ascontiguousarray(problem.feeds[source.name], np.float32).view(np.uint8).reshape(-1)
            yield replace(
                problem,
                label=f"{problem.label}, source {i} constant",
                roots=(changed if root is node else replace(root, src=(changed,)),),
                feeds={feed: values for feed, values in problem.feeds.items() if feed != source.name},
                constants={**problem.constants, source.name: (constant, data)},
            )
