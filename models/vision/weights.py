"""Weights of a projector file by GGUF name, checked against its hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.pointwise import clamp
from logitless.graph.tensor import Tensor
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.vision.params import VisionParams
from logitless.models.vision.projectors import Head, Positions
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import MATRIX_TYPES, Weights, define_weight, vector

Bytes = npt.NDArray[np.uint8]
_NORMS = ("norm.weight", "ln.weight", "ln1.weight", "ln2.weight", "mm.model.mlp.0.weight")
Declared = Iterator[tuple[str, TensorSlice]]
MATRICES = {  # the two matrices of heads with a hidden layer
    Head.MLP: ("mm.0", "mm.2"),
    Head.MERGER: ("mm.0", "mm.2"),
    Head.MERGE_MLP: ("mm.1", "mm.2"),
    Head.NORM_MERGE_MLP: ("mm.1", "mm.2"),
    Head.PATCH_MERGER: ("mm.1", "mm.2"),
    Head.CONVOLUTIONS: ("mm.0", "mm.2"),
    Head.MERGE_NORM_MLP: ("mm.model.mlp.1", "mm.model.mlp.3"),
    Head.ADAPTER: ("mm.model.mlp.1", "mm.model.mlp.2"),
}


_PLAIN = ("f32", "f16", "bf16")
_LARGEST = float(np.finfo(np.float32).max)
_BOUNDS = {".input_min": -_LARGEST, ".input_max": _LARGEST, ".output_min": -_LARGEST, ".output_max": _LARGEST}


@dataclass(frozen=True)
class VisionWeights(Weights):
    """Weights whose products may have bounds (Gemma 4)."""

    bounds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # least and most of input and output

    def linear(self, name: str, x: Tensor) -> Tensor:
        if (bounds := self.bounds.get(f"{self.prefix}{name}.weight")) is None:
            return super().linear(name, x)
        low, high, least, most = bounds
        return clamp(super().linear(name, clamp(x, low=low, high=high)), low=least, high=most)


def load_vision_weights(session: Session, gguf: GGUFFile, p: VisionParams, n_embd_text: int) -> VisionWeights:
    """Every weight of the encoder and the projector as a constant of the session. ModelFileError
    names a tensor that is missing, unknown, or of a wrong shape or type."""
    declared = dict(_tensors(gguf, p, n_embd_text))
    used: dict[str, int] = {}
    for part in declared.values():
        used[part.source] = max(used.get(part.source, 0), part.start + part.n_rows)
    bounds = {}
    for name in [name for name in used if p.projector.bounded and name.endswith(".weight")]:
        given = [key for key in _BOUNDS if name.replace(".weight", key) in gguf.tensors]
        used |= {name.replace(".weight", key): 1 for key in given}
        if given:
            bounds[name] = _bounds(gguf, name)
    for name in gguf.tensors:
        if name not in used and not name.startswith(("a.", "mm.a.")):  # an audio encoder beside it
            raise ModelFileError(gguf.path, f"tensor {shown(name)} is unknown in a projector of type {p.kind}")
    found = {}
    for name, part in declared.items():
        info = gguf.tensors.get(part.source)
        if info is None:
            if part.required:
                raise ModelFileError(gguf.path, f"tensor '{part.source}' is missing")
            continue
        expected = part.in_file or (used[part.source], *part.shape[1:])
        if info.shape != expected:
            raise ModelFileError(gguf.path, f"tensor '{info.name}' has shape {info.shape}, expected {expected}")
        if info.dtype not in (_PLAIN if len(part.shape) == 1 else MATRIX_TYPES):
            raise ModelFileError(gguf.path, f"tensor '{info.name}' has type {info.dtype}, which is not supported")
        found[name] = part
    weights = {name: define_weight(session, gguf, name, part) for name, part in found.items()}
    if not p.projector.rms_norm:  # layer norms without a bias
        for norm in [name for name in weights if name.endswith(_NORMS)]:
            bias = norm.replace(".weight", ".bias")
            if bias not in weights:
                zeros = np.zeros(weights[norm].shape, np.float32).view(np.uint8)
                weights[bias] = session.define(bias, weights[norm].shape, "f32", partial(_given, zeros), constant=True)
    return VisionWeights(weights, bounds=bounds)


def _bounds(gguf: GGUFFile, weight: str) -> list[float]:
    """Bounds of a matrix's inputs and outputs: least and most of each."""
    found = []
    for key, usual in _BOUNDS.items():
        info, value = gguf.tensors.get(weight.replace(".weight", key)), usual
        if info is not None:
            if math.prod(info.shape) != 1 or info.dtype not in _PLAIN:
                raise ModelFileError(gguf.path, f"tensor {shown(info.name)} must be one number")
            value = float(vector(gguf.bytes_of(info.name), info.dtype)[0])
            if math.isnan(value):
                raise ModelFileError(gguf.path, f"tensor {shown(info.name)} is not a number")
        found.append(min(max(value, -_LARGEST), _LARGEST))
    return found


