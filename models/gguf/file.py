"""GGUF file as one memory-mapped view: metadata, tensor table, tensor bytes.

Opening reads the header only and decodes no vocabulary. A split model (`...-00001-of-00004.gguf`)
is opened by its first part and looks like one file. Files must not be truncated while they are
mapped: the system then kills the reader."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from logitless.models.errors import ModelFileError
from logitless.models.gguf.metadata import Metadata
from logitless.models.gguf.older_layouts import in_new_layout
from logitless.models.gguf.parse import FOLDER_PROJECTORS, Part, TensorInfo, close_buffer, read_part
from logitless.models.hparams.overrides import NONE, Overrides

__all__ = ["GGUFFile", "ModelFileError", "TensorInfo"]

_SPLIT_NAME = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_MAX_PARTS = 9999
_COUNTS = ("block_count", "nextn_predict_layers")


class GGUFFile:
    """An open GGUF model, or a Hugging Face folder read as one. Use `GGUFFile.open`; close it, or use it as a context
    manager."""

    def __init__(self, parts: Sequence[Part], path: Path) -> None:
        first = parts[0]
        self._parts = tuple(parts)
        self.path = path
        self.version: int = first.version
        self.alignment: int = first.alignment
        self.metadata: Metadata = first.metadata
        self.tensors: dict[str, TensorInfo] = {}  # in file order
        for part in parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise ModelFileError(part.path, f"tensor {name!r} is already in another part of this split model")
                self.tensors[name] = info
        self.tensors = in_new_layout(self.tensors, self.metadata)
        self.size: int = sum(len(part.buffer) for part in parts)  # bytes of all parts
        self.files = [(part.path, file_version(part.path)) for part in parts]

    @classmethod
    def open(cls, path: str | Path, overrides: Overrides = NONE, *, block: str = "") -> GGUFFile:
        """Map a model and read its header; `block`: the file of models/gguf/file.py, for one
        that has no block itself. Raises ModelFileError for any fault of the files, and
        for overrides that do not suit them."""
        path = Path(path)
        is_folder = path.name in FOLDER_PROJECTORS or os.path.isdir(path)
        parts = _read_folder(path) if is_folder else [read_part(path)]
        try:
            for other in _other_parts(parts[0]):
                parts.append(_read_other_part(other, len(parts), parts[0]))
            file = cls(parts, path)
            claim, n_tensors = file.metadata.get("split.tensors.count"), len(file.tensors)
            if len(parts) > 1 and claim is not None and claim != n_tensors:
                raise ModelFileError(
                    path, f"key 'split.tensors.count' is {claim} but the parts have {n_tensors} tensors"
                )
            if block:
                part, metadata = read_block(Path(block), len(parts), file._parts[0])
                parts.append(part)
                file = cls(parts, path)
                file.metadata = metadata
            if overrides:
                try:
                    file.metadata = file.metadata.replaced(overrides)
                except ValueError as error:
                    raise ModelFileError(path, str(error)) from None
            return file
        except BaseException:
            for part in parts:
                close_buffer(part.buffer)
            raise

    @property
    def n_params(self) -> int:
        """Elements of all tensors."""
        return sum(prod(info.shape) for info in self.tensors.values())

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes: a read-only view of the mapping, which stays mapped while any view of
        it lives, or a copy where the file has them in another form."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(self.path, f"has no tensor {name!r}")
        return self._bytes(info) if info.source is None else info.source.read(info, self._open_parts(info))

    def stored_bytes(self, name: str) -> NDArray[np.uint8]:
        """Bytes that tell the tensor from others: a view of a file, where `bytes_of` may have to read a lot."""
        info = self.tensors[name]
        return self._bytes(info) if info.source is None else info.source.stored(info, self._open_parts(info))

    def _bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        return np.frombuffer(self._open_parts(info)[info.part].buffer, np.uint8, info.nbytes, info.offset)

    def _open_parts(self, info: TensorInfo) -> Sequence[Part]:
        part = self._parts[info.part]
        if part.buffer.closed:
            raise ModelFileError(part.path, f"tensor {info.name!r}: the file has been closed")
        return self._parts

    def release(self) -> None:
        """Take the files' pages out of this process's memory.

        For tensors that have been repacked into memory of their own. All bytes stay readable: a
        later access reads them from the page cache or the disk again. Does nothing on a system
        without madvise."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        for part in self._parts:
            if advice is not None and not part.buffer.closed:
                part.buffer.madvise(advice)

    def check_unchanged(self) -> None:
        """ModelFileError: a file was written to since it was opened. One that was replaced stays mapped as it was."""
        for path, before in self.files:
            now = file_version(path)
            if now[:2] == before[:2] and now != before:
                raise ModelFileError(path, "has changed since it was loaded; start again")

    def close(self) -> None:
        """Unmap the files now, or, where views are still held, when the last of them goes. May be called twice."""
        for part in self._parts:
            close_buffer(part.buffer)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.size} bytes)"


def _read_folder(path: Path) -> list[Part]:
    from logitless.models.huggingface.folder import read_folder  # here: files do not need it
    from logitless.models.huggingface.projector import read_projector

    return read_projector(path) if path.name in FOLDER_PROJECTORS else read_folder(path)


def file_version(path: Path) -> tuple[int, ...]:
    """(device, inode, time of the last change, bytes); () when it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


def _other_parts(first: Part) -> list[Path]:
    """The paths of parts 2, 3 ... of the split model whose first part this is; none for a model in one file."""
    count, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
    for key, value in (("split.count", count), ("split.no", number)):
        if type(value) is not int or not 0 <= value <= _MAX_PARTS:
            raise ModelFileError(first.path, f"key {key!r} is not a number from 0 to {_MAX_PARTS}")
    if count <= 1:
        return []
    match = _SPLIT_NAME.fullmatch(first.path.name)
    if match is None:
        raise ModelFileError(
            first.path, f"is part {number + 1} of {count}, but is not named ...-{number + 1:05d}-of-{count:05d}.gguf"
        )
    paths = [first.path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if number != 0:
        raise ModelFileError(first.path, f"is part {number + 1} of {count}; open the first part, {paths[0].name}")
    return paths[1:]


def _read_other_part(path: Path, index: int, first: Part) -> Part:
    part = read_part(path, index)
    for key, expected in (("split.no", index), ("split.count", first.metadata["split.count"])):
        if part.metadata.get(key) != expected:
            close_buffer(part.buffer)
            raise ModelFileError(path, f"key {key!r} is not {expected}, so this is no part of {first.path.name}")
    return part


def read_block(path: Path, index: int, model: Part) -> tuple[Part, Metadata]:
    """The MTP head in a file of its own, as part `index` of a model without one.

    llama.cpp's converter writes such files (`mtp-….gguf`) beside the model's; a file with the
    layers and the head serves as well. Returns the head's tensors alone, and the model's metadata
    with the keys of the head. ModelFileError: the file is another model's, or has no head."""
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
    n_blocks, n_mtp = (metadata.get(f"{arch}.{key}", 0) for key in _COUNTS)
    return n_blocks - n_mtp if isinstance(n_blocks, int) and isinstance(n_mtp, int) else None


def _telling(theirs: Metadata, ours: Metadata, arch: object) -> Iterator[str]:
    """Counts, numbers of each block, and what the model's file does not say."""
    for key in theirs:
        if key.startswith(f"{arch}."):
            counts = key.removeprefix(f"{arch}.") in _COUNTS
            if counts or key not in ours or theirs.length(key) is not None:
                yield key
