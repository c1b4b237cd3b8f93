"""Metadata overrides: llama.cpp's --override-kv and RoPE flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitless.models.gguf.types import ValueType

Value = int | float | bool | str
_NEW = {bool: ValueType.BOOL, int: ValueType.INT64, float: ValueType.FLOAT32, str: ValueType.STRING}
_HOLDS = {  # the whole numbers of a type
    ValueType.UINT8: range(1 << 8),
    ValueType.INT8: range(-1 << 7, 1 << 7),
    ValueType.UINT16: range(1 << 16),
    ValueType.INT16: range(-1 << 15, 1 << 15),
    ValueType.UINT32: range(1 << 32),
    ValueType.INT32: range(-1 << 31, 1 << 31),
    ValueType.UINT64: range(1 << 64),
    ValueType.INT64: range(-1 << 63, 1 << 63),
}
_FLOATS = (ValueType.FLOAT32, ValueType.FLOAT64)


@dataclass(frozen=True)
class Overrides:
    """Overrides by whole key; those of `own` get the prefix of the file's architecture."""

    keys: tuple[tuple[str, Value], ...] = ()
    own: tuple[tuple[str, Value], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys or self.own)

    def values(self, metadata: Mapping[str, Any]) -> dict[str, Value]:
        """Overrides by whole key. ValueError: the file's value has another type."""
        values = dict(self.keys)
        arch = values.get("general.architecture", metadata.get("general.architecture"))
        values = {**{f"{arch}.{key}": value for key, value in self.own}, **values}
        for key, value in values.items():
            if key in metadata and _kind(metadata[key]) != _kind(value):
                raise ValueError(f"key '{key}' is {_kind(metadata[key])}, and {_kind(value)} is to stand in for it")
        return values


NONE = Overrides()


def type_of(value: Value, old: tuple[ValueType, ValueType | None] | None) -> tuple[ValueType, ValueType | None]:
    """GGUF type of an override: that of the value it replaces, if possible."""
    if old is None:
        return _NEW[type(value)], None
    if isinstance(value, bool | str) or old[0] in _FLOATS:
        return old
    return old if isinstance(value, int) and value in _HOLDS[old[0]] else (_NEW[type(value)], None)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "a list"
