"""File tools: reading, searching and editing below the working folder, and every way out of it refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from logitless.extras.tools.built_in import folder as folder_module
from logitless.extras.tools.built_in.folder import Folder
from logitless.extras.tools.built_in.patterns import glob
from logitless.extras.tools.server_tool import MAX_TEXT, ToolError, result_text
from logitless.extras.tools.settings import ToolSettings
from logitless.extras.tools.toolbox import Toolbox

FILES = ("read_file", "file_glob_search", "grep_search", "write_file", "edit_file")

GITS = (
    ".git",
    ".GIT",
    ".Git",
    ".git ",
    ".git.",
    ".g\u200cit",
    "\uff0egit",
    "GIT~1",
    ".git::$INDEX_ALLOCATION",
    "a/.gIt",
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder with a secret beside it."""
    (tmp_path / "secret.txt").write_text("secret")
    made = tmp_path / "work"
    (made / "src").mkdir(parents=True)
    (made / "a.txt").write_text("one\ntwo\nthree\n")
    (made / "src" / "b.py").write_text("def two(): ...\n")
    (made / ".git").mkdir()
    (made / ".git" / "config").write_text("two")
    return made


async def call(work: Path, name: str, **arguments: Any) -> dict[str, Any]:
    toolbox = Toolbox(ToolSettings(FILES, str(work)))
    tool = await toolbox.find(name)
    assert tool is not None
    return await toolbox.call(tool, arguments, "me")


async def test_reading_lines(work: Path) -> None:
    assert await call(work, "read_file", path="a.txt") == {"plain_text_response": "one\ntwo\nthree\n"}
    lines = await call(work, "read_file", path=str(work / "a.txt"), start_line=2, end_line=2, append_loc=True)
    assert result_text(lines) == "2→two\n"
    (work / "long").write_text("x\n" * MAX_TEXT)
    assert "start_line" in (await call(work, "read_file", path="long"))["error"]
    part = result_text(await call(work, "read_file", path="long", start_line=1, end_line=10**6))
    assert part.endswith("[output truncated]")
    assert len(part) < MAX_TEXT + 40
    (work / "binary").write_bytes(b"\0\1")
    assert "not a text file" in (await call(work, "read_file", path="binary"))["error"]


async def test_searching(work: Path) -> None:
    result = await call(work, "file_glob_search", include="*.py")
    assert result["entries"] == [{"path": "src/b.py", "type": "file"}]
    everything = await call(work, "file_glob_search", type="all")
    assert [entry["path"] for entry in everything["entries"]] == [".git", "a.txt", "src", "src/b.py"]
    shallow = await call(work, "file_glob_search", max_depth=1, exclude="*.md")
    assert [entry["path"] for entry in shallow["entries"]] == ["a.txt"]
    lines = result_text(await call(work, "grep_search", pattern="t.o", return_line_numbers=True))
    assert lines == "a.txt:2:two\nsrc/b.py:1:def two(): ...\n\n---\nTotal matches: 2\n"
    around = result_text(
        await call(work, "grep_search", path="a.txt", pattern="TWO", ignore_case=True, context_lines=1)
    )
    assert around.startswith("a.txt-1-one\na.txt:2:two\na.txt-3-three\n--\n")
    literal = result_text(await call(work, "grep_search", pattern="two():", literal=True))
    assert literal.startswith("src/b.py:def two()")
    (work / "many").write_text("two\n" * 1000)
    assert "100 or more" in result_text(await call(work, "grep_search", path="many", pattern="two"))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.py", ["b.py", "a/b.py"], ["b.pyc"]),
        ("src/*.py", ["src/b.py", "x/src/b.py"], ["src/x/b.py"]),
        ("/src/**/*.py", ["src/b.py", "src/x/y/b.py"], ["x/src/b.py"]),
        ("**/x[!0-9]?", ["xab", "q/xab"], ["x1b"]),
        ("a.b*(", ["a.b(", "a.bc("], ["axb("]),
    ],
)
def test_globs(pattern: str, yes: list[str], no: list[str]) -> None:
    made = glob(pattern)
    assert [bool(made.fullmatch(name)) for name in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


async def test_writing_and_editing(work: Path) -> None:
    made = await call(work, "write_file", path="new/folder/c.txt", content="a b c é")
    assert made == {"result": "file written successfully", "path": "new/folder/c.txt", "bytes": 8}
    os.chmod(work / "new/folder/c.txt", 0o750)
    edits = [{"old_text": "c", "new_text": "a"}, {"old_text": "a", "new_text": "c"}]
    assert (await call(work, "edit_file", path="new/folder/c.txt", edits=edits))["edits_applied"] == 2
    assert (work / "new/folder/c.txt").read_text() == "c b a é"
    assert (work / "new/folder/c.txt").stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(work / "new/folder")) == ["c.txt"]
    for wrong, reason in (
        ([{"old_text": "x", "new_text": ""}], "edits[0].old_text must occur exactly once"),
        ([{"old_text": "", "new_text": ""}], "edits[0].old_text must occur exactly once"),
        ([{"old_text": "c b", "new_text": ""}, {"old_text": "b a", "new_text": ""}], "overlap"),
        ([{"old_text": "b", "new_text": "b"}], "change nothing"),
        ([], "non-empty"),
        ([{"old_text": 1, "new_text": ""}], "edits[0].old_text"),
    ):
        assert reason in (await call(work, "edit_file", path="new/folder/c.txt", edits=wrong))["error"]


