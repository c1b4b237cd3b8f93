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
from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import LOG
from tests.helpers.paths import ROOT

FULL = Path("/dev/full")  # a disk without room
SAY = """
import logging, sys
from logitless.cli.log import start_log
from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import LOG
start_log(parse((*LOG,), ["--log-file", sys.argv[1], "--log-format", sys.argv[2], *sys.argv[3:]], {}))
for i in range(3):
    logging.getLogger("logitless.x").info("line %d %s", i, "x" * 5000)
"""


def said(path: Path, layout: str = "text", *flags: str, on: str = "stderr") -> list[str]:
    """The standard error of a process with this log file."""
    words = [sys.executable, "-c", SAY, str(path), layout, *flags]
    got = subprocess.run(words, capture_output=True, cwd=ROOT, text=True, timeout=60)
    assert got.returncode == 0
    return str(getattr(got, on)).splitlines()


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
    formatter = log._Text(log.LineStyle())
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for created in (1.0, 1.25, 1_800_000_000.999, 1_800_000_001.0):
        record = logging.LogRecord("a", logging.INFO, "", 0, "text", None, None)
        record.created, record.msecs = created, round(created % 1 * 1000)
        assert formatter.format(record) == plain.format(record)


def test_log_jsonl_is_json_on_the_standard_output(tmp_path: Path) -> None:
    lines = said(tmp_path / "log", "text", "--log-jsonl", "--no-log-timestamps", on="stdout")
    assert [sorted(json.loads(line)) for line in lines] == [["level", "logger", "message"]] * 3


@pytest.mark.parametrize(
    ("style", "line"),
    [
        (log.LineStyle(), "12:00 INFO logitless.x: text"),
        (log.LineStyle(time=False), "INFO logitless.x: text"),
        (log.LineStyle(prefix=False), "12:00 text"),
        (log.LineStyle(time=False, prefix=False, colors=True), "text"),
        (log.LineStyle(colors=True), "12:00 INFO logitless.x: text"),
    ],
)
def test_a_line_has_the_parts_that_the_flags_leave(style: log.LineStyle, line: str) -> None:
    assert style.line("12:00", "INFO", "logitless.x", "text") == line
    assert "\x1b[31mERROR\x1b[0m" in log.LineStyle(colors=True).line("12:00", "ERROR", "x", "text")


@pytest.mark.parametrize(("verbosity", "least"), [(0, 51), (1, 40), (2, 30), (3, 20), (4, 10), (5, 10), (9, 10)])
def test_verbosity_is_the_least_level_of_lines(verbosity: int, least: int) -> None:
    options = parse(LOG, ["-lv", str(verbosity)], {})
    assert log.LineStyle.of(options).level == least
    assert log.LineStyle.of(parse(LOG, ["-lv", str(verbosity), "-v"], {})).level == logging.DEBUG


def test_lines_of_a_child_are_told_in_the_style_of_the_router() -> None:
    line = "2026-01-02 03:04:05,006 WARNING logitless.x: text: more"
    assert log.LineStyle().relayed(line) == line
    assert log.LineStyle(time=False, prefix=False).relayed(line) == "text: more"
    assert log.LineStyle(logging.ERROR).relayed(line) is None
    assert log.LineStyle(logging.ERROR).relayed("a line of no log") == "a line of no log"
    assert log.LineStyle(logging.CRITICAL + 1).relayed("a line of no log") is None
