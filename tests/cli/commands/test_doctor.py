"""`logitless doctor`: each finding from a machine that has its cause."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from logitless.backends import host
from logitless.cli.commands.machine import doctor
from logitless.cli.main import main
from tests.test_imports import OURS

REPO_ROOT = Path(__file__).resolve().parents[3]
# set by our own processes and tests, never by a user
INTERNAL = {"LOGITLESS_BEHIND_ROUTER", "LOGITLESS_FUZZ", "LOGITLESS_SLOW", "LOGITLESS_TEST_HTTP_HOST", "LOGITLESS_TOOL"}


PARTS = {
    "processor": doctor._processor,
    "load": doctor._load,
    "memory": doctor._memory,
    "cache": doctor._cache,
    "variables": doctor._environment,
}


def findings(subject: str) -> list[doctor.Finding]:
    return [f for f in PARTS[subject]() if f.subject == subject]


def test_report_as_json_has_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["findings"]
    subjects = {f["subject"] for f in report}
    assert subjects >= {"version", "extras", "processor", "memory", "speed", "device", "cache", "models"}
    assert all(f["level"] in ("ok", "note", "problem") and f["text"] for f in report)


def test_a_problem_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_is_there", lambda package: package != "numpy")
    assert main(["doctor", "--no-measure"]) == 1
    out = capsys.readouterr().out
    assert "problem  packages   missing: numpy\n" in out
    assert "→ pip install numpy" in out
    assert out.rstrip().endswith("1 problem")


def test_variant_that_the_processor_lacks_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "isa", host.isa.__wrapped__)
    monkeypatch.setenv("LOGITLESS_ISA", "abacus")
    (finding,) = findings("processor")
    assert finding.level == "problem"
    assert finding.text.startswith("LOGITLESS_ISA=abacus: must be one of those of this machine: ")


def test_missing_huge_pages_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/kernel/mm/transparent_hugepage/enabled": "always [never]"}
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))
    assert any(f.level == "note" and "huge pages" in f.text for f in findings("memory"))


def test_busy_processor_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.2, 9.0, 9.0))
    assert not findings("load")
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 0.0, 0.0))
    (finding,) = findings("load")
    assert "3.0 of" in finding.text
    assert finding.level == "note"


def test_cache_tells_its_folder_and_whether_it_has_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path))
    (cold,) = findings("cache")
    assert cold.level == "note"
    assert cold.text.startswith(str(tmp_path))
    assert cold.remedy == "logitless warm -m FILE"
    (tmp_path / "cpu" / "0123").mkdir(parents=True)
    (tmp_path / "cpu" / "0123" / "kernel").write_bytes(b"x")
    (warm,) = findings("cache")
    assert warm.level == "ok"
    assert not warm.remedy


def test_misspelt_variable_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITLESS_CASHE", "x")
    assert [f.text for f in findings("variables")] == ["LOGITLESS_CASHE is set, and nothing reads it"]


def test_every_variable_of_the_source_is_known() -> None:
    from logitless.cli.command_table import COMMANDS

    flags = {v for c in COMMANDS for g in c.groups for f in g.flags for v in f.env.split()}
    rooms = (*OURS, "logitless")
    sources = (p.read_text() for room in rooms for p in (REPO_ROOT / room).rglob("*.py"))
    result = {word for text in sources for word in re.findall(r"\"(LOGITLESS_[A-Z0-9_]+)\"", text)}
    assert result - flags - INTERNAL == set(doctor.VARIABLES) - flags


@pytest.mark.parametrize("columns", [60, 80])
def test_report_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long = doctor.Finding(
        "packages", "problem", "installed: " + ", ".join(["sentencepiece"] * 20), "pip install x " * 9
    )
    text = doctor.as_text([long, doctor.Finding("a", "ok", "fine")])
    assert max(map(len, text.splitlines())) <= columns
    assert " ".join(text.split()).count("sentencepiece") == 20


def test_wrong_isa_is_one_line_without_internals(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("LOGITLESS_ISA", "foo")
    host.isa.cache_clear()
    try:
        monkeypatch.setattr(doctor, "run", lambda _: host.isa())
        assert main(["doctor"]) == 1
    finally:
        host.isa.cache_clear()
    line = capsys.readouterr().err
    assert line.startswith("logitless: LOGITLESS_ISA=foo: must be one of those of this machine: ")
    assert "internal" not in line