def _given(raw: Bytes) -> Bytes:
    return raw


def _tensors(gguf: GGUFFile, p: VisionParams, n_text: int) -> Declared:
    size = p.patch_size
    flat = (p.n_embd, 3 * size**2)
    rows, in_file = (p.n_embd * 3 * size, size), (p.n_embd, 3, size, size)  # type: tuple[int, ...], tuple[int, ...]
    first = gguf.tensors.get("v.patch_embd.weight")
    if first is not None and len(first.shape) == 2:  # a matrix, and no convolution
        rows, in_file = flat, flat
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")[: 1 + p.projector.two_patch_weights]:
        yield name, TensorSlice(name, rows, in_file=in_file, in_graph=flat)
    yield from _vector("v.patch_embd.bias", p.n_embd)
    yield from _vector("v.class_embd", p.n_embd)
    if p.projector.positions is not Positions.NONE:
        n = _places(gguf, p)
        name = "v.position_embd.weight"
        products = (Positions.FILTERED_TABLE, Positions.CUBIC_TABLE)
        if p.projector.positions is Positions.SUMMED_TABLES:
            yield name, TensorSlice(name, (2 * n, p.n_embd), in_file=(2, n, p.n_embd))
        elif p.projector.positions in products:  # a factor of a product
            yield name, TensorSlice(name, (p.n_embd, n), transposed=True, n_experts=1, in_file=(n, p.n_embd))
        else:
            yield name, TensorSlice(name, (n, p.n_embd))
    for i, n in enumerate((3 * size**2, p.n_embd, p.n_embd) if p.projector.whole_patches else (), 1):
        yield from _norm(f"v.patch_norm.{i}", n, required=True)
    for name in ("v.norm_embd", "v.pre_ln", "v.post_ln"):
        yield from _norm(name, p.n_embd)
    for i in range(p.n_layer):
        yield from _layer(gguf, p, f"v.blk.{i}.")
    for i in p.deepstack:
        name, merged = f"v.deepstack.{i}.", p.n_embd * p.merge**2
        yield from _norm(f"{name}norm", merged, required=True)
        n_hidden = _rows(gguf, f"{name}fc1.weight")
        yield from _matrix(f"{name}fc1", n_hidden, merged)
        yield from _matrix(f"{name}fc2", n_text, n_hidden)
    yield from _head(gguf, p, n_text)


