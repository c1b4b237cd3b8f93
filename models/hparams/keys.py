"""Checked reads of GGUF metadata keys under the architecture's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.errors import ModelFileError

MAX_LAYERS = 512  # llama.cpp's limit too
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Keys:
    """Reads keys, given without the architecture's prefix. ModelFileError names the file and the whole key."""

    metadata: Mapping[str, Any]
    arch: str
    file: str

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def get(self, key: str, default: object = None) -> Any:
        """The value, unchecked."""
        return self.metadata.get(f"{self.arch}.{key}", default)

    def error(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(self.file, f"key '{self.arch}.{key}' {text}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            self.check_length(key, value)
            value = value.flat[0].item()  # a value per layer, all equal
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, np.ndarray) and value.size:
            self.check_length(key, value)
            raise self.error(key, "differs between layers, which is not supported")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "must be one number")
        if not np.isfinite(value):
            raise self.error(key, f"is {value}")
        return value

    def check_length(self, key: str, value: npt.NDArray[Any]) -> None:
        """ModelFileError: the array has not one value for each block."""
        n_blocks = self.get("block_count")
        if not isinstance(n_blocks, int):
            raise self.error("block_count", "must be one number")
        if len(value) != n_blocks:
            raise self.error(key, f"has {len(value)} values, for {n_blocks} blocks")

    def count(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """A count from `low` to `high`."""
        value = self.number(key, default)
        if value != int(value) or not 0 < value <= MAX_SIZE:
            raise self.error(key, f"is {value}, which is not a possible size")
        n = int(value)
        if not low <= n <= high:
            possible = f"supported are {low} to {high}" if high < MAX_SIZE else f"at least {low} is possible"
            raise self.error(key, f"is {n}; {possible}")
        return n

    def counts(self, key: str, n: int, default: int | None = None, *, or_none: bool = False) -> tuple[int, ...]:
        """A count for each of n layers, from one number or an array of them. `or_none`: they may be 0."""
        value = self.get(key)
        if not isinstance(value, np.ndarray) or (value == value.flat[:1]).all():
            return ((self.count_or_none if or_none else self.count)(key, default),) * n
        self.check_length(key, value)
        if value.shape != (n,) or value.dtype.kind not in "iu":
            raise self.error(key, f"must be a number or {n} whole numbers")
        if not ((value >= (0 if or_none else 1)) & (value <= MAX_SIZE)).all():
            raise self.error(key, "has a number that is not a possible size")
        return tuple(value.tolist())

    def count_or_none(self, key: str, default: int | None = 0) -> int:
        """A count that may be 0, the default of a missing key."""
        return self.count(key, default) if self.number(key, default) else 0

    def layers(self, key: str = "block_count", default: int | None = None) -> int:
        """A count of layers."""
        return self.count(key, default, high=MAX_LAYERS)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, bool):
            raise self.error(key, "is neither true nor false")
        return value

    def flags(self, key: str, n: int) -> tuple[bool, ...]:
        """A flag for each of the first n blocks; (): the file has none."""
        return tuple(self.array(key, n, "biu", "flag").astype(bool).tolist()) if key in self else ()

    def array(self, key: str, n: int, kinds: str, item: str) -> npt.NDArray[Any]:
        """A value of these numpy kinds for each of the first n blocks."""
        value = self.get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self.error(key, f"is not a {item} for each of {n} layers")
        if len(value) != n:  # some files leave out MTP blocks
            self.check_length(key, value)
        return value[:n]

    def positive(self, key: str, default: float) -> float:
        """A positive number, rounded to f32."""
        value = float(self.number(key, default))
        if value <= 0:
            raise self.error(key, f"is {value:g}, which is not positive")
        if not 1e-30 < value < 1e30:  # whose squares f32 does not have either
            raise self.error(key, f"is {value:g}, which is out of range")
        return value

    def at_least_0(self, key: str, default: float = 0.0) -> float:
        """A number of at least 0."""
        value = float(self.number(key, default))
        if value < 0:
            raise self.error(key, f"is {value:g}, which is negative")
        return value

    def factor(self, key: str, default: float = 1.0) -> float:
        """A factor; 0 stands for 1, as in llama.cpp."""
        return self.positive(key, default) if self.number(key, default) else 1.0
