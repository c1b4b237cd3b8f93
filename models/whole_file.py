"""Files that are there whole or not at all: written beside their name, brought to the disk, then renamed."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None  # type: ignore[assignment]


@contextmanager
def unfinished(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; what lies there when the block ends takes the name in one step.

    What processes that were killed have left of this file goes first. OSError names `path`: nobody knows the other.
    """
    path = Path(path)
    _sweep(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with _held(part):
            try:
                yield part
                settle(part, path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is None:  # a device's, from which the data came
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def settle(part: Path, path: Path) -> None:
    """Bring what lies under `part` to the disk and give it the name `path` in one step."""
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def _sweep(path: Path) -> None:
    """Take away the parts of this file that nobody holds."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        if re.fullmatch(r"\.\d{1,10}\.part", part.name.removeprefix(path.name)):  # a download's has 12 hex digits
            with suppress(OSError), _held(part) as alone:
                if alone:
                    part.unlink()


@contextmanager
def _held(part: Path) -> Iterator[bool]:
    """Lock a file, which ends with the process however that ends, also in another container; whether it is certain
    that nobody else has it. BlockingIOError: somebody else does."""
    if fcntl is None:
        yield True
        return
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            alone = False
        yield alone


def _sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk, so that what is renamed is there after a power failure."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
