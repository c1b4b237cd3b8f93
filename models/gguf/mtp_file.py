"""A file with the block that guesses (models/architectures/mtp.py) and no layers, as llama.cpp's
converter makes one beside that of a model (`mtp-….gguf`). Files with layers and block do as
well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from logitless.models.errors import ModelFileError
from logitless.models.gguf.metadata import Metadata
from logitless.models.gguf.parse import Part, close_buffer, read_part

COUNTS = ("block_count", "nextn_predict_layers")


def read_block(path: Path, index: int, model: Part) -> tuple[Part, Metadata]:
    """Part `index` of a model that has no block, with the block's tensors and no others; and the
    model's metadata with what tells of the block. ModelFileError where the file is another model's,
    or has none."""
    part = read_part(path, index)
    try:
        return _checked(part, model)
    except BaseException:
        close_buffer(part.buffer)
        raise


def _checked(part: Part, model: Part) -> tuple[Part, Metadata]:
    ours, theirs = model.metadata, part.metadata
    arch = ours.get("general.architecture")
    for key in ("general.architecture", f"{arch}.embedding_length"):
        if theirs.get(key) != ours.get(key):
            raise ModelFileError(part.path, f"key '{key}' is {theirs.get(key)}, the model's is {ours.get(key)}")
    n_layer = _n_layer(theirs, arch)
    if n_layer != _n_layer(ours, arch):
        raise ModelFileError(part.path, f"has a block behind {n_layer} layers, the model has {_n_layer(ours, arch)}")
    block = f"blk.{n_layer}."
    tensors = {name: info for name, info in part.tensors.items() if name.startswith(block)}
    if f"{block}nextn.eh_proj.weight" not in tensors:
        raise ModelFileError(part.path, "has no block that predicts one token more")
    if any(name.startswith(block) for name in model.tensors):
        raise ModelFileError(part.path, f"the model has block {n_layer} itself")
    return replace(part, tensors=tensors), ours.joined(theirs, _telling(theirs, ours, arch))


def _n_layer(metadata: Metadata, arch: object) -> object:
    n_blocks, n_nextn = (metadata.get(f"{arch}.{key}", 0) for key in COUNTS)
    return n_blocks - n_nextn if isinstance(n_blocks, int) and isinstance(n_nextn, int) else None


def _telling(theirs: Metadata, ours: Metadata, arch: object) -> Iterator[str]:
    """Counts, numbers of each block, and what the model's file does not say."""
    for key in theirs:
        if key.startswith(f"{arch}."):
            counts = key.removeprefix(f"{arch}.") in COUNTS
            if counts or key not in ours or theirs.length(key) is not None:
                yield key
