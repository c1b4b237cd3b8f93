"""Names: nouns and verbs instead of participles, and one public type of a name."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter

import pytest

from tests.helpers.paths import ROOT
from tests.test_imports import OURS, SOURCES

PARTICIPLES = frozenset(
    ["asked", "found", "given", "told", "shown", "said", "kept", "left", "made", "held", "wanted", "seen", "owed"]
)
# per 1,000 lines, elsewhere 5; to shrink, never to grow
MOST = {"engine": 3}
MOST_TWINS = 35  # names of several public types. To shrink, never to grow


@pytest.mark.parametrize("package", OURS)
def test_names_of_a_package_are_rarely_participles(package: str) -> None:
    n_lines, names = 0, Counter[str]()
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] == package:
            text = path.read_text(encoding="utf-8")
            n_lines += text.count("\n")
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            names.update(
                t.string for t in tokens if t.type == tokenize.NAME and t.string.lower().strip("_") in PARTICIPLES
            )
    assert 1000 * names.total() / n_lines <= MOST.get(package, 5), names.most_common(5)


def test_public_types_have_names_of_their_own() -> None:
    names = Counter[str]()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names.update(
            node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        )
    twins = sorted(name for name, n in names.items() if n > 1)
    assert len(twins) <= MOST_TWINS, twins
