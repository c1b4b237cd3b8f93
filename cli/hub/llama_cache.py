"""llama.cpp's cache folder: LLAMA_CACHE, and where it was before it used huggingface-hub's layout."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from logitless.models.media.projector_names import is_projector_name

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_NOTES = (".json", ".etag")  # llama.cpp writes them beside a file


def named_folder() -> Path | None:
    """The folder that LLAMA_CACHE names."""
    named = os.environ.get("LLAMA_CACHE")
    return Path(named) if named else None


def _folder() -> Path:
    if (named := named_folder()) is not None:
        return named
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llama.cpp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama.cpp"


def plain_files() -> Iterator[tuple[str, Path]]:
    """(name, file or first part) of GGUF files that lie in the folder itself."""
    with suppress(OSError, RuntimeError):  # no folder, no home
        for path in sorted(_folder().glob("*.gguf")):
            part = _PART.fullmatch(path.stem)
            if not is_projector_name(path.name) and (part is None or int(part[2]) == 1) and path.is_file():
                yield (part[1] if part else path.stem), path


def remove(name: str) -> None:
    """Delete the files of one of `plain_files`."""
    for other, path in list(plain_files()):
        if other == name:
            part = _PART.fullmatch(path.stem)
            n = int(part[3]) if part else 0
            names = [f"{name}-{i + 1:05d}-of-{n:05d}.gguf" for i in range(n)] or [path.name]
            for file in (path.with_name(f"{word}{end}") for word in names for end in ("", *_NOTES)):
                file.unlink(missing_ok=True)
