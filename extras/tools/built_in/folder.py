"""Working folder of the file tools: paths below it, wherever links and `..` lead, its listing, and its files.

A path is judged after it was resolved and again by the descriptor that was opened, so a link that
is put in its place in between gains nothing."""

from __future__ import annotations

import os
import secrets
import stat
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from logitless.extras.tools.server_tool import ToolError
from logitless.frontend.workers import check

MAX_READ = 32 << 20  # bytes of a file
MAX_PATH, MAX_NAME = 4000, 240  # bytes, with room for a temporary file's name
MAX_ENTRIES = 50_000  # of a listing
LIST_SECONDS = 10.0
SKIPPED = frozenset(  # listed, never walked: they can be enormous
    (".git", ".svn", ".hg", "node_modules", "__pycache__", ".venv", "venv", "dist", "build", "target")
) | {".cache", ".idea", ".vscode"}
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Listing:
    """Entries below a folder as (path relative to it, is a folder); `cut`: there are more."""

    entries: list[tuple[str, bool]] = field(default_factory=list)
    cut: bool = False


class Folder:
    """The working folder. Every method raises ToolError."""

    def __init__(self, root: str | Path, within: str = "") -> None:
        """`within`: the folder below `root` from which relative paths begin. ToolError: there is none."""
        self.cwd = self.root = Path(root).resolve()
        if within:
            self.cwd = self.path(within)
            if not self.cwd.is_dir():
                raise ToolError(f"{within[:200]!r} is no folder")

    def path(self, name: str) -> Path:
        """The file or folder of this name, relative or absolute, with links resolved."""
        try:
            path = (self.cwd / name).resolve()
            if path.is_symlink():  # a loop of links, from Python 3.13 on
                raise ValueError
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, a loop of links
            raise ToolError(f"this is no path: {name[:200]!r}") from None
        if not path.is_relative_to(self.root):
            raise ToolError(f"{name[:200]!r} is outside the working folder")
        if len(os.fsencode(path)) > MAX_PATH or any(len(os.fsencode(part)) > MAX_NAME for part in path.parts):
            raise ToolError(f"the path is too long: {name[:200]!r}")
        return path

    def name(self, path: Path) -> str:
        """The path as the tools tell it."""
        return path.relative_to(self.root).as_posix()

    @contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """A descriptor of a plain file for reading."""
        try:
            descriptor = os.open(path, _OPEN)
        except OSError as error:
            raise self._failed("open", path, error) from None
        try:
            self._inside(descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ToolError(f"{self.name(path)!r} is no plain file")
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, path: Path, most: int = MAX_READ) -> bytes:
        """A file's bytes."""
        with self.opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > most:
                raise ToolError(f"{self.name(path)!r} has {size} bytes, more than {most}")
            try:
                with os.fdopen(os.dup(descriptor), "rb") as file:
                    return file.read(most)
            except OSError as error:
                raise self._failed("read", path, error) from None

    def text(self, path: Path) -> str:
        """A text file's text."""
        data = self.read(path)
        if b"\0" in data[:8192]:
            raise ToolError(f"{self.name(path)!r} is not a text file")
        return data.decode("utf-8", "replace")

    def write(self, path: Path, text: str) -> int:
        """Put a file in place at once; returns its bytes. Folders are made as needed."""
        if any(map(_is_gits, path.relative_to(self.root).parts)):
            raise ToolError("files of .git are git's own")
        if path == self.root or path.is_dir():
            raise ToolError(f"{self.name(path)!r} is a folder")
        data, built = text.encode("utf-8", "replace"), f".{secrets.token_hex(8)}.tmp"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(path.parent, _OPEN | os.O_DIRECTORY)
        except OSError as error:
            raise self._failed("write", path, error) from None
        try:
            self._inside(folder)
            try:
                mode = stat.S_IMODE(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode)
            except FileNotFoundError:
                mode = 0o666
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(built, flags, mode, dir_fd=folder), "wb") as file:
                file.write(data)
            os.replace(built, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            with suppress(OSError):
                os.unlink(built, dir_fd=folder)
            raise self._failed("write", path, error) from None
        finally:
            os.close(folder)
        return len(data)

    def walk(self, base: Path, *, max_depth: int = 0) -> Listing:
        """Files and folders below `base`, sorted; links are not followed. `max_depth`: 0 for any."""
        listing, deadline = Listing(), time.monotonic() + LIST_SECONDS
        if not base.is_dir():
            raise ToolError(f"{self.name(base)!r} is no folder")
        waiting = [(base, "", 1)]
        while waiting:
            check()
            folder, within, depth = waiting.pop()
            try:
                with os.scandir(folder) as entries:
                    ordered = sorted(entries, key=lambda entry: entry.name)
            except OSError:
                listing.cut = True
                continue
            below = []
            for entry in ordered:
                is_folder = entry.is_dir(follow_symlinks=False)
                if not is_folder and not entry.is_file(follow_symlinks=False):
                    continue
                if len(listing.entries) >= MAX_ENTRIES or time.monotonic() > deadline:
                    listing.cut = True
                    return listing
                listing.entries.append((within + entry.name, is_folder))
                if is_folder and entry.name not in SKIPPED and (not max_depth or depth < max_depth):
                    below.append((Path(entry.path), f"{within}{entry.name}/", depth + 1))
            waiting += reversed(below)
        return listing

    def _inside(self, descriptor: int) -> None:
        """ToolError: what was opened lies elsewhere."""
        try:
            where = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # not Linux
            try:
                import fcntl

                get_path = fcntl.F_GETPATH  # type: ignore[attr-defined,unused-ignore]
            except (ImportError, AttributeError):  # neither Linux nor macOS
                raise ToolError("this system cannot tell where a file lies") from None
            where = fcntl.fcntl(descriptor, get_path, bytes(1024)).split(b"\0")[0].decode()
        if not Path(where).is_relative_to(self.root):
            raise ToolError("it is outside the working folder")

    def _failed(self, verb: str, path: Path, error: OSError) -> ToolError:
        return ToolError(f"cannot {verb} {self.name(path)!r}: {error.strerror or error}")


def _is_gits(name: str) -> bool:
    """True for the names by which some file system finds .git: in any case, with blanks and points behind it,
    with letters that have no width, by its short name or its data stream."""
    name = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf").casefold()
    return name.partition(":")[0].rstrip(" .") in (".git", "git~1")
