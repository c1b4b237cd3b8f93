"""Error lines of docs/troubleshooting.md: every error class has a cause and a cure, and real errors have their line."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from logitless.cli.main import main
from scripts import docs_pages, error_lines
from tests.helpers.paths import ROOT

INSIDE = {  # errors that another part of the product answers: no user sees them by themselves
    *("CallFailed", "ClientLeft", "DeviceLost", "DownloadFailed", "Flood", "GradeFault", "NotACall", "NotLinkable"),
    *("OutOfArena", "PrivateAddress", "QueueLost", "ServerToolsAsked", "StartFailed", "StepFailed", "Unfetched"),
    *("WorkerLost", "DeviceFailed", "ReplicaEnded"),
}


def raised(module: ast.Module) -> set[str]:
    """Classes of the module that are raised, by the bases that they have."""
    return {
        node.name
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        and any(re.fullmatch(r"\w*(Error|Exception)", error_lines._name(base)) for base in node.bases)
    }


def test_every_error_class_has_a_cause_and_a_cure() -> None:
    every = set().union(*(raised(module) for module in error_lines.modules()))
    public = {name for name in every if not name.startswith("_")}
    assert public - set(error_lines.classes()) - INSIDE == set()
    assert set(error_lines.KINDS) <= set(error_lines.lines())


def test_the_page_has_every_line_that_the_code_can_say() -> None:
    page = docs_pages.on_page_markdown((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    sites = {
        line
        for module in error_lines.modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
        if error_lines._name(node.exc.func) in error_lines.classes()
        for line in error_lines.text(node.exc.args[0])
        if " " in line.strip("… :")
    }
    assert len(sites) > 500
    assert [line for line in sites if f"`` {' '.join(line.split())} ``" not in page] == []


@pytest.mark.parametrize(
    "words",
    [
        "serve -m M --no-such-flag",
        "serve -m nothing.gguf",
        "generate -m F -p a",
        "perplexity -m M",
        "perplexity -m M -f F -c 100000",
        "finetune -m M --file F --lora-out O --epochs 1",
        "quantize M",
    ],
)
def test_an_error_of_the_command_line_has_its_line(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f"
    file.write_text("no model and no rows\n")
    names = {"M": str(ROOT / "models" / "demo" / "shakespeare.gguf"), "F": str(file), "O": str(tmp_path / "o.gguf")}
    assert main([names.get(word, word) for word in shlex.split(words)]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("logitless: ")
    patterns = [
        ".*".join(re.escape(" ".join(part.split())) for part in line.split("…"))
        for of in error_lines.lines().values()
        for line in of
        if len(line.replace("…", "").strip()) > 8
    ]
    assert [pattern for pattern in patterns if re.search(pattern, said)] != [], said


def test_a_message_that_a_helper_takes_is_found_at_its_calls() -> None:
    assert error_lines.text(ast.parse("f'{a}: no b' if c else 'd' + e", mode="eval").body) == ["…: no b", "d…"]
    assert error_lines.text(ast.parse("str(error)", mode="eval").body) == []
