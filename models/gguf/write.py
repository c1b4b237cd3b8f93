"""Writing GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.atomic_write import unfinished
from logitless.models.gguf.metadata import Metadata
from logitless.models.gguf.types import TENSOR_TYPES, ValueType

TYPE_NUMBERS = {kind.name.lower(): number for number, kind in TENSOR_TYPES.items()}


@dataclass(frozen=True)
class Key:
    """A metadata value and how it is stored; `item`: the type of an array's items."""

    value: Any
    type: ValueType
    item: ValueType | None = None


def u32(value: int) -> Key:
    return Key(int(value), ValueType.UINT32)


def u64(value: int) -> Key:
    return Key(int(value), ValueType.UINT64)


def f32(value: float) -> Key:
    return Key(float(value), ValueType.FLOAT32)


def text(value: str) -> Key:
    return Key(value, ValueType.STRING)


def flag(value: bool) -> Key:
    return Key(bool(value), ValueType.BOOL)


def texts(values: Sequence[str | bytes]) -> Key:
    return Key(values, ValueType.ARRAY, ValueType.STRING)


def numbers(values: Sequence[float]) -> Key:
    """An array of f32."""
    return Key(values, ValueType.ARRAY, ValueType.FLOAT32)


Numbers = npt.NDArray[Any]
Progress = Callable[[int, int], None]  # called with the bytes of tensors written so far, and in all


@dataclass(frozen=True)
class Data:
    """A tensor's bytes: `raw` (..., bytes of a row) uint8 for block types, or the numbers
    themselves (f32).

    Replaces an array by a source of its rows, read in pieces while they are written; the whole is
    never in memory."""

    array: Numbers | Callable[[], Iterable[Numbers]]
    shape: tuple[int, ...]  # numpy order
    dtype: str = "f32"

    @property
    def nbytes(self) -> int:
        kind = TENSOR_TYPES[TYPE_NUMBERS[self.dtype]]
        return prod(self.shape) // kind.block * kind.nbytes

    def pieces(self) -> Iterator[Numbers]:
        """Arrays whose bytes, one after the other, are the tensor's."""
        for piece in self.array() if callable(self.array) else (self.array,):
            yield np.ascontiguousarray(piece, np.float32 if self.dtype == "f32" else None)


def tensor(array: npt.NDArray[Any]) -> Data:
    """Numbers to be stored as f32."""
    values = np.ascontiguousarray(array, np.float32)
    return Data(values, values.shape)


def write_gguf(
    path: str | Path,
    arch: str,
    keys: Mapping[str, Key],
    tensors: Iterable[tuple[str, Data]],
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file; equal arguments give equal bytes. OSError when the disk is full: then
    the file under `path` is unchanged."""
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType, GGUFValueType

    with unfinished(path) as part:
        writer = GGUFWriter(part, arch)
        try:
            for name, key in keys.items():
                # the writer has no empty arrays, which say as much as none
                if name == "general.architecture" or (key.item is not None and not len(key.value)):
                    continue
                item = None if key.item is None else GGUFValueType(int(key.item))
                writer.add_key_value(name, key.value, GGUFValueType(int(key.type)), item)
            pairs = list(tensors)
            for name, data in pairs:
                kind = GGMLQuantizationType(TYPE_NUMBERS[data.dtype])
                writer.add_tensor_info(name, data.shape, np.dtype(np.float32), data.nbytes, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            (file,) = writer.fout
            writer.write_padding(file, file.tell())
            total, before = sum(data.nbytes for _, data in pairs), 0
            for name, data in pairs:
                n = 0
                for piece in data.pieces():
                    n += file.write(piece.reshape(-1).view(np.uint8).data)
                    if progress is not None:
                        progress(before + n, total)
                if n != data.nbytes:
                    raise ValueError(f"tensor {name!r}: {data.nbytes} bytes announced, {n} given")
                writer.write_padding(file, n)
                before += n
        finally:
            writer.close()


def copied_keys(metadata: Metadata) -> dict[str, Key]:
    """All keys of a GGUF file with their types, to write them again; of its layout none."""
    keys = {}
    for name, kind in metadata.types.items():
        if not name.startswith("split.") and name != "general.alignment":
            value = metadata[name]
            keys[name] = Key(value.tolist() if isinstance(value, np.ndarray) else value, *kind)
    return keys
