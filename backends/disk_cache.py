"""The disk cache of all backends: kernels, pipelines, programs. Lost files are made again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

CHECK_NBYTES = 32  # of the checksum that ends a file


def cache_folder() -> Path:
    """`LOGITLESS_CACHE`, else the user's cache folder."""
    base = os.environ.get("LOGITLESS_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


def read(path: Path) -> bytes:
    """The content that `write` stored; empty for a missing or damaged file."""
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    content, check = data[:-CHECK_NBYTES], data[-CHECK_NBYTES:]
    return content if hashlib.sha256(content).digest() == check else b""


def write(path: Path, content: bytes) -> None:
    """Store content atomically; on a read-only or full disk nothing is stored and nothing is
    raised.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            try:
                f.write(content + hashlib.sha256(content).digest())
                f.close()
                os.replace(f.name, path)
            except OSError:
                os.unlink(f.name)
                raise
