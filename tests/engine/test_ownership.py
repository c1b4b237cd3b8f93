"""Ownership of a sequence's state: each part is assigned in one package only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitless.engine.kv_cache.block_table import BlockTable
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.draft_state import Drafts
from tests.helpers.paths import ROOT

ENGINE = ROOT / "engine"


def assigned(path: Path) -> Iterator[tuple[str, int]]:
    """(receiver.attribute, line) of every assignment and deletion of an attribute in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Starred | ast.Subscript):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute):
                yield ast.unparse(target), target.lineno


def writers(receivers: tuple[str, ...], names: tuple[str, ...]) -> set[str]:
    """Packages of the engine that assign one of the attributes through one of the receivers."""
    found = set()
    for path in ENGINE.rglob("*.py"):
        for text, _ in assigned(path):
            receiver, _, name = text.rpartition(".")
            if name in names and receiver.split(".")[-1].split("[")[0] in receivers:
                found.add(str(path.relative_to(ENGINE).parent))
    return found


SEQUENCES = ("seq", "sequence", "last", "first")


@pytest.mark.parametrize(
    ("receivers", "owner", "package"),
    [(("kv",), BlockTable, "kv_cache"), (("drafts",), Drafts, "speculation"), (SEQUENCES, Sequence, "scheduler")],
)
def test_state_is_written_by_its_owner_alone(receivers: tuple[str, ...], owner: type, package: str) -> None:
    names: tuple[str, ...] = owner.__slots__  # type: ignore[attr-defined]
    assert writers(receivers, names) == {package}


def test_an_assignment_is_seen_in_all_its_forms(tmp_path: Path) -> None:
    source = "seq.a = 1\nseq.b, (x, *seq.c) = 1, [2]\nseq.d += 1\nseq.e: int = 1\ndel seq.f[1:2]\nseq.kv.g[0] = 1\n"
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert sorted(name for name, _ in assigned(tmp_path / "a.py")) == [
        "seq.a",
        "seq.b",
        "seq.c",
        "seq.d",
        "seq.e",
        "seq.f",
        "seq.kv.g",
    ]
