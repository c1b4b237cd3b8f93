"""File tools of llama-server's set: read, search, write and edit files below the working folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from msgspec import Struct

from logitless.engine.sampling.params import INT_MAX, Param
from logitless.extras.tools.built_in.declared import tool
from logitless.extras.tools.built_in.folder import Folder
from logitless.extras.tools.built_in.patterns import compiled, escaped, glob
from logitless.extras.tools.server_tool import CUT, MAX_TEXT, Answer, ServerTool, ToolError, cut, plain
from logitless.frontend.workers import check

MAX_MATCHES = 100
MAX_LINE = 400  # characters of a line that a search tells
MAX_EDITS = 64
_COUNT = {"low": 1, "high": INT_MAX, "hard": True}
_INCLUDE = "glob pattern of the files, as *.py or src/**/*.py"
_EXCLUDE = "glob pattern of files that are left out"


class ReadFile(Struct, frozen=True, kw_only=True):
    """Read a text file, or a range of its lines, which are counted from 1."""

    path: Annotated[str, Param("path of the file")]
    start_line: Annotated[int, Param("first line to read", **_COUNT)] = 1
    end_line: Annotated[int, Param("last line to read; -1: to the end", -1, INT_MAX, hard=True)] = -1
    append_loc: Annotated[bool, Param("begin each line with its number")] = False


class FileGlobSearch(Struct, frozen=True, kw_only=True):
    """Find files by a glob pattern. A pattern without / is about a file's name, one with / about its path.
    Folders like .git, node_modules and build are not searched."""

    path: Annotated[str, Param("the folder to search")] = "."
    include: Annotated[str, Param(_INCLUDE)] = "**"
    exclude: Annotated[str, Param(_EXCLUDE)] = ""
    type: Annotated[str, Param("what to find", choices=("file", "dir", "all"))] = "file"
    max_depth: Annotated[int, Param("levels of folders; 1: this one alone; 0: all", 0, INT_MAX, hard=True)] = 0
    limit: Annotated[int, Param("most results", 1, MAX_MATCHES)] = MAX_MATCHES


class GrepSearch(Struct, frozen=True, kw_only=True):
    """Find lines of files by a regular expression. Folders like .git, node_modules and build are not searched."""

    path: Annotated[str, Param("the file or folder to search")] = "."
    pattern: Annotated[str, Param("a regular expression (RE2), or a text with literal")]
    include: Annotated[str, Param(_INCLUDE)] = "**"
    exclude: Annotated[str, Param(_EXCLUDE)] = ""
    return_line_numbers: Annotated[bool, Param("tell the lines' numbers")] = False
    literal: Annotated[bool, Param("the pattern is a text")] = False
    ignore_case: Annotated[bool, Param("capital letters do not matter")] = False
    context_lines: Annotated[int, Param("lines to tell before and after each", 0, 20)] = 0


class WriteFile(Struct, frozen=True, kw_only=True):
    """Write a whole text file, which need not exist, and neither do its folders."""

    path: Annotated[str, Param("path of the file")]
    content: Annotated[str, Param("all of its text")]


class Edit(Struct, frozen=True, kw_only=True):
    """One replacement."""

    old_text: str
    new_text: str


class EditFile(Struct, frozen=True, kw_only=True):
    """Replace texts in a file. Each old_text occurs exactly once in the file as it is, and none overlaps another."""

    path: Annotated[str, Param("path of the file")]
    edits: Annotated[Sequence[Edit], Param("the replacements: {old_text, new_text}", least=1, most=MAX_EDITS)]


def file_tools(folder: Folder) -> tuple[ServerTool, ...]:
    """The file tools of a working folder."""
    return (
        tool("read_file", "Read file", ReadFile, partial(_read, folder)),
        tool("file_glob_search", "File search", FileGlobSearch, partial(_find, folder)),
        tool("grep_search", "Grep search", GrepSearch, partial(_grep, folder)),
        tool("write_file", "Write file", WriteFile, partial(_write, folder), writes=True),
        tool("edit_file", "Edit file", EditFile, partial(_edit, folder), writes=True),
    )


def _read(folder: Folder, body: ReadFile) -> Answer:
    text = folder.text(folder.path(body.path))
    if len(text) > MAX_TEXT and body.end_line == -1:
        raise ToolError(
            f"the file has {len(text)} characters, more than {MAX_TEXT}: read a part with start_line and end_line"
        )
    lines = text.splitlines()[body.start_line - 1 : None if body.end_line == -1 else body.end_line]
    texts: list[str] = []
    room = MAX_TEXT
    for number, line in enumerate(lines, body.start_line):
        line = f"{number}→{line}\n" if body.append_loc else f"{line}\n"
        room -= len(line)
        if room < 0:
            return plain("".join(texts) + line[:room] + CUT)
        texts.append(line)
    return plain("".join(texts))


def _matching(folder: Folder, path: str, include: str, exclude: str, **how: Any) -> tuple[list[tuple[str, bool]], bool]:
    """(the entries below a folder that the patterns take, whether there may be more)."""
    taken, rest = glob(include), glob(exclude) if exclude else None
    listing = folder.walk(folder.path(path), **how)
    entries = [
        entry
        for entry in listing.entries
        if taken.fullmatch(entry[0]) and (rest is None or not rest.fullmatch(entry[0]))
    ]
    return entries, listing.cut


def _find(folder: Folder, body: FileGlobSearch) -> Answer:
    entries, more = _matching(folder, body.path, body.include, body.exclude, max_depth=body.max_depth)
    entries = [entry for entry in entries if body.type == "all" or entry[1] == (body.type == "dir")]
    page = entries[: body.limit]
    text = "".join([f"{name}{'/' if is_folder else ''}\n" for name, is_folder in page])
    text += f"\n---\nTotal matches: {len(entries)}\n"
    if len(page) < len(entries):
        text += f"[{len(page)} of them are shown: narrow the pattern]\n"
    if more:
        text += "[not all folders were searched]\n"
    kinds = [{"path": name, "type": "dir" if is_folder else "file"} for name, is_folder in page]
    return {**plain(cut(text)), "entries": kinds, "base": str(folder.path(body.path))}


def _grep(folder: Folder, body: GrepSearch) -> Answer:
    source = escaped(body.pattern) if body.literal else body.pattern
    pattern = compiled(f"(?i){source}" if body.ignore_case else source)
    base = folder.path(body.path)
    more = False
    if base.is_dir():
        entries, more = _matching(folder, body.path, body.include, body.exclude)
        names = [name for name, is_folder in entries if not is_folder]
    else:
        names = [""]
    texts: list[str] = []
    n = room = 0
    for name in names:
        check()
        try:
            lines = folder.text(base / name if name else base).splitlines()
        except ToolError:
            if not name:
                raise
            continue  # no text, or gone
        for i, line in enumerate(lines):
            if not pattern.search(line):
                continue
            if n == MAX_MATCHES or room > MAX_TEXT:
                texts.append("[the limit is reached: narrow the path or the pattern]\n")
                return plain(cut(f"{''.join(texts)}\n---\nTotal matches: {n} or more\n"))
            n += 1
            result = "".join(_around(body, name or folder.name(base), lines, i))
            room += len(result)
            texts.append(result)
    end = "[not all folders were searched]\n" if more else ""
    return plain(cut(f"{''.join(texts)}\n---\nTotal matches: {n}\n{end}"))


def _around(body: GrepSearch, name: str, lines: list[str], i: int) -> Iterator[str]:
    """A match with its context, as grep tells it."""
    n = body.context_lines
    for j in range(max(0, i - n), min(len(lines), i + n + 1)):
        mark = ":" if j == i else "-"
        number = f"{j + 1}{mark}" if body.return_line_numbers or n else ""
        yield f"{name}{mark}{number}{lines[j][:MAX_LINE]}\n"
    if n:
        yield "--\n"


def _write(folder: Folder, body: WriteFile) -> Answer:
    path = folder.path(body.path)
    n = folder.write(path, body.content)
    return {"result": "file written successfully", "path": folder.name(path), "bytes": n}


def _edit(folder: Folder, body: EditFile) -> Answer:
    path = folder.path(body.path)
    data = folder.read(path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{folder.name(path)!r} is not a text file in UTF-8") from None
    places = []
    for i, edit in enumerate(body.edits):
        n = text.count(edit.old_text) if edit.old_text else 0
        if n != 1:
            raise ToolError(
                f"edits[{i}].old_text must occur exactly once in {folder.name(path)!r}, it occurs {n} times"
            )
        at = text.index(edit.old_text)
        places.append((at, at + len(edit.old_text), edit.new_text, i))
    places.sort()
    for (_, end, _, i), (begin, _, _, j) in pairwise(places):
        if begin < end:
            raise ToolError(f"edits[{i}] and edits[{j}] overlap")
    edited, last = [], 0
    for begin, end, new, _ in places:
        edited += [text[last:begin], new]
        last = end
    result = "".join(edited) + text[last:]
    if result == text:
        raise ToolError("the edits change nothing")
    folder.write(path, result)
    return {"result": "file edited successfully", "path": folder.name(path), "edits_applied": len(places)}