def _layer(gguf: GGUFFile, p: VisionParams, b: str) -> Declared:
    n = p.n_embd
    if f"{b}attn_qkv.weight" in gguf.tensors:
        for i, name in enumerate(("attn_q", "attn_k", "attn_v")):
            yield f"{b}{name}.weight", TensorSlice(f"{b}attn_qkv.weight", (n, n), i * n)
            yield f"{b}{name}.bias", TensorSlice(f"{b}attn_qkv.bias", (n,), i * n, required=False)
    else:
        for name in ("attn_q", "attn_k", "attn_v"):
            yield from _matrix(b + name, n, n)
    yield from _matrix(f"{b}attn_out", n, n)
    for name in ("attn_q_norm", "attn_k_norm"):
        yield from _norm(b + name, _rows(gguf, f"{b}{name}.weight"))
    for name in ("ln1", "ln2"):
        yield from _norm(b + name, n, required=True)
    for name in ("ls1", "ls2", "attn_post_norm", "ffn_post_norm", "out_scale"):
        yield from _vector(f"{b}{name}.weight", n)
    yield from _matrix(f"{b}ffn_up", p.n_ff, n)
    yield from _matrix(f"{b}ffn_gate", p.n_ff, n, required=False)
    yield from _matrix(f"{b}ffn_down", n, p.n_ff)


def _head(gguf: GGUFFile, p: VisionParams, n_text: int) -> Declared:
    """The projector's own tensors: matrices in order, each as wide as the one before is long."""
    head, merged = p.projector.head, p.n_embd * p.merge**2
    if head is Head.POOL_NORM:
        yield from _norm("mm.soft_emb_norm", p.n_embd, required=True)
        name = "mm.input_projection.weight"
        yield name, TensorSlice(name, (n_text, p.n_embd), transposed=True, n_experts=1, in_file=(p.n_embd, n_text))
        return
    if head is Head.NORM_LINEAR:
        yield from _matrix("mm.input_projection", n_text, p.n_embd)
        return
    if head is Head.POOL_STANDARDIZE:
        yield from _vector("v.std_bias", p.n_embd)
        yield from _vector("v.std_scale", p.n_embd)
        yield from _matrix("mm.input_projection", n_text, p.n_embd)
        return
    if head in (Head.LDP, Head.LDP_V2):
        yield from _ldp(gguf, p, n_text)
        return
    if head is Head.GATED_MERGER:
        n_hidden = _rows(gguf, "mm.up.weight")
        yield from _convolution("mm.patch_merger", n_text, p.n_embd, p.merge)
        yield from _matrix("mm.model.fc", n_text, n_text)
        yield from _norm("mm.post_norm", n_text, required=True)
        yield from _matrix("mm.gate", n_hidden, n_text)
        yield from _matrix("mm.up", n_hidden, n_text)
        yield from _matrix("mm.down", n_text, n_hidden)
        return
    if head is Head.CONVOLUTIONS:
        yield from _convolutions(gguf, p, n_text)
        return
    if head is Head.MERGE_LINEAR:
        yield from _matrix("mm.model.fc", n_text, merged)
        return
    first, second = MATRICES[head]
    n_in = p.n_embd if head in (Head.MLP, Head.PATCH_MERGER) else merged
    if head is Head.MERGE_NORM_MLP:
        yield from _norm("mm.model.mlp.0", merged, required=True)
    elif head is Head.PATCH_MERGER:
        yield from _norm("mm.input_norm", p.n_embd)
        yield from _matrix("mm.patch_merger", p.n_embd, merged, required=False)
        yield from _vector("v.token_embd.img_break", n_text)
    elif head is Head.NORM_MERGE_MLP:
        yield from _norm("mm.input_norm", p.n_embd, required=True)
    elif head is Head.MERGE_MLP:
        yield from _norm("mm.input_norm", merged)
    n_hidden, n_out = _rows(gguf, f"{first}.weight"), n_text
    yield from _matrix(first, n_hidden, n_in)
    if head is Head.ADAPTER:
        n_out = _rows(gguf, f"{second}.weight")
        yield from _matrix("mm.model.fc", n_text, n_out)
    yield from _matrix(second, n_out, n_hidden)


