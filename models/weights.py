"""Weights by their GGUF names, checked against what the architecture needs, as states of a session."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from graph.dtype import DTYPES
from graph.ops.elementwise import add
from graph.ops.experts import expert_linear
from graph.ops.linear import linear
from graph.ops.norm import layer_norm, rms_norm
from graph.ops.rows import get_rows
from graph.ops.shape import reshape, slice_rows
from graph.session import Session
from graph.tensor import Tensor
from models.errors import ModelFileError, shown
from models.expert_params import Experts
from models.gguf_file import GGUFFile, TensorInfo
from models.held import HELD, held, held_as
from models.hparams import Hparams
from models.latent_params import Latent
from models.low_rank import LowRank
from models.recurrent_params import Recurrent

MATRIX_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", *HELD)
log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]
LANES = 16  # outputs that kernels make together, which must not be of two experts
_OF_HEADS = ("_q_norm.weight", "_k_norm.weight")  # norms without a bias
_DERIVED = (".rope_freqs.weight", ".attn_rot_embd.weight")  # of old files: what the hyper-parameters say anyhow


@dataclass(frozen=True)
class Weights:
    """Tensors by GGUF name. `linear` is the product with a weight, its bias where the file holds one, and adapters."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""
    low_rank: LowRank | None = None

    def block(self, i: int) -> Weights:
        return replace(self, prefix=f"{self.prefix}blk.{i}.")

    def of_rows(self, ids: Tensor) -> Weights:
        """The same weights for these rows of a batch, whose adapters they have."""
        return self if self.low_rank is None else replace(self, low_rank=self.low_rank.of_rows(ids))

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{self.prefix}{name}.weight")

    def bias(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{self.prefix}{name}.bias")

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = linear(x, self[name])
        bias = self.bias(name)
        y = y if bias is None else add(y, bias)
        return y if self.low_rank is None else self.low_rank.added(f"{self.prefix}{name}.weight", x, y)

    def experts(self, name: str, x: Tensor, order: Tensor, n: int) -> Tensor:
        """Each row of x (R, K) times its own of n experts' weights, and that one's bias where the file holds one;
        graph/ops/experts.py says what `order` is."""
        y = expert_linear(x, self[name], order, n=n)
        bias = self.bias(name)  # (n, N)
        if bias is None:
            return y
        experts = reshape(slice_rows(order, start=2, stop=3), shape=order.shape[1:])
        return add(y, get_rows(bias, experts))

    def norm(self, name: str, x: Tensor, h: Hparams) -> Tensor:
        """x (T, n), normalised as the architecture does it; x itself where the file has no such norm."""
        if name not in self:
            return x
        if h.kind.layer_norm:
            y = layer_norm(x, self[name], self.tensors[f"{self.prefix}{name}.bias"], eps=h.eps)
        else:
            y = rms_norm(x, self[name], eps=h.eps)
        if self.low_rank is None:
            return y
        return self.low_rank.normed(f"{self.prefix}{name}.weight", x, y, h.eps, layer_norm=h.kind.layer_norm)

    def embedding(self, tokens: Tensor) -> Tensor:
        """The rows (T, n_embd) of these tokens."""
        x = get_rows(self["token_embd"], tokens)
        return x if self.low_rank is None else self.low_rank.embedded(tokens, x)


@dataclass(frozen=True)
class Part:
    """A tensor of the graph: rows `start`… of a tensor of the file, which may have them by experts or by heads
    (n, N, K). `in_file`: its shape there, if it is another."""

    source: str
    shape: tuple[int, ...]
    start: int = 0
    required: bool = True
    n_experts: int = 0
    in_file: tuple[int, ...] = ()
    of_each: int = 0  # not 0: the tensor has so many rows of each head, and the part those from `start` on
    turned: bool = False  # of which it has columns as rows
    loose: bool = False  # its numbers are read one by one: it is kept as f32, and not packed as a factor of products

    @property
    def held_shape(self) -> tuple[int, ...]:
        """In the graph."""
        return (self.shape[0], 1, *self.shape[1:]) if self.loose else self.shape

    def taken(self, whole: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Its numbers, of all numbers of the tensor."""
        if not self.of_each:
            return whole.reshape(-1, *self.shape[1:])[self.start : self.start + self.shape[0]]
        own = self.of_heads(whole)
        return np.ascontiguousarray(own.transpose(0, 2, 1) if self.turned else own).reshape(self.shape)

    def put(self, whole: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> None:
        """Write the numbers that a part of each head has into those of the tensor."""
        own = self.of_heads(whole)
        own = own.transpose(0, 2, 1) if self.turned else own
        own[:] = values.reshape(own.shape)

    def of_heads(self, whole: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(n, rows, …) of a tensor's numbers, or of the bytes of its rows."""
        n = self.shape[1] if self.turned else self.shape[0] // self.n_experts
        return whole.reshape(self.n_experts, self.of_each, -1)[:, self.start : self.start + n]


def parts(h: Hparams, present: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Part]]:
    """Every tensor that this model may have, with its shape. Fused matrices (phi3) are taken apart by rows."""
    if h.kind.after_sum:
        yield from _bert_parts(h, present)
        return
    yield from _one("token_embd.weight", h.n_vocab, h.n_embd)
    if h.kind.learned_positions:
        yield from _one("position_embd.weight", h.n_ctx_train, h.n_embd)
    if h.kind.embedding_norm:
        yield from _norm("token_embd_norm", h)
    yield from _norm("output_norm", h, h.kind.output_norm)
    yield from _one("output.weight", h.n_vocab, h.n_embd, required=False)
    yield from _one("output.bias", h.n_vocab, required=False)
    for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
        yield from _one(name, h.rope_dim // 2, required=False)
    yield from _head_parts(h, present)
    for i in range(h.n_layer):
        b = f"blk.{i}."
        if h.kind.before:
            yield from _norm(b + "attn_norm", h, required=i > 0 or not h.kind.embedding_norm)
        recurrent = h.recurrent_of(i)
        yield from _recurrent_parts(h, b, recurrent) if recurrent else _attention_parts(h, b, present)
        if h.kind.after:
            yield from _norm(b + "post_attention_norm", h)
        if h.kind.before:
            yield from _norm(b + "ffn_norm", h, b + h.kind.ffn_norm, required=not h.kind.parallel)
        if h.kind.after:
            yield from _norm(b + "post_ffw_norm", h)
        yield from _feed_forward_parts(h, i, present)


def _one(name: str, *shape: int, required: bool = True) -> Iterator[tuple[str, Part]]:
    yield name, Part(name, shape, required=required)


def _norm(name: str, h: Hparams, source: str = "", required: bool = True) -> Iterator[tuple[str, Part]]:
    """`source`: as the file calls it, where it is not the same."""
    yield f"{name}.weight", Part(f"{source or name}.weight", (h.n_embd,), required=required)
    if h.kind.layer_norm:
        yield f"{name}.bias", Part(f"{source or name}.bias", (h.n_embd,), required=False)


def _latent_parts(h: Hparams, e: Latent, b: str, present: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Part]]:
    n, n_in, n_query = h.n_head, h.n_embd, h.n_head * e.size
    if e.q_rank:
        yield from _one(b + "attn_q_a.weight", e.q_rank, n_in)
        yield from _one(b + "attn_q_a_norm.weight", e.q_rank)
        yield from _one(b + "attn_q_b.weight", n_query, e.q_rank)
    else:
        yield from _one(b + "attn_q.weight", n_query, n_in)
    yield b + "attn_kv_a.weight", Part(b + "attn_kv_a_mqa.weight", (e.rank, n_in))
    yield b + "attn_k_turned.weight", Part(b + "attn_kv_a_mqa.weight", (e.n_turned, n_in), e.rank)
    yield from _one(b + "attn_kv_a_norm.weight", e.rank)
    if b + "attn_kv_b.weight" in present:
        each = e.n_plain + e.n_value
        both = Part(b + "attn_kv_b.weight", (), n_experts=n, in_file=(n * each, e.rank), of_each=each)
        yield b + "attn_k_b.weight", replace(both, shape=(n * e.rank, e.n_plain), turned=True)
        yield b + "attn_v_b.weight", replace(both, shape=(n * e.n_value, e.rank), start=e.n_plain)
    else:
        yield b + "attn_k_b.weight", Part(b + "attn_k_b.weight", (n * e.rank, e.n_plain), n_experts=n)
        yield b + "attn_v_b.weight", Part(b + "attn_v_b.weight", (n * e.n_value, e.rank), n_experts=n)
    yield from _one(b + "attn_output.weight", h.n_embd, h.n_head * e.n_value)


def _attention_parts(h: Hparams, b: str, present: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Part]]:
    if h.latent:
        yield from _latent_parts(h, h.latent, b, present)
        return
    attn, kv = h.n_head * h.head_dim, h.n_head_kv * h.head_dim
    start, fused = 0, b + "attn_qkv.weight" in present
    for name, rows in (("attn_q", attn * (1 + h.kind.gated_attention)), ("attn_k", kv), ("attn_v", kv)):
        source = b + ("attn_qkv" if fused else name)
        yield f"{b}{name}.weight", Part(f"{source}.weight", (rows, h.n_embd), start)
        yield f"{b}{name}.bias", Part(f"{source}.bias", (rows,), start, required=False)
        start += rows if fused else 0
    for name, rows in (("attn_q_norm", attn), ("attn_k_norm", kv)) if h.kind.head_norm is not False else ():
        of_all, source = h.kind.row_norm or h.kind.norm_for_head, f"{b}{name}.weight"
        in_file = (rows // h.head_dim, h.head_dim) if h.kind.norm_for_head else ()
        must = h.kind.row_norm or bool(h.kind.head_norm)
        yield source, Part(source, (rows if of_all else h.head_dim,), required=must, in_file=in_file)
    yield from _one(b + "attn_output.weight", h.n_embd, attn)
    yield from _one(b + "attn_output.bias", h.n_embd, required=False)
    if h.kind.sinks:
        yield from _one(b + "attn_sinks.weight", h.n_head)


def _recurrent_parts(h: Hparams, b: str, r: Recurrent) -> Iterator[tuple[str, Part]]:
    if not r.n_heads:
        name = f"{b}shortconv.conv.weight"
        yield name, Part(name, (r.n_columns, r.n_taps), loose=True)
        yield from _one(b + "shortconv.in_proj.weight", 3 * r.n_columns, h.n_embd)
        yield from _one(b + "shortconv.out_proj.weight", h.n_embd, r.n_columns)
        return
    name, n_values = f"{b}ssm_conv1d.weight", r.n_heads * r.size
    yield name, Part(name, (r.n_columns, r.n_taps), loose=True)
    yield from _one(b + "attn_qkv.weight", r.n_columns, h.n_embd)
    yield from _one(b + "attn_gate.weight", n_values, h.n_embd)
    for name in ("ssm_alpha", "ssm_beta"):
        yield from _one(f"{b}{name}.weight", r.n_heads, h.n_embd)
    yield from _one(b + "ssm_dt.bias", r.n_heads)
    yield from _one(b + "ssm_a", r.n_heads)
    yield from _one(b + "ssm_norm.weight", r.size)
    yield from _one(b + "ssm_out.weight", h.n_embd, n_values)


def _feed_forward_parts(h: Hparams, layer: int, present: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Part]]:
    b, experts = f"blk.{layer}.", h.experts_of(layer)
    yield from _expert_parts(h, b, experts) if experts else _dense_parts(h, b, present)


