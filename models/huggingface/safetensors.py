"""Safetensors files: a mapped reader whose header is checked, and a writer.

Not the safetensors package: without torch it has no bfloat16 and no 8-bit floats, and copies each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from logitless.models.atomic_write import unfinished
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.metadata import Metadata
from logitless.models.gguf.parse import Part, close_buffer, map_file

_MOST_HEADER = 100_000_000  # bytes, the format's own limit
_NBYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_ALIGNMENT = 32  # of a writer's tensors, as in GGUF


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its type by safetensors' name, and its place."""

    dtype: str
    shape: tuple[int, ...]
    part: int  # number of its file
    offset: int
    nbytes: int

    def raw(self, parts: Sequence[Part]) -> npt.NDArray[np.uint8]:
        """Its bytes: a view of the mapping."""
        return np.frombuffer(parts[self.part].buffer, np.uint8, self.nbytes, self.offset)


def read_safetensors(path: Path, index: int = 0) -> tuple[Part, dict[str, Stored]]:
    """Map a file and read its header. ModelFileError: it is damaged, or no such file."""
    buffer = map_file(path)
    try:
        tensors = _header(path, bytes(buffer[:8]), buffer, index)
    except BaseException:
        close_buffer(buffer)
        raise
    return Part(path, buffer, 3, _ALIGNMENT, Metadata(path, buffer, {}, {}), {}), tensors


def _header(path: Path, begin: bytes, buffer: Any, index: int) -> dict[str, Stored]:
    size, n = len(buffer), int.from_bytes(begin, "little")
    if begin == b"version ":
        raise ModelFileError(path, "is a Git LFS pointer, not the weights: download the file itself")
    if size < 8 or n > min(size - 8, _MOST_HEADER):
        raise ModelFileError(path, f"is no safetensors file, or cut off: its header claims {n} of {size} bytes")
    try:
        entries = msgspec.json.decode(buffer[8 : 8 + n], type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ModelFileError(path, "its safetensors header is no JSON object: download the file again") from None
    tensors: dict[str, Stored] = {}
    for name, raw in entries.items():
        where = f"tensor {shown(name)}"
        try:
            entry = msgspec.json.decode(raw, type=_Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise ModelFileError(path, f"{where} has no dtype, shape and data_offsets in the header") from None
        if entry.dtype not in _NBYTES:
            raise ModelFileError(path, f"{where} has the unknown type {shown(entry.dtype)}")
        (start, stop), shape = entry.data_offsets, tuple(entry.shape)
        if min(shape, default=1) < 0 or prod(shape) >= 1 << 60:
            raise ModelFileError(path, f"{where} has the impossible shape {shown(str(shape))}")
        nbytes = prod(shape) * _NBYTES[entry.dtype]
        if not 0 <= start <= stop or stop - start != nbytes:
            problem = f"has {nbytes} bytes by its shape and {stop - start} by its offsets"
            raise ModelFileError(path, f"{where} {problem}")
        if 8 + n + stop > size:
            raise ModelFileError(path, f"{where} needs bytes up to {8 + n + stop}, the file has {size}: it is cut off")
        tensors[name] = Stored(entry.dtype, shape, index, 8 + n + start, nbytes)
    end, before = 0, ""
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].offset):
        if stored.offset < end and stored.nbytes:
            raise ModelFileError(path, f"tensors {shown(before)} and {shown(name)} overlap at byte {stored.offset}")
        end, before = stored.offset + stored.nbytes, name
    return tensors


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], Iterable[npt.NDArray[Any]]]]
) -> None:
    """Write a file of (type, shape, arrays whose bytes are the tensor's, one after the other) by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, _) in sorted(tensors.items()):
        end = at + prod(shape) * _NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with unfinished(path) as part, part.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, (_, _, pieces) in sorted(tensors.items()):
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
