"""Weights of a projector file: an encoder's graph names each tensor and its shape where it reads it.

A graph that is built on a `Declaration` lists its tensors, by which a file is checked and loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import layer_norm, rms_norm
from logitless.graph.ops.pointwise import clamp
from logitless.graph.tensor import Tensor, variable
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.weights.finite import is_finite
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import MATRIX_TYPES, Weights, define_weight, not_finite, vector

_PLAIN = ("f32", "f16", "bf16")
_AUDIO = ("a.", "mm.a.")  # prefixes of tensors of the encoder of sounds and its projector
_BLOCK = re.compile(r"\.blk\.\d+\.(?!\d)")  # not of a MobileNet, whose blocks differ
_LARGEST = float(np.finfo(np.float32).max)
_BOUNDS = {".input_min": -_LARGEST, ".input_max": _LARGEST, ".output_min": -_LARGEST, ".output_max": _LARGEST}


@dataclass(frozen=True)
class ProjectorWeights(Weights):
    """Weights of an encoder and its projector, whose products may have bounds (Gemma 4).

    Whoever reads a tensor says its shape, for `Declaration`; rows of 0 are as many as the file has.
    Names of single tensors are whole, those of products and norms lack `.weight` and `.bias`."""

    n_text: int = 0  # width of the text model
    bounds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # minimum, maximum of input, output

    def read(self, name: str, *shape: int, source: str = "", **form: Any) -> Tensor:
        """A tensor. `source`, `form`: its name and form in the file, where they are others (`TensorSlice`)."""
        return self.tensors[f"{self.prefix}{name}"]

    def has(self, name: str, source: str = "") -> bool:
        """True if the file has a tensor."""
        return f"{self.prefix}{name}" in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in the file; (1,) where it is missing."""
        return self.tensors[f"{self.prefix}{name}"].shape

    def __contains__(self, name: str) -> bool:
        return self.has(f"{name}.weight")

    def optional(self, name: str, n: int, **form: Any) -> Tensor | None:
        """A vector; None: the file has none."""
        return self.read(name, n, **form) if self.has(name, form.get("source", "")) else None

    def or_zeros(self, name: str, n: int) -> Tensor:
        """A vector; zeros where the file has none."""
        return self.read(name, n)

    def transposed(self, name: str, n_out: int, n_in: int, in_file: tuple[int, ...] = ()) -> Tensor:
        """A matrix (n_out, n_in) that the file has as (n_in, n_out), or in another shape of that order."""
        return self.read(name, n_out, n_in, transposed=True, n_experts=1, in_file=in_file or (n_in, n_out))

    def matrix(self, name: str, n_out: int, n_in: int, kernel: tuple[int, ...] = ()) -> Tensor:
        """A matrix; of a convolution of this `kernel` that of flat patches, each element's numbers side by side."""
        n_out = n_out or self.shape(name)[0]
        if not kernel or len(self.shape(name)) == 2:
            return self.read(name, n_out, n_in)
        in_file = (n_out, n_in // math.prod(kernel), *kernel)
        return self.read(name, n_out * n_in // kernel[-1], kernel[-1], in_file=in_file, in_graph=(n_out, n_in))

    def linear(
        self, name: str, x: Tensor, n_out: int = 0, kernel: tuple[int, ...] = (), *, needs_bias: bool = False
    ) -> Tensor:
        """The product with a matrix, plus its bias, where the file has one."""
        weight, n_in = f"{name}.weight", x.shape[-1]
        return self._product_of(weight, x, self.matrix(weight, n_out, n_in, kernel), needs_bias=needs_bias)

    def linear_part(self, name: str, x: Tensor, whole: str, i: int) -> Tensor:
        """The product of x (T, n) with a matrix (n, n), plus its bias; in some files they are the i-th part of the rows
        of `whole`."""
        n, is_part = x.shape[-1], self.has(f"{whole}.weight") or self.has(f"{whole}.bias")
        source, start = (whole, i * n) if is_part else (name, 0)
        matrix = self.read(f"{name}.weight", n, n, source=f"{source}.weight", start=start)
        return self._product_of(f"{name}.weight", x, matrix, source=f"{source}.bias", start=start)

    def _product_of(self, name: str, x: Tensor, matrix: Tensor, *, needs_bias: bool = False, **form: Any) -> Tensor:
        bounds = self.bounds.get(f"{self.prefix}{name}")
        y = linear(x if bounds is None else clamp(x, low=bounds[0], high=bounds[1]), matrix)
        read = self.read if needs_bias else self.optional
        bias = read(name.replace(".weight", ".bias"), y.shape[-1], **form)
        y = y if bias is None else add(y, bias)
        return y if bounds is None else clamp(y, low=bounds[2], high=bounds[3])

    def layer_norm(self, name: str, x: Tensor, eps: float, *, needs_bias: bool = True) -> Tensor:
        """Layer norm of x (T, n) that has a weight, and a bias, where the file need not have it."""
        n, bias = x.shape[-1], f"{name}.bias"
        weight = self.read(f"{name}.weight", n)
        return layer_norm(x, weight, self.read(bias, n) if needs_bias else self.or_zeros(bias, n), eps=eps)

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        """RMS norm of x (T, n)."""
        return rms_norm(x, self.read(f"{name}.weight", x.shape[-1]), eps=eps)


@dataclass(frozen=True, kw_only=True)
class Declaration(ProjectorWeights):
    """The tensors that a graph reads, recorded while it is built on this: by them a file is checked and loaded.

    `kind`: the projector's type. `audio`: the encoder is one of sounds, else of images. `bounded`: matrices may have
    bounds. `unused`: names of tensors that a file may have, too."""

    gguf: GGUFFile
    kind: str
    audio: bool = False
    bounded: bool = False
    unused: tuple[str, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, TensorSlice] = field(default_factory=dict)  # of the file, by the names of tensors
    zeros: dict[str, int] = field(default_factory=dict)  # sizes of vectors that the file lacks

    @cached_property
    def _in_blocks(self) -> set[str]:
        return {_BLOCK.sub(".", name) for name in self.gguf.tensors if _BLOCK.search(name)}

    def read(self, name: str, *shape: int, source: str = "", **form: Any) -> Tensor:
        name, source = f"{self.prefix}{name}", f"{self.prefix}{source or name}"
        info = self.gguf.tensors.get(source)
        if info is not None and len(shape) == 1 and math.prod(info.shape) == max(info.shape, default=1) == shape[0]:
            form["in_file"] = info.shape  # a vector, perhaps as a row or a column
        part = self.parts[name] = TensorSlice(source, shape, **form)
        t = self.tensors[name] = variable(name, part.graph_shape, constant=True)
        return t

    def has(self, name: str, source: str = "") -> bool:
        source = f"{self.prefix}{source or name}"  # all blocks have it, or none
        return source in self.gguf.tensors or _BLOCK.sub(".", source) in self._in_blocks

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self.gguf, f"{self.prefix}{name}")

    def or_zeros(self, name: str, n: int) -> Tensor:
        if not self.has(name):
            self.zeros[f"{self.prefix}{name}"] = n
            return variable(name, (n,), constant=True)
        return self.read(name, n)

    def record(self, build: Callable[[], object]) -> None:
        """Build the graph. ModelFileError names a tensor for which that is not possible."""
        try:
            build()
        except ValueError as error:
            self.check(is_whole=False)
            raise ModelFileError(self.gguf.path, f"has tensors that do not fit together: {error}") from None

    def check(self, *, is_whole: bool = True) -> dict[str, list[float]]:
        """The bounds of matrices. ModelFileError names a tensor that is missing, or of a wrong shape or type, or
        unknown if `is_whole`, the whole graph is built."""
        gguf = self.gguf
        used: dict[str, int] = {}
        for part in self.parts.values():
            used[part.source] = max(used.get(part.source, 0), part.start + part.n_rows)
        bounds = {}
        for name in [name for name in used if self.bounded and name.endswith(".weight")]:
            keys = [key for key in _BOUNDS if name.replace(".weight", key) in gguf.tensors]
            used |= {name.replace(".weight", key): 1 for key in keys}
            if keys:
                bounds[name] = _bounds(gguf, name)
        for name in gguf.tensors if is_whole else ():
            if name not in used and name not in self.unused and name.startswith(_AUDIO) == self.audio:
                raise ModelFileError(gguf.path, f"tensor {shown(name)} is unknown in a projector of type {self.kind}")
        for part in self.parts.values():
            info = gguf.tensors.get(part.source)
            if info is None:
                raise ModelFileError(gguf.path, f"tensor '{part.source}' is missing")
            expected = part.in_file or (used[part.source], *part.shape[1:])
            if info.shape != expected:
                raise ModelFileError(gguf.path, f"tensor '{info.name}' has shape {info.shape}, expected {expected}")
            if info.dtype not in (_PLAIN if len(part.shape) == 1 else MATRIX_TYPES):
                raise ModelFileError(gguf.path, f"tensor '{info.name}' has type {info.dtype}, which is not supported")
        return bounds

    def check_numbers(self) -> None:
        """Check that the numbers of all tensors are finite, as far as their types in the file tell.
        ModelFileError names the tensor at fault."""
        for name in {part.source for part in self.parts.values()}:
            info = self.gguf.tensors.get(name)
            if info is not None and not is_finite(self.gguf.bytes_of(name), info.dtype):
                raise ModelFileError(self.gguf.path, not_finite(name))

    def load(self, session: Session) -> ProjectorWeights:
        """Define the tensors as constants of the session. ModelFileError as of `check`."""
        bounds = self.check()
        weights = {name: define_weight(session, self.gguf, name, part) for name, part in self.parts.items()}
        for name, n in self.zeros.items():
            weights[name] = session.constant(name, np.zeros(n, np.float32))
        return ProjectorWeights(weights, n_text=self.n_text, bounds=bounds)


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


def projector_type(metadata: Mapping[str, Any], part: str) -> object:
    """The projector type of a file, or of its part `vision` or `audio`, unchecked."""
    whole = metadata.get("clip.projector_type", "")
    return metadata.get(f"clip.{part}.projector_type") if isinstance(whole, str) and not whole else whole


def shape_of(gguf: GGUFFile, name: str) -> tuple[int, ...]:
    """Shape of a tensor whose sizes the metadata does not state; (1,) where it is missing."""
    info = gguf.tensors.get(name)
    return info.shape if info is not None and info.shape else (1,)