def _ldp(gguf: GGUFFile, p: VisionParams, n: int) -> Declared:
    first, second = (1, 3) if p.projector.head is Head.LDP else (0, 2)
    yield from _matrix(f"mm.model.mlp.{first}", n, p.n_embd)
    yield from _matrix(f"mm.model.mlp.{second}", n, n)
    if p.projector.head is Head.LDP_V2:
        yield from _depthwise("mm.model.peg.0", n)
        yield from _vector("mm.model.peg.0.bias", n, required=True)
        return
    for b in ("mm.model.mb_block.1.block.", "mm.model.mb_block.2.block."):
        n_hidden = _rows(gguf, f"{b}1.fc1.weight")
        yield from _depthwise(f"{b}0.0", n)
        yield from _matrix(f"{b}1.fc1", n_hidden, n)
        yield from _matrix(f"{b}1.fc2", n, n_hidden)
        yield from _matrix(f"{b}2.0", n, n)
        for norm in ("0.1", "2.1"):
            yield from _vector(f"{b}{norm}.weight", n, required=True)
            yield from _vector(f"{b}{norm}.bias", n, required=True)


def _depthwise(name: str, n: int) -> Declared:
    """A depthwise convolution of 3 × 3: a row for each tap."""
    yield f"{name}.weight", TensorSlice(f"{name}.weight", (9, n), transposed=True, n_experts=1, in_file=(n, 1, 3, 3))


def _convolutions(gguf: GGUFFile, p: VisionParams, n_text: int) -> Declared:
    n_hidden, n_out = (_rows(gguf, f"{name}.weight") for name in MATRICES[Head.CONVOLUTIONS])
    yield from _vector("mm.pre_norm.weight", p.n_embd, required=True)
    yield from _convolution("mm.0", n_hidden, p.n_embd, p.merge)
    yield from _convolution("mm.2", n_out, n_hidden, 1)
    yield from _matrix("mm.model.fc", n_text, n_out)
    yield from _vector("mm.post_norm.weight", n_text, required=True)
    yield from _vector("v.image_newline", n_out, required=True)
    for name in ("mm.image_begin", "mm.image_end"):
        yield from _vector(name, n_text, required=True)
    yield from _vector("v.view_seperator", _rows(gguf, "v.view_seperator"))  # of no use to one tile


def _convolution(name: str, n_out: int, n_in: int, side: int) -> Declared:
    """A convolution whose stride is its size: a matrix of flat patches."""
    rows, shape = (n_out * n_in * side, side), (n_out, n_in, side, side)
    yield f"{name}.weight", TensorSlice(f"{name}.weight", rows, in_file=shape, in_graph=(n_out, n_in * side**2))
    yield from _vector(f"{name}.bias", n_out)


def _places(gguf: GGUFFile, p: VisionParams) -> int:
    """Rows of the position table: at least those of a tile, or as many as a square grid has."""
    name = "v.position_embd.weight"
    if p.projector.positions is Positions.SUMMED_TABLES:
        shape = gguf.tensors[name].shape if name in gguf.tensors else ()
        return max(p.most_columns * p.merge, shape[1] if len(shape) == 3 else 1)
    n = _rows(gguf, name)
    if p.projector.positions is not Positions.TABLE:
        return math.isqrt(n) ** 2
    return max(n, (p.image_size // p.patch_size) ** 2 + ("v.class_embd" in gguf.tensors))


def _rows(gguf: GGUFFile, name: str) -> int:
    """Rows of a tensor whose number the metadata does not state; 1 where it is missing."""
    info = gguf.tensors.get(name)
    return info.shape[0] if info is not None and info.shape else 1


def _matrix(name: str, n_out: int, n_in: int, *, required: bool = True) -> Declared:
    yield f"{name}.weight", TensorSlice(f"{name}.weight", (n_out, n_in), required=required)
    yield from _vector(f"{name}.bias", n_out)


def _norm(name: str, n: int, *, required: bool = False) -> Declared:
    yield from _vector(f"{name}.weight", n, required=required)
    yield from _vector(f"{name}.bias", n)


def _vector(name: str, n: int, *, required: bool = False) -> Declared:
    yield name, TensorSlice(name, (n,), required=required)
