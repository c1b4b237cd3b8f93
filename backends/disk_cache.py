"""Disk cache of all backends: kernels, pipelines, programs; a lost file is compiled again.

The cache holds machine code, so a file counts only if it belongs to this user (or root), nobody
else can write it, and its checksum covers its name and content. A cache that cannot be written
falls back to a folder of this user in the system's temporary folder, with one line in the log."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Literal

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    fcntl: ModuleType | None = None
else:
    fcntl = _fcntl

CHECK_NBYTES = 32  # of the checksum that ends a file
log = logging.getLogger("logitless.cache")


def cache_folder() -> Path:
    """`LOGITLESS_CACHE`, else the user's cache folder."""
    base = os.environ.get("LOGITLESS_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


def writable_folder() -> Path:
    """The cache folder if it can be written, else the fallback: for drivers that keep files themselves."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        other = _fallback(folder, str(error))
        if other is None:
            return folder
        other.mkdir(parents=True, exist_ok=True)
        return other


def read(path: Path) -> bytes:
    """The content that `write` stored at a path in the cache folder.

    Empty for a missing or damaged file, and for one that another user could have written."""
    content = _read(path)
    if content or not path.is_relative_to(folder := cache_folder()):
        return content
    return _read(_fallback_folder() / _inside(folder) / path.relative_to(folder))


def write(path: Path, content: bytes) -> None:
    """Store content atomically at a path in the cache folder, or in the fallback; raises nothing."""
    try:
        _write(path, content)
    except OSError as error:
        folder = cache_folder()
        fallback = _fallback(folder, str(error)) if path.is_relative_to(folder) else None
        if fallback is None:
            return
        try:
            _write(fallback / path.relative_to(folder), content)
        except OSError as also:
            _warn(f"the cache in {fallback} cannot be written either: {also.strerror}")


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock on making a file, so that of several processes one makes it.

    Gives False if another process holds it and `wait` is false. Where files cannot be locked, every
    process makes its own."""
    file = _locked(path.with_name(path.name + ".lock"), wait=wait)
    try:
        yield file is not None
    finally:
        if file:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            file.close()


def _locked(path: Path, *, wait: bool) -> IO[bytes] | Literal[False] | None:
    """The lock file, locked; None: another process has it; False: it cannot be locked."""
    if fcntl is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = path.open("wb")
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                        return file
            except BlockingIOError:
                file.close()
                return None
            except BaseException:
                file.close()
                raise
            file.close()  # its holder has removed it meanwhile
    except OSError:
        return False


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if not _is_private(os.fstat(file.fileno())):
                _warn(f"files of the cache in {path.parent} are ignored: other users can write them")
                return b""
            data = file.read()
    except OSError:
        return b""
    content, check = data[:-CHECK_NBYTES], data[-CHECK_NBYTES:]
    return content if _checksum(path, content) == check else b""


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content + _checksum(path, content))
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def _checksum(path: Path, content: bytes) -> bytes:
    """SHA-256 of a file's place and content: a file moved to another name is damaged."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}\0".encode() + content).digest()


def _is_private(status: os.stat_result) -> bool:
    """True if only this user and root can write the file."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _fallback(folder: Path, problem: str) -> Path | None:
    """The folder that stands in for a cache folder; None if another user could write it."""
    fallback = _fallback_folder()
    try:
        fallback.mkdir(mode=0o700, exist_ok=True)
        usable = stat.S_ISDIR((status := fallback.lstat()).st_mode) and _is_private(status)
    except OSError:
        usable = False
    place = f"kernels are kept in {fallback}" if usable else "every start compiles anew"
    _warn(f"the cache in {folder} cannot be written ({problem}): {place}; LOGITLESS_CACHE names another folder")
    return fallback / _inside(folder) if usable else None


def _inside(folder: Path) -> str:
    """The fallback's folder for a cache folder."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:8]


def _fallback_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    return Path(tempfile.gettempdir()) / f"logitless-{user}"


@functools.cache
def _warn(message: str) -> None:
    """Log a message once."""
    log.warning("%s", message)