def _dense_parts(h: Hparams, b: str, present: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Part]]:
    up = present.get(b + "ffn_up.weight")
    fused = h.kind.gated and b + "ffn_gate.weight" not in present and up is not None and up.shape[0] == 2 * h.n_ff
    for start, name in enumerate(("ffn_gate", "ffn_up")[not h.kind.gated :]):
        source, at = (b + "ffn_up", start * h.n_ff) if fused else (b + name, 0)
        yield f"{b}{name}.weight", Part(f"{source}.weight", (h.n_ff, h.n_embd), at)
        yield f"{b}{name}.bias", Part(f"{source}.bias", (h.n_ff,), at, required=False)
    yield from _one(b + "ffn_down.weight", h.n_embd, h.n_ff)
    yield from _one(b + "ffn_down.bias", h.n_embd, required=False)


def _expert_parts(h: Hparams, b: str, e: Experts) -> Iterator[tuple[str, Part]]:
    yield from _one(b + "ffn_gate_inp.weight", e.n, h.n_embd)
    yield from _one(b + "ffn_gate_inp.bias", e.n, required=False)
    yield from _one(b + "exp_probs_b.bias", e.n, required=False)
    shapes = (("gate", e.n_ff, h.n_embd), ("up", e.n_ff, h.n_embd), ("down", h.n_embd, e.n_ff))
    for name, n_out, n_in in shapes[not h.kind.gated :]:
        source = f"{b}ffn_{name}_exps.weight"
        yield source, Part(source, (e.n * n_out, n_in), n_experts=e.n)
        yield from _one(f"{b}ffn_{name}_exps.bias", e.n, n_out, required=False)
        if e.n_ff_shared:
            shape = (n_out, e.n_ff_shared) if name == "down" else (e.n_ff_shared, n_in)
            yield from _one(f"{b}ffn_{name}_shexp.weight", *shape)
    if e.n_ff_shared:
        yield from _one(b + "ffn_gate_inp_shexp.weight", 1, h.n_embd, required=False)


