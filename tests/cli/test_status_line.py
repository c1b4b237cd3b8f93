"""Status lines: the text on the terminal after a line was replaced."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from logitless.cli import progress
from logitless.cli.hub import download
from logitless.cli.hub.download import _Progress, duration
from logitless.cli.progress import ProgressBar, StatusLine

WIDTH = 40


class Terminal(io.StringIO):
    """stderr as a terminal."""

    columns = WIDTH

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """The lines that are seen, without spaces at their ends."""
        lines = [""]
        for part in self.getvalue().replace("\n", "\n\0").split("\0"):
            for piece in part.removesuffix("\n").split("\r"):
                lines[-1] = piece + lines[-1][len(piece) :]
                assert len(piece) < self.columns or part.endswith("\n"), "it wraps, so that it cannot be replaced"
            if part.endswith("\n"):
                lines.append("")
        return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    fake = Terminal()
    for module in (progress, download):  # pytest puts its own stderr into sys when the test begins
        monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=fake))
    monkeypatch.setattr(progress, "columns", lambda: fake.columns)
    return fake


def test_nothing_is_left_of_a_longer_line(terminal: Terminal) -> None:
    line = StatusLine()
    line.show("a long line")
    line.show("short")
    assert terminal.screen == ["short"]
    line.show("x" * 50, ": 5 MB")
    assert terminal.screen == ["x" * 32 + "…: 5 MB"]
    line.end("done")
    line.show("next")
    line.end()
    line.end()
    assert terminal.screen == ["done", "next", ""]


def test_a_line_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=closed))
    StatusLine().show("text")
    StatusLine().end("text")


def test_a_batch_that_slows_down_leaves_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.5, 100.0])
    monkeypatch.setattr("logitless.cli.progress.time.monotonic", lambda: next(times))
    monkeypatch.setattr("logitless.cli.progress.WIDTH", 3)
    with ProgressBar("texts", 2, shown=True) as progress:
        progress.advance()
        assert terminal.screen == ["texts █·· 1/2 (2.0/s)"]
        progress.advance()
    assert terminal.screen == ["texts ███ 2/2 (0.0/s)", ""]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def downloading(
    name: str, steps: list[tuple[float, int]], size: int | None, terminal: Terminal | None
) -> tuple[list[str], Callable[[], None]]:
    """(the last line after each step, end): (seconds, bytes) of each."""
    clock = Clock()
    progress = _Progress(name, clock)
    seen = []
    for clock.now, have in steps:
        progress.show(have, size)
        seen.append(terminal.screen[-1] if terminal is not None else "")
    return seen, progress.end


def test_a_download_tells_speed_and_remaining_time(terminal: Terminal) -> None:
    terminal.columns = 90
    mb = 1_000_000
    steps = [(0.0, 100 * mb), (1.0, 150 * mb), (1.1, 155 * mb), (11.0, 200 * mb), (13.0, 220 * mb), (14.0, 5 * mb)]
    seen, end = downloading("u/r/m.gguf", steps, 1000 * mb, terminal)
    assert seen == [
        "downloading u/r/m.gguf: 100 MB of 1000 MB",
        "downloading u/r/m.gguf: 150 MB of 1000 MB, 50 MB/s, 17 s left",
        "downloading u/r/m.gguf: 150 MB of 1000 MB, 50 MB/s, 17 s left",  # not drawn again so soon
        "downloading u/r/m.gguf: 200 MB of 1000 MB",  # after a pause
        "downloading u/r/m.gguf: 220 MB of 1000 MB, 10 MB/s, 1 min 18 s left",
        "downloading u/r/m.gguf: 5.0 MB of 1000 MB",  # the server's file has changed
    ]
    end()
    assert terminal.screen == ["downloaded u/r/m.gguf: 5.0 MB in 14 s at 8.6 MB/s", ""]


def test_a_download_of_a_long_name_and_an_unknown_size(terminal: Terminal) -> None:
    seen, _ = downloading("user/repository/" + "m" * 40, [(0.0, 0), (2.0, 40_000_000)], None, terminal)
    assert seen[-1] == "downloading user/repos…: 40 MB, 20 MB/s"
    assert len(seen[-1]) < WIDTH


def test_a_download_in_a_file_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _, end = downloading("m.gguf", [(0.0, 0), (1.0, 5), (2.0, 10)], 10, None)
    end()
    told = capsys.readouterr().err
    assert told == "downloading m.gguf of 10 bytes\ndownloaded m.gguf: 10 bytes in 2 s at 5 bytes/s\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (3599.9, "1 h 0 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
