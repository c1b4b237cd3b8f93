"""Hub cache folder in huggingface-hub's layout: blobs, snapshots of links, refs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

HubCache = Callable[..., Path]  # (USER/REPO, file name, content=…) → the file's path


def add_to_hub_cache(cache: Path, repo: str, name: str, content: bytes | None = None) -> Path:
    """Put a file into the cache; its content is its name unless given."""
    content = name.encode() if content is None else content
    folder = cache / f"models--{repo.replace('/', '--')}"
    commit = hashlib.sha1(repo.encode()).hexdigest()
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    path = folder / "snapshots" / commit / name
    for file in (blob, path, folder / "refs" / "main"):
        file.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    path.symlink_to(blob)
    (folder / "refs" / "main").write_text(commit)
    return path
