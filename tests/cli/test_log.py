"""Log file (--log-file): lines on the terminal and in the file, a full disk."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from logitless.cli import log
from tests.helpers.paths import ROOT

FULL = Path("/dev/full")  # a disk without room
SAY = """
import logging, sys
from types import SimpleNamespace
from logitless.cli.log import start_log
start_log(SimpleNamespace(log_file=sys.argv[1], verbose=False, log_disable=False, log_format=sys.argv[2]))
for i in range(3):
    logging.getLogger("logitless.x").info("line %d %s", i, "x" * 5000)
"""


def said(path: Path, layout: str = "text") -> list[str]:
    """The standard error of a process with this log file."""
    words = [sys.executable, "-c", SAY, str(path), layout]
    got = subprocess.run(words, capture_output=True, cwd=ROOT, text=True, timeout=60)
    assert got.returncode == 0
    return got.stderr.splitlines()


def test_lines_go_to_the_terminal_and_to_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    lines = said(path)
    assert path.read_text().splitlines() == ["before", *lines]
    assert [line.split()[4:6] for line in lines] == [["line", str(i)] for i in range(3)]


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = said(path, "json")
    assert path.read_text().splitlines() == lines
    told = [json.loads(line) for line in lines]
    assert [list(line) for line in told] == [["time", "level", "logger", "message"]] * 3
    assert {(line["level"], line["logger"]) for line in told} == {("info", "logitless.x")}
    assert [line["message"][:7] for line in told] == [f"line {i} " for i in range(3)]
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in told)


@pytest.mark.skipif(not FULL.exists(), reason="no such device here")
def test_a_full_disk_is_one_line() -> None:
    lines = said(FULL)
    assert [line for line in lines if "INFO logitless.x: line" not in line] == [
        "logitless: --log-file /dev/full: No space left on device"
    ]
    assert len(lines) == 4


def test_a_line_begins_with_its_time() -> None:
    formatter = log._Text("%(asctime)s %(levelname)s %(name)s: %(message)s")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for created in (1.0, 1.25, 1_800_000_000.999, 1_800_000_001.0):
        record = logging.LogRecord("a", logging.INFO, "", 0, "text", None, None)
        record.created, record.msecs = created, round(created % 1 * 1000)
        assert formatter.format(record) == plain.format(record)
