"""Values that stand in for those of a model's file: llama.cpp's --override-kv, and its flags for rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.gguf_types import ValueType

Value = int | float | bool | str
_NEW = {bool: ValueType.BOOL, int: ValueType.INT64, float: ValueType.FLOAT32, str: ValueType.STRING}
_FITS = range(1 << 31)  # every whole number's type but the smallest holds these


@dataclass(frozen=True)
class Overrides:
    """`keys` as they are; `own` stand under the name of the file's architecture."""

    keys: tuple[tuple[str, Value], ...] = ()
    own: tuple[tuple[str, Value], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys or self.own)

    def values(self, metadata: Mapping[str, Any]) -> dict[str, Value]:
        """What stands in, by key. ValueError: the file has something of another kind there."""
        found = dict(self.keys)
        arch = found.get("general.architecture", metadata.get("general.architecture"))
        found = {**{f"{arch}.{key}": value for key, value in self.own}, **found}
        for key, value in found.items():
            if key in metadata and _kind(metadata[key]) != _kind(value):
                raise ValueError(f"key '{key}' is {_kind(metadata[key])}, and {_kind(value)} is to stand in for it")
        return found


NONE = Overrides()


def type_of(value: Value, old: tuple[ValueType, ValueType | None] | None) -> tuple[ValueType, ValueType | None]:
    """How a file would have the value: as it has the one that it stands in for, if that can be."""
    new = _NEW[type(value)]
    if old is None or (isinstance(value, int) and value not in _FITS):
        return new, None
    floats = (ValueType.FLOAT32, ValueType.FLOAT64)
    return (new, None) if isinstance(value, float) and old[0] not in floats else old


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "a list"