def _rows(present: Mapping[str, TensorInfo], name: str) -> int:
    info = present.get(f"{name}.weight")
    return info.shape[0] if info is not None and len(info.shape) > 1 else 1


def _head_parts(h: Hparams, present: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Part]]:
    """What makes vectors, or scores, of hidden states."""
    yield from _norm("cls.norm", h, required=False)
    n_in = h.n_embd
    for name in ("cls", "cls.output"):
        rows = h.n_embd if name == "cls" else _rows(present, name)
        yield from _one(name + ".weight", rows, h.n_embd, required=False)
        yield from _one(name + ".bias", rows, required=False)
    for name in ("dense_2", "dense_3"):
        rows = _rows(present, name)
        yield from _one(name + ".weight", rows, n_in, required=False)
        yield from _one(name + ".bias", rows, required=False)
        n_in = rows


def _bert_parts(h: Hparams, present: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Part]]:
    def pair(name: str, *shape: int, required: bool = True) -> Iterator[tuple[str, Part]]:
        yield f"{name}.weight", Part(f"{name}.weight", shape, required=required)
        yield f"{name}.bias", Part(f"{name}.bias", shape[:1], required=required)

    yield from _one("token_embd.weight", h.n_vocab, h.n_embd)
    yield from _one("token_types.weight", _rows(present, "token_types"), h.n_embd, required=False)
    if h.kind.learned_positions:
        yield from _one("position_embd.weight", h.n_ctx_train, h.n_embd)
    yield from pair("token_embd_norm", h.n_embd)
    yield from _head_parts(h, present)
    for i in range(h.n_layer):
        b = f"blk.{i}."
        yield from _attention_parts(h, b, present)
        yield from pair(b + "attn_output_norm", h.n_embd)
        yield from _feed_forward_parts(h, i, present)
        yield from pair(b + "layer_output_norm", h.n_embd)


