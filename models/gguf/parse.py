"""GGUF header parser: metadata and tensor table, checked against the size of the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
Nothing in the file is believed before it is checked against the file's size, so a corrupt file
costs a `ModelFileError` and no memory."""

from __future__ import annotations

import mmap
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.metadata import LazyArray, Metadata
from logitless.models.gguf.strings import scan_strings
from logitless.models.gguf.types import TENSOR_TYPES, TensorType, ValueType

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_NAME = 65535  # the specification's limit for keys
_MAX_STRING = 1 << 26  # bytes of one scalar string
_MAX_STRINGS = 1 << 24  # in one array; fifty times the largest vocabulary
_STRUCTS: dict[int, struct.Struct] = {  # value type → how a scalar of it is stored
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


class Source(Protocol):
    """The origin of a tensor that is not in this form in a file."""

    def read(self, info: TensorInfo, parts: Sequence[Part]) -> NDArray[np.uint8]:
        """The tensor's bytes."""

    def stored(self, info: TensorInfo, parts: Sequence[Part]) -> NDArray[np.uint8]:
        """Bytes of a file that tell this tensor from others, without reading all."""


# Either stands for the projector of a Hugging Face folder.
FOLDER_PROJECTORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class RowGroups:
    """Rows of a tensor of the file, one range of all groups after the other."""

    n_rows: int  # of the file's tensor
    n_groups: int  # into which they are divided
    ranges: tuple[tuple[int, int], ...]  # first row of each group, and the row after the last

    def read(self, info: TensorInfo, parts: Sequence[Part]) -> NDArray[np.uint8]:
        """The bytes of the rows, from those of the file's tensor."""
        groups = self.stored(info, parts).reshape(self.n_groups, self.n_rows // self.n_groups, -1)
        return np.concatenate([groups[:, start:stop].reshape(-1) for start, stop in self.ranges])

    def stored(self, info: TensorInfo, parts: Sequence[Part]) -> NDArray[np.uint8]:
        """The bytes of the file's tensor."""
        nbytes = info.nbytes // info.shape[0] * self.n_rows
        return np.frombuffer(parts[info.part].buffer, np.uint8, nbytes, info.offset)


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape, type and place of a tensor."""

    name: str
    shape: tuple[int, ...]  # numpy order, rows first: GGUF's own order reversed
    dtype: str  # GGUF's type name in lower case: "f32", "q8_0", "q4_k" ...
    offset: int  # bytes from the beginning of its file
    nbytes: int
    part: int = 0  # file of a split model that holds it
    source: Source | None = None  # None: its bytes are in the file


@dataclass(frozen=True)
class Part:
    """One file: a whole model, or one part of a split one."""

    path: Path
    buffer: mmap.mmap
    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def read_part(path: Path, index: int = 0) -> Part:
    """Map the file and read its header. Raises ModelFileError for any fault of it."""
    buffer = map_file(path)
    try:
        return _Parser(path, buffer).parse(index)
    except BaseException:
        close_buffer(buffer)
        raise


def close_buffer(buffer: mmap.mmap) -> None:
    """Unmap now, or, when views of it are still held, as soon as the last of them goes."""
    with suppress(BufferError):  # raised while exported pointers exist
        buffer.close()


def map_file(path: Path) -> mmap.mmap:
    """Map a file to read it. ModelFileError: there is none, or it is empty or no file."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(path, "is a directory, not a GGUF file")
        if not stat.S_ISREG(mode):  # opening a pipe would block
            raise ModelFileError(path, "is not a regular file")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelFileError(path, "is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(path, "no such file") from None
    except OSError as e:
        raise ModelFileError(path, f"cannot be opened: {e.strerror or e}") from e
    except ModelFileError:
        raise
    except ValueError as e:  # a NUL in the path; emptied between the check and the mapping
        raise ModelFileError(path, f"cannot be opened: {e}") from e


class _Parser:
    """A cursor over the header. `where` names the field being read, for messages."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer = path, buffer
        self.size = len(buffer)
        self.pos = 0
        self.where = "header"

    def parse(self, index: int) -> Part:
        version = self._version()
        n_tensors, n_keys = self._scalar(ValueType.UINT64), self._scalar(ValueType.UINT64)
        self._room(n_keys, 8 + 4 + 1, "keys")
        self._room(n_tensors, 8 + 4 + 4 + 8, "tensors")
        values: dict[str, Any] = {}
        types: dict[str, tuple[ValueType, ValueType | None]] = {}
        for i in range(n_keys):
            self.where = f"key {i}"
            key = self._name()
            self.where = f"key {shown(key)}"
            if key in values:
                raise self._error("appears twice")
            kind = self._scalar(ValueType.UINT32)
            item = int.from_bytes(self.buffer[self.pos : self.pos + 4], "little") if kind == ValueType.ARRAY else None
            values[key] = self._value(kind)
            types[key] = ValueType(kind), None if item is None else ValueType(item)
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.where = "key 'general.alignment'"
            raise self._error(f"is {shown(str(alignment))}, not a power of two")
        if not isinstance(values.get("general.architecture", ""), str):
            self.where = "key 'general.architecture'"
            raise self._error("is no text")
        table = [self._tensor(i) for i in range(n_tensors)]
        metadata = Metadata(self.path, self.buffer, values, types)
        return Part(self.path, self.buffer, version, alignment, metadata, self._place(table, alignment, index))

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(self.path, f"{self.where}: {problem} (at byte {self.pos})")

    def _take(self, n: int) -> bytes:
        if n > self.size - self.pos:
            raise self._error(f"needs {n} bytes but the file ends at byte {self.size}")
        self.pos += n
        return self.buffer[self.pos - n : self.pos]

    def _scalar(self, value_type: int) -> Any:
        layout = _STRUCTS[value_type]
        return layout.unpack(self._take(layout.size))[0]

    def _room(self, n: int, least: int, what: str) -> None:
        if n * least > self.size - self.pos:
            raise self._error(f"claims {n} {what}, more than a file of {self.size} bytes can hold")

    def _version(self) -> int:
        magic = self.buffer[:4]
        if magic != b"GGUF":
            lfs = self.buffer[:24] == b"version https://git-lfs."
            hint = "a Git LFS pointer, not the model itself" if lfs else f"it begins with {magic!r}"
            if self.path.suffix == ".safetensors" or self.path.name == "config.json":
                hint = f"it is a part of a Hugging Face model: give its folder, {self.path.parent}"
            raise ModelFileError(self.path, f"is not a GGUF file ({hint})")
        self.pos = 4
        raw = self._take(4)
        version, swapped = int.from_bytes(raw, "little"), int.from_bytes(raw, "big")
        if version in (2, 3):
            return version
        if swapped in (1, 2, 3):
            raise ModelFileError(self.path, f"is a big-endian GGUF (version {swapped}); only little endian can be read")
        raise ModelFileError(self.path, f"has GGUF version {version}; only versions 2 and 3 can be read")

    def _name(self) -> str:
        n = self._scalar(ValueType.UINT64)
        if _MAX_NAME < n <= self.size - self.pos:
            raise self._error(f"has a name of {n} bytes; at most {_MAX_NAME} are allowed")
        raw = self._take(n)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"the name {shown(raw)} is not UTF-8") from None

    def _value(self, value_type: int) -> Any:
        if value_type == ValueType.STRING:
            n = self._scalar(ValueType.UINT64)
            # a corrupt length in a large file: do not copy its weights
            if _MAX_STRING < n <= self.size - self.pos:
                raise self._error(f"is a string of {n} bytes; at most {_MAX_STRING} are allowed")
            return self._take(n).decode(errors="replace")
        if value_type == ValueType.ARRAY:
            return self._array()
        if value_type not in _STRUCTS:
            raise self._error(f"has the unknown value type {value_type}")
        value = self._scalar(value_type)
        if value_type == ValueType.BOOL:
            if value > 1:
                raise self._error(f"a bool is {value}, neither 0 nor 1")
            return bool(value)
        return value

    def _array(self) -> LazyArray:
        item_type, count = self._scalar(ValueType.UINT32), self._scalar(ValueType.UINT64)
        begin = self.pos
        if item_type == ValueType.STRING:
            self._room(count, 8, "strings")
            if count > _MAX_STRINGS:
                raise self._error(f"claims {count} strings; at most {_MAX_STRINGS} are allowed")
            starts, self.pos = scan_strings(self.buffer, begin, count)
            if len(starts) < count:
                raise self._error(f"string {len(starts)} of {count} goes beyond the file's end at byte {self.size}")
            return LazyArray(begin, count, None, starts=starts, end=self.pos)
        if item_type == ValueType.ARRAY:
            raise self._error("is an array of arrays, which is not supported")
        if item_type not in _STRUCTS:
            raise self._error(f"is an array of the unknown value type {item_type}")
        layout = _STRUCTS[item_type]
        self._room(count, layout.size, "numbers")
        self.pos += count * layout.size
        return LazyArray(begin, count, np.dtype(layout.format), is_bool=item_type == ValueType.BOOL)

    def _tensor(self, i: int) -> tuple[str, tuple[int, ...], TensorType, int, int]:
        """Name, shape, type, bytes, and offset from the beginning of the data."""
        self.where = f"tensor {i}"
        name = self._name()
        self.where = f"tensor {shown(name)}"
        n_dims = self._scalar(ValueType.UINT32)
        if n_dims > _MAX_DIMS:
            raise self._error(f"has {n_dims} dimensions; at most {_MAX_DIMS} are allowed")
        shape = struct.unpack(f"<{n_dims}q", self._take(8 * n_dims))[::-1]
        if any(n < 1 for n in shape):
            raise self._error(f"has a dimension that is not positive: {shape}")
        if prod(shape) >= 1 << 60:
            raise self._error(f"has dimensions whose product overflows: {shape}")
        number, offset = self._scalar(ValueType.UINT32), self._scalar(ValueType.UINT64)
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise self._error(f"has the unknown type {number}")
        row = shape[-1] if shape else 1
        if row % kind.block:
            raise self._error(f"has rows of {row} elements, not a multiple of {kind.name}'s block of {kind.block}")
        return name, shape, kind, prod(shape) // kind.block * kind.nbytes, offset

    def _place(
        self, table: list[tuple[str, tuple[int, ...], TensorType, int, int]], alignment: int, index: int
    ) -> dict[str, TensorInfo]:
        data = -(-self.pos // alignment) * alignment  # where the tensors' bytes begin
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, nbytes, offset in table:
            where = f"tensor {shown(name)}"
            if name in tensors:
                raise ModelFileError(self.path, f"{where} appears twice")
            if offset % alignment:
                raise ModelFileError(self.path, f"{where} lies at offset {offset}, not a multiple of {alignment}")
            a = data + offset
            if a + nbytes > self.size:
                raise ModelFileError(self.path, f"{where} needs bytes {a}..{a + nbytes} but the file has {self.size}")
            tensors[name] = TensorInfo(name, shape, kind.name.lower(), a, nbytes, index)
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda t: t.offset):
            if info.offset < end:
                both = f"tensors {shown(before)} and {shown(info.name)}"
                raise ModelFileError(self.path, f"{both} overlap at byte {info.offset}")
            end, before = info.offset + info.nbytes, info.name
        return tensors
