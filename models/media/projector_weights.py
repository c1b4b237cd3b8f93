"""Weights of a projector file: the tensors that an encoder declares, loaded and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.pointwise import clamp
from logitless.graph.tensor import Tensor
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.weights.finite import is_finite
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import MATRIX_TYPES, Weights, define_weight, not_finite, vector

Bytes = npt.NDArray[np.uint8]
Declared = Iterator[tuple[str, TensorSlice]]
_PLAIN = ("f32", "f16", "bf16")
_AUDIO = ("a.", "mm.a.")  # prefixes of tensors of the encoder of sounds and its projector
_BLOCK = re.compile(r"\.blk\.\d+\.(?!\d)")  # not of a MobileNet, whose blocks differ
_LARGEST = float(np.finfo(np.float32).max)
_BOUNDS = {".input_min": -_LARGEST, ".input_max": _LARGEST, ".output_min": -_LARGEST, ".output_max": _LARGEST}


@dataclass(frozen=True)
class ProjectorWeights(Weights):
    """Weights whose products may have bounds (Gemma 4)."""

    bounds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # minimum, maximum of input, output

    def linear(self, name: str, x: Tensor) -> Tensor:
        if (bounds := self.bounds.get(f"{self.prefix}{name}.weight")) is None:
            return super().linear(name, x)
        low, high, least, most = bounds
        return clamp(super().linear(name, clamp(x, low=low, high=high)), low=least, high=most)


@dataclass(frozen=True)
class DeclaredTensors:
    """The tensors of one encoder and its projector, by which a file is checked and loaded.

    `audio`: the encoder of sounds, else of images. `bounded`: matrices may have bounds. `biased`:
    ends of names of norms that get a bias of zero if the file has none. `unused`: names of tensors
    that a file may have, too."""

    kind: str
    parts: Mapping[str, TensorSlice]
    audio: bool = False
    bounded: bool = False
    biased: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def check(self, gguf: GGUFFile) -> tuple[dict[str, TensorSlice], dict[str, list[float]]]:
        """(tensors that the file has, bounds of matrices). ModelFileError names a tensor that is
        missing, unknown, or of a wrong shape or type."""
        used: dict[str, int] = {}
        for part in self.parts.values():
            used[part.source] = max(used.get(part.source, 0), part.start + part.n_rows)
        bounds = {}
        for name in [name for name in used if self.bounded and name.endswith(".weight")]:
            keys = [key for key in _BOUNDS if name.replace(".weight", key) in gguf.tensors]
            used |= {name.replace(".weight", key): 1 for key in keys}
            if keys:
                bounds[name] = _bounds(gguf, name)
        for name in gguf.tensors:
            if name not in used and name not in self.unused and name.startswith(_AUDIO) == self.audio:
                raise ModelFileError(gguf.path, f"tensor {shown(name)} is unknown in a projector of type {self.kind}")
        parts, in_blocks = {}, {_BLOCK.sub(".", name) for name in gguf.tensors if _BLOCK.search(name)}
        for name, part in self.parts.items():
            info = gguf.tensors.get(part.source)
            if info is None:
                if part.required or _BLOCK.sub(".", part.source) in in_blocks:  # all blocks have it, or none
                    raise ModelFileError(gguf.path, f"tensor '{part.source}' is missing")
                continue
            expected = part.in_file or (used[part.source], *part.shape[1:])
            if info.shape != expected:
                raise ModelFileError(gguf.path, f"tensor '{info.name}' has shape {info.shape}, expected {expected}")
            if info.dtype not in (_PLAIN if len(part.shape) == 1 else MATRIX_TYPES):
                raise ModelFileError(gguf.path, f"tensor '{info.name}' has type {info.dtype}, which is not supported")
            parts[name] = part
        return parts, bounds

    def check_numbers(self, gguf: GGUFFile) -> None:
        """Check that the numbers of all tensors are finite, as far as their types in the file tell.
        ModelFileError names the tensor at fault."""
        for name in {part.source for part in self.parts.values()}:
            info = gguf.tensors.get(name)
            if info is not None and not is_finite(gguf.bytes_of(name), info.dtype):
                raise ModelFileError(gguf.path, not_finite(name))

    def load(self, session: Session, gguf: GGUFFile) -> ProjectorWeights:
        """Define the tensors as constants of the session. ModelFileError as of `check`."""
        parts, bounds = self.check(gguf)
        weights = {name: define_weight(session, gguf, name, part) for name, part in parts.items()}
        for norm in [name for name in weights if name.endswith(self.biased)]:
            bias = norm.replace(".weight", ".bias")
            if bias not in weights:
                zeros = np.zeros(weights[norm].shape, np.float32).view(np.uint8)
                weights[bias] = session.define(bias, weights[norm].shape, "f32", partial(_same, zeros), constant=True)
        return ProjectorWeights(weights, bounds=bounds)


def _bounds(gguf: GGUFFile, weight: str) -> list[float]:
    """Bounds of a matrix's inputs and outputs: least and most of each."""
    bounds = []
    for key, usual in _BOUNDS.items():
        info, value = gguf.tensors.get(weight.replace(".weight", key)), usual
        if info is not None:
            if math.prod(info.shape) != 1 or info.dtype not in _PLAIN:
                raise ModelFileError(gguf.path, f"tensor {shown(info.name)} must be one number")
            value = float(vector(gguf.bytes_of(info.name), info.dtype)[0])
            if math.isnan(value):
                raise ModelFileError(gguf.path, f"tensor {shown(info.name)} is not a number")
        bounds.append(min(max(value, -_LARGEST), _LARGEST))
    for i, key in ((0, ".input_min"), (2, ".output_min")):
        if bounds[i] > bounds[i + 1]:
            raise ModelFileError(gguf.path, f"tensor {shown(weight.replace('.weight', key))} is above its maximum")
    return bounds


def _same(raw: Bytes) -> Bytes:
    return raw


def projector_type(metadata: Mapping[str, Any], part: str) -> object:
    """The projector type of a file, or of its part `vision` or `audio`, unchecked."""
    whole = metadata.get("clip.projector_type", "")
    return metadata.get(f"clip.{part}.projector_type") if isinstance(whole, str) and not whole else whole


def n_rows(gguf: GGUFFile, name: str) -> int:
    """Rows of a tensor whose number the metadata does not state; 1 where it is missing."""
    info = gguf.tensors.get(name)
    return info.shape[0] if info is not None and info.shape else 1


def matrix(name: str, n_out: int, n_in: int, *, required: bool = True) -> Declared:
    """A matrix with an optional bias."""
    yield f"{name}.weight", TensorSlice(f"{name}.weight", (n_out, n_in), required=required)
    yield from plain(f"{name}.bias", n_out)


def norm(name: str, n: int, *, required: bool = False) -> Declared:
    """The weight and the optional bias of a norm."""
    yield from plain(f"{name}.weight", n, required=required)
    yield from plain(f"{name}.bias", n)


def plain(name: str, n: int, *, required: bool = False) -> Declared:
    """A vector by its whole name."""
    yield name, TensorSlice(name, (n,), required=required)