def check_weights(gguf: GGUFFile, h: Hparams) -> dict[str, Part]:
    """The parts that the file holds. ModelFileError names a tensor that is missing, unknown, or not as it must be."""
    declared = dict(parts(h, gguf.tensors))
    rows_used: dict[str, int] = {}
    for part in declared.values():
        rows_used[part.source] = max(rows_used.get(part.source, 0), part.start + part.shape[0])
    for part in declared.values():
        info = gguf.tensors.get(part.source)
        if info is None:
            if part.required:
                raise ModelFileError(gguf.path, f"tensor '{part.source}' is missing")
            continue
        expected = (rows_used[part.source], *part.shape[1:])
        if part.n_experts:
            n = part.shape[0] // part.n_experts
            expected = (part.n_experts, n, part.shape[1])
            if n % LANES:
                of = "a head" if ".attn_" in part.source else "an expert"
                raise ModelFileError(gguf.path, f"tensor '{info.name}': {n} rows of {of}, not a multiple of {LANES}")
        expected = part.in_file or expected
        if info.shape != expected and (1, *info.shape) != expected:  # a row may have been written as a vector
            raise ModelFileError(gguf.path, f"tensor '{info.name}' has shape {info.shape}, expected {expected}")
        if info.dtype not in MATRIX_TYPES:
            raise ModelFileError(gguf.path, f"tensor '{info.name}' has type {info.dtype}, which is not supported")
        if (part.loose or len(part.shape) == 1) and info.dtype not in ("f32", "f16", "bf16"):
            kind = "small matrix" if part.loose else "vector"
            raise ModelFileError(gguf.path, f"tensor '{info.name}' is a {kind} of type {info.dtype}")
    unused = tuple(f"blk.{h.n_layer + i}." for i in range(h.n_unused))
    for name in gguf.tensors:
        if name.startswith(unused):
            continue
        if name.startswith("blk.") and name not in rows_used and not name.endswith(_DERIVED):
            raise ModelFileError(gguf.path, f"tensor {shown(name)} is unknown in {h.arch} with {h.n_layer} blocks")
    return {name: part for name, part in declared.items() if part.source in gguf.tensors}


