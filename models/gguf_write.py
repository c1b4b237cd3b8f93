"""Writing GGUF files, whole or not at all: a temporary file, brought to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import ModelFileError
from models.gguf_types import ValueType


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


@dataclass(frozen=True)
class Data:
    """A tensor's bytes: `raw` (..., bytes of a row) uint8 for block types, or the numbers themselves (f32)."""

    array: npt.NDArray[Any]
    shape: tuple[int, ...]  # numpy order
    dtype: str = "f32"


def tensor(array: npt.NDArray[Any]) -> Data:
    """Numbers to be stored as f32."""
    values = np.ascontiguousarray(array, np.float32)
    return Data(values, values.shape)


def write_gguf(path: str | Path, arch: str, keys: Mapping[str, Key], tensors: Iterable[tuple[str, Data]]) -> None:
    """The same arguments give the same bytes. OSError when the disk is full; then nothing has changed under `path`."""
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType, GGUFValueType

    with unfinished(path) as part:
        writer = GGUFWriter(part, arch)
        try:
            for name, key in keys.items():
                if name == "general.architecture":
                    continue
                item = None if key.item is None else GGUFValueType(int(key.item))
                writer.add_key_value(name, key.value, GGUFValueType(int(key.type)), item)
            for name, data in tensors:
                if data.dtype == "f32":
                    writer.add_tensor(name, np.ascontiguousarray(data.array, np.float32).reshape(data.shape))
                else:
                    kind = GGMLQuantizationType[data.dtype.upper()]
                    raw = np.ascontiguousarray(data.array).view(np.uint8).reshape(*data.shape[:-1], -1)
                    writer.add_tensor(name, raw, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


@contextmanager
def unfinished(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; what lies there when the block ends takes the name in one step."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        _sync(part)
        part.replace(path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk, so that what is renamed is there after a power failure."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copied_keys(path: str | Path) -> dict[str, Key]:
    """All keys of a GGUF file with their types, to write them again."""
    from gguf import GGUFReader
    from gguf.constants import GGUFValueType

    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise ModelFileError(path, f"cannot be read: {error}") from None
    keys = {}
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "split.")):
            continue
        kind = field.types[0]
        item = ValueType(int(field.types[-1])) if kind == GGUFValueType.ARRAY else None
        value = field.contents()
        if item == ValueType.STRING:  # tokens may be any bytes
            value = [bytes(field.parts[i]) for i in field.data]
        keys[name] = Key(value, ValueType(int(kind)), item)
    return keys
