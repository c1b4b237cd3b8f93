"""Atomic writes: a file is written beside its name, synced to disk, then renamed."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# seconds without a write to an unfinished file after which its process is gone, wherever it ran
ABANDONED = 3600


@contextmanager
def unfinished(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; the file there when the block ends takes the name in one
    step. A link stays one, and its file is written.

    Leftovers of killed processes are deleted first. OSError names `path`, not
    the temporary file."""
    file = Path(os.path.realpath(path))
    parts = file.parent.glob(f"{glob.escape(file.name)}.*.part")
    sweep(part for part in parts if re.fullmatch(r"\.\d{1,10}\.part", part.name.removeprefix(file.name)))
    part = part_of(path)
    try:
        try:
            yield part
            settle(part, file)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is None:  # a device's, from which the data came
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def part_of(path: str | Path) -> Path:
    """Temporary path of this process beside a file that it writes."""
    file = Path(os.path.realpath(path))
    return file.with_name(f"{file.name}.{os.getpid()}.part")


def private(path: Path) -> Path:
    """`path`, whose next content (`unfinished`) only the user may read."""
    part_of(path).touch(mode=0o600)
    return path


def open_private(path: str, flags: int) -> int:
    """An `opener` of `open` whose new files only the user may read."""
    return os.open(path, flags, 0o600)


def settle(part: Path, path: Path) -> None:
    """Sync the file `part` to disk and rename it to `path`, atomically."""
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def sweep(parts: Iterable[Path]) -> None:
    """Delete abandoned files."""
    for part in parts:
        with suppress(OSError):
            if part.stat().st_mtime < time.time() - ABANDONED:
                part.unlink()


def _sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk, so that what is renamed is there after a power failure."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