def load_weights(session: Session, gguf: GGUFFile, h: Hparams) -> Weights:
    """Define every weight as a constant state. ModelFileError as in `check_weights`."""
    found = check_weights(gguf, h)
    for dtype in sorted({gguf.tensors[part.source].dtype for part in found.values()} & HELD.keys()):
        _, _, before, after, _ = HELD[dtype]
        log.warning(
            "weights of type %s are held as %s, in %.1f times the memory", dtype, held_as(dtype), after / before
        )
    weights = {name: define_weight(session, gguf, name, part) for name, part in found.items()}
    if h.kind.layer_norm:  # some have no biases
        zeros = np.zeros(h.n_embd, np.float32).view(np.uint8)
        norms = [name for name in weights if name.endswith("norm.weight") and not name.endswith(_OF_HEADS)]
        biases = [name.replace(".weight", ".bias") for name in norms]
        for name in biases:
            if name not in weights:
                weights[name] = session.define(name, (h.n_embd,), "f32", lambda: zeros, constant=True)
    return Weights(weights)


def define_weight(session: Session, gguf: GGUFFile, name: str, part: Part, state: str = "") -> Tensor:
    """One part of a file as a constant state, named like the part or otherwise. Loaded pages leave the process; numbers
    that cannot be held are a ModelFileError when they are read."""
    info, plain = gguf.tensors[part.source], part.loose or len(part.shape) == 1
    row_nbytes = info.nbytes // math.prod(info.shape if len(part.shape) == 1 else info.shape[:-1])

    dtype = "f32" if plain else held_as(info.dtype)
    if part.turned and DTYPES[dtype].quantised:  # along other rows
        dtype = "q8_0" if part.shape[1] % 32 == 0 else "f16"

    def source() -> Bytes:
        if part.turned:
            return _turned(info, gguf.bytes_of(info.name), part, dtype)
        start = part.start * row_nbytes
        raw: Bytes = gguf.bytes_of(info.name)
        if part.of_each:
            raw = np.ascontiguousarray(part.of_heads(raw)).reshape(-1)
        else:
            raw = raw[start : start + part.shape[0] * row_nbytes]
        if plain:
            return vector(raw, info.dtype).view(np.uint8)
        try:
            return held(raw, info.dtype)
        except OverflowError as error:
            raise ModelFileError(gguf.path, f"tensor '{info.name}' of type {info.dtype} has {error}") from None

    return session.define(state or name, part.held_shape, dtype, source, constant=True, loaded=gguf.release)


def _turned(info: TensorInfo, raw: Bytes, part: Part, dtype: str) -> Bytes:
    from models.merge import dequantized  # which load what writes files
    from models.quantize import quantize

    values = part.taken(dequantized(info, raw))
    return (values if dtype == "f32" else quantize(values, dtype)).reshape(-1).view(np.uint8)


def vector(raw: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Norms and biases are f32 in the graph, whatever the file keeps."""
    if dtype == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    kind = DTYPES[dtype].numpy
    return np.ascontiguousarray(np.frombuffer(raw.tobytes(), kind).astype(np.float32))
