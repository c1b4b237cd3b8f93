"""Log file (--log-file): lines on the terminal and in the file, a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

FULL = Path("/dev/full")  # a disk without room
SAY = """
import logging, sys
from types import SimpleNamespace
from logitless.cli.log import start_log
start_log(SimpleNamespace(log_file=sys.argv[1], verbose=False, log_disable=False))
for i in range(3):
    logging.getLogger("logitless.x").info("line %d %s", i, "x" * 5000)
"""


def said(path: Path) -> list[str]:
    """The standard error of a process with this log file."""
    got = subprocess.run([sys.executable, "-c", SAY, str(path)], capture_output=True, cwd=ROOT, text=True, timeout=60)
    assert got.returncode == 0
    return got.stderr.splitlines()


def test_lines_go_to_the_terminal_and_to_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    lines = said(path)
    assert path.read_text().splitlines() == ["before", *lines]
    assert [line.split()[4:6] for line in lines] == [["line", str(i)] for i in range(3)]


@pytest.mark.skipif(not FULL.exists(), reason="no such device here")
def test_a_full_disk_is_one_line() -> None:
    lines = said(FULL)
    assert [line for line in lines if "INFO logitless.x: line" not in line] == [
        "logitless: --log-file /dev/full: No space left on device"
    ]
    assert len(lines) == 4