ESCAPES = ("../secret.txt", "/etc/passwd", "src/../../secret.txt", "link", "far/secret.txt", "src/up/secret.txt")
NO_PATHS = ("a\0b", "x" * 5000, "loop", "")


@pytest.mark.parametrize("path", [*ESCAPES, *NO_PATHS])
async def test_no_way_out_of_the_folder(work: Path, path: str) -> None:
    (work / "link").symlink_to(work.parent / "secret.txt")
    (work / "far").symlink_to(work.parent)
    (work / "src" / "up").symlink_to("../..")
    (work / "loop").symlink_to("loop")
    for name, more in (
        ("read_file", {}),
        ("write_file", {"content": "x"}),
        ("edit_file", {"edits": [{"old_text": "secret", "new_text": "x"}]}),
        ("grep_search", {"pattern": "secret"}),
    ):
        answer = await call(work, name, path=path, **more)
        assert "secret" not in answer.get("plain_text_response", "")
        assert "error" in answer or (path == "" and name == "grep_search"), name
    assert (work.parent / "secret.txt").read_text() == "secret"
    assert sorted(os.listdir(work.parent)) == ["secret.txt", "work"]
    listed = result_text(await call(work, "file_glob_search", type="all"))
    assert "secret" not in listed  # links are not followed
    assert "secret" not in result_text(await call(work, "grep_search", pattern="secret|."))


async def test_files_that_are_none(work: Path) -> None:
    os.mkfifo(work / "pipe")
    assert "no plain file" in (await call(work, "read_file", path="pipe"))["error"]
    gits = [("write_file", f"{name}/config") for name in GITS]
    for name, path in (("read_file", "src"), ("write_file", "src"), ("write_file", "."), *gits):
        more = {"content": "x"} if name == "write_file" else {}
        assert "error" in await call(work, name, path=path, **more)
    assert (work / ".git/config").read_text() == "two"
    assert "no folder" in (await call(work, "file_glob_search", path="a.txt"))["error"]


def test_a_link_that_is_put_in_place_after_the_look(work: Path) -> None:
    """The descriptor is judged, too: of a file whose folder has become a link out of the working folder."""
    kept = Folder(work)
    (work.parent / "b.py").write_text("secret")
    path = kept.path("src/b.py")
    os.rename(work / "src", work / "old")
    (work / "src").symlink_to(work.parent)
    with pytest.raises(ToolError, match="outside"):
        kept.read(path)
    with pytest.raises(ToolError, match="cannot write"):  # its folder is a link
        kept.write(path, "x")
    assert (work.parent / "b.py").read_text() == "secret"


async def test_arguments_are_checked(work: Path) -> None:
    for arguments, reason in (
        ({}, "'path': is required"),
        ({"path": 1}, "'path': expected a string"),
        ({"path": "a.txt", "start_line": 0}, "'start_line'"),
        ({"path": "a.txt", "runtime": "x"}, "'runtime': is not known"),
    ):
        assert reason in (await call(work, "read_file", **arguments))["error"]
    assert "no pattern" in (await call(work, "grep_search", pattern="("))["error"]
    evil = "(a+)+$"  # RE2 takes linear time
    (work / "evil").write_text("a" * 50_000 + "b")
    assert "Total matches: 0" in result_text(await call(work, "grep_search", pattern=evil, path="evil"))


async def test_listings_are_bounded(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MAX_ENTRIES", 3)
    assert "not all folders" in result_text(await call(work, "file_glob_search", type="all"))
    monkeypatch.setattr(folder_module, "MAX_READ", 3)
    with pytest.raises(ToolError, match="more than 3"):
        Folder(work).read(work / "a.txt", 3)
    assert threading.active_count() < 50
