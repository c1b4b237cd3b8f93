"""Identity of KV blocks on disk: all that their bits depend on, in any process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Hashable
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING

from logitless.engine.kv_disk.disk_cache import SPACE, DiskCache
from logitless.models.adapters.stacked_lora import AdapterChoice
from logitless.models.gguf.file import file_version

if TYPE_CHECKING:
    from logitless.engine.adapters import Adapters
    from logitless.engine.runner.model_runner import ModelRunner

PROGRAM = ("backends", "engine/runner", "graph", "models")  # packages whose code the bits depend on
RootName = Callable[[Hashable, str, bool], object]


def space_of(engine: ModelRunner) -> Callable[[DiskCache], bytes]:
    """A function that computes the space of the engine's blocks: a hash of model, devices and program.

    ValueError: a device does not say what it is. OSError, of the function: a file has changed."""
    devices = [(backend.name, backend.identity) for backend in engine.session.backends]
    for name, identity in devices:
        if not identity:
            raise ValueError(f"the device {name} does not say which bits it computes")
    options = engine.options
    places = repr(engine.session.hint_of), sorted(engine.rerouted), options.projector_device, options.placement.divide
    parts, files = (engine.cache_kind, devices, places), list(engine.gguf.files)
    if options.mmproj:
        files.append((Path(options.mmproj), file_version(Path(options.mmproj))))

    def compute(cache: DiskCache) -> bytes:
        contents = [_content(cache, path, version) for path, version in files]
        return sha256(repr((parts, contents, _program())).encode()).digest()[:SPACE]

    return compute


def _content(cache: DiskCache, path: Path, version: tuple[int, ...]) -> bytes:
    """SHA-256 of a file of this version, computed once."""

    def compute() -> bytes:
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").digest()
        if file_version(path) != version:
            raise OSError(f"{path} has changed since it was loaded")
        return digest

    return cache.remembered(sha256(repr(version).encode()).digest(), compute)


def _program() -> str:
    """Hash of the program's text: another build may compute other bits."""
    digest, root = sha256(), Path(__file__).parents[2]
    for package in PROGRAM:
        for folder, folders, names in os.walk(root / package):
            folders.sort()
            for name in sorted(names):
                if name.endswith((".py", ".json")):  # shaders are named in a manifest, by their hashes
                    digest.update(name.encode() + Path(folder, name).read_bytes())
    return digest.hexdigest()


def root_names(adapters: Adapters | None) -> RootName:
    """Names of roots of prefixes (PrefixCache.root_name) that mean the same weights in every process.

    Full finetunes, of which digests sample some bytes only, and weights that change have names that
    no other process has."""
    process = secrets.token_hex(16)

    def name(choice: Hashable, salt: str, transient: bool) -> object:
        assert isinstance(choice, AdapterChoice)
        if transient or choice.weights:
            return process, choice, salt
        return adapters.names(choice) if adapters is not None else (), salt

    return name
