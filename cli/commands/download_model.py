"""`logitless download`: download a model into the cache as `serve` would, and print its path."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.hub import model_source

_PAUSE = 0.1  # seconds between two lines about one file


def run(options: SimpleNamespace) -> int:
    """With --json a line about each file now and then, {"file", "done", "total"} in bytes, and {"path"} at the end."""
    if options.hf_repo is None and options.model_url is None and options.docker_repo is None:
        raise UsageError("give -hf USER/REPO:QUANT, -mu URL or -dr MODEL")
    path = model_source.find(options, Lines if options.json else None)
    assert path is not None
    if not path.is_dir() and not _is_gguf(path):
        if options.model_url and not options.model:
            model_source.remove(model_source.plain_url(options.model_url))
        source = (
            model_source.plain_url(options.model_url) if options.model_url else options.hf_repo or options.docker_repo
        )
        raise CliError(f"{source}: is not a GGUF file")
    if options.mmproj_url is not None or (options.hf_repo is not None and options.mmproj_auto):
        model_source.find_projector(options, path, Lines if options.json else None)
    _say(path=str(path)) if options.json else print(path)
    return 0


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


class Lines:
    """Progress of a file's download, for programs."""

    def __init__(self, name: str) -> None:
        self._name, self._printed = name, 0.0
        self._have = 0
        self._size: int | None = None

    def show(self, have: int, size: int | None) -> None:
        self._have, self._size = have, size
        if time.monotonic() - self._printed > _PAUSE:
            self._printed = time.monotonic()
            self._tell()

    def end(self) -> None:
        self._size = self._have
        self._tell()

    def _tell(self) -> None:
        _say(file=self._name, done=self._have, total=self._size or 0)
