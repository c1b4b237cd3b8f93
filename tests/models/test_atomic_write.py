"""Atomic writes: a file is complete or absent."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from logitless.models.atomic_write import ABANDONED, unfinished
from logitless.models.synthetic.model import synthesize
from logitless.training.reporting.plot import plot
from tests.helpers.paths import ROOT

WRITE = """
import sys
from logitless.models.atomic_write import unfinished
with unfinished(sys.argv[1]) as part:
    part.write_text("theirs")
    print("begun", flush=True)
    input()
"""


@contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of writing this file."""
    command = [sys.executable, "-c", WRITE, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def test_parts_of_killed_processes_go_and_those_of_others_stay(tmp_path: Path) -> None:
    path, download = tmp_path / "m[1].gguf", tmp_path / "m[1].gguf.0123456789ab.part"
    download.write_text("a download")
    os.utime(download, (0, 0))
    with writer(path) as killed:
        pass
    left = tmp_path / f"{path.name}.{killed.pid}.part"
    assert left.read_text() == "theirs"
    long_ago = time.time() - ABANDONED - 60
    os.utime(left, (long_ago, long_ago))
    with writer(path) as running:
        assert not left.exists()
        with unfinished(path) as part:
            part.write_text("ours")
        theirs = tmp_path / f"{path.name}.{running.pid}.part"
        assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
            path.name: "ours",
            theirs.name: "theirs",
            download.name: "a download",
        }
        running.communicate("\n", timeout=60)
        assert running.returncode == 0
    assert path.read_text() == "theirs"
    assert set(tmp_path.iterdir()) == {path, download}


def test_write_to_link_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, file = tmp_path / "loss.svg", tmp_path / "far" / "loss.svg"
    link.symlink_to(file)
    plot(link, {"training": [(0, 1.0), (1, 0.5)]})
    assert link.is_symlink()
    assert [p.name for p in file.parent.iterdir()] == ["loss.svg"]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("m.gguf", lambda path: synthesize(path, "tiny")),
        ("loss.svg", lambda path: plot(path, {"training": [(0, 1.0), (1, 0.5)]})),
    ],
)
def test_a_disk_without_room_names_the_file_and_keeps_the_old_one(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large") as refused:
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert path.read_text() == "before"
