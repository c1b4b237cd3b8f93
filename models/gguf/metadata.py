"""GGUF metadata: keys and values; arrays (vocabularies) are read from the file on first access."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.types import ValueType
from logitless.models.hparams.overrides import Overrides, type_of


@dataclass(frozen=True)
class LazyArray:
    """An array not yet decoded: numbers of `dtype`, or strings (`dtype` None) whose prefixes lie at `starts`."""

    begin: int
    count: int
    dtype: np.dtype[Any] | None
    is_bool: bool = False
    starts: NDArray[np.int64] | None = None
    end: int = 0


class Metadata(Mapping[str, Any]):
    """Key → value in file order; scalars as int, float, bool or str, arrays decoded on first access
    and kept.

    An array of numbers becomes a read-only numpy array, an array of strings a `list[bytes]`. In
    scalar strings, bytes that are not UTF-8 have been replaced: a badly encoded description is no
    reason to refuse a model. `types`: how the file has each value, and the items of an array."""

    def __init__(
        self,
        path: Path,
        buffer: mmap.mmap,
        values: dict[str, Any],
        types: Mapping[str, tuple[ValueType, ValueType | None]],
    ) -> None:
        self._path, self._buffer, self._values, self.types = path, buffer, values, types

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, LazyArray):
            value = self._values[key] = self._decode(key, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:  # Mapping's own would decode the array
        return key in self._values

    def length(self, key: str) -> int | None:
        """The number of an array's items, without decoding it; None where the key is no array."""
        value = self._values.get(key)
        if isinstance(value, LazyArray):
            return value.count
        return len(value) if isinstance(value, (list, np.ndarray)) else None

    def replaced(self, overrides: Overrides) -> Metadata:
        """Copy with other values. ValueError: one has another type than the file's."""
        new = overrides.values(self)
        types = {**self.types, **{key: type_of(value, self.types.get(key)) for key, value in new.items()}}
        return Metadata(self._path, self._buffer, {**self._values, **new}, types)

    def joined(self, other: Metadata, keys: Iterable[str]) -> Metadata:
        """Copy with the values of another file added."""
        values, types = {**self._values}, {**self.types}
        for key in keys:
            values[key], types[key] = other[key], other.types[key]
        return Metadata(self._path, self._buffer, values, types)

    def _decode(self, key: str, array: LazyArray) -> Any:
        if self._buffer.closed:
            raise ModelFileError(self._path, f"key {shown(key)}: the file has been closed")
        if array.starts is not None:
            starts = array.starts.tolist()
            buffer = self._buffer
            return [buffer[a + 8 : b] for a, b in zip(starts, [*starts[1:], array.end], strict=True)] if starts else []
        values = np.frombuffer(self._buffer, array.dtype, array.count, array.begin).copy()
        if array.is_bool:
            if (values > 1).any():
                raise ModelFileError(self._path, f"key {shown(key)}: a bool is neither 0 nor 1")
            values = values.astype(np.bool_)
        values.setflags(write=False)
        return values
