"""Tensor-name mapping: each tensor of the graph, its place in the file, and its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from logitless.models.architectures.architecture import KeyPool, OutputGate, Presence, QKNorm, Residual, StateKind
from logitless.models.gguf.file import TensorInfo
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.mla import POOLS, CompressionParams, MLAParams
from logitless.models.hparams.moe import Experts
from logitless.models.hparams.ssm import RecurrentParams

T = TypeVar("T", bound=np.generic)
VISUAL = "vis_"  # what the names of a visual expert's matrices begin with
_UNUSED = ("v.", "a.", "mm.", "optimizer.")
_DERIVED = (".rope_freqs.weight", ".attn_rot_embd.weight", ".cross_attn_rel_b.weight")


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of the graph as a slice of a tensor of the file: its rows from `start`; where the
    file's tensor is per expert or per head (n, N, K), those rows of each."""

    source: str
    shape: tuple[int, ...]
    start: int = 0
    required: bool = True
    n_experts: int = 0
    # the file has several such matrices (n, K, K), which are one after the other here
    stacked: bool = False
    in_file: tuple[int, ...] = ()  # its shape there, if it is another
    in_graph: tuple[int, ...] = ()  # and its shape here
    transposed: bool = False  # transposed within each head
    # its numbers are read one by one: it is kept as f32, and not packed as a factor of products
    as_f32: bool = False
    limit: int = 0  # its numbers are integers from 0 on, below this

    @property
    def graph_shape(self) -> tuple[int, ...]:
        """Shape in the graph."""
        if self.in_graph:
            return self.in_graph
        return (self.shape[0], 1, *self.shape[1:]) if self.as_f32 else self.shape

    @property
    def n_rows(self) -> int:
        """Rows in the file; of each expert or head, where it has some."""
        return self.shape[1] if self.transposed else self.shape[0] // max(1, self.n_experts)

    def of(self, rows: npt.NDArray[T]) -> npt.NDArray[T]:
        """The slice of the file's rows: numbers, or their bytes."""
        return self._own(rows).reshape(-1, *rows.shape[1:])

    def _own(self, rows: npt.NDArray[T]) -> npt.NDArray[T]:
        by_expert = rows.reshape(max(1, self.n_experts), -1, *rows.shape[1:])
        return by_expert[:, self.start : self.start + self.n_rows]

    def gather(self, whole: npt.NDArray[T]) -> npt.NDArray[T]:
        """The slice's numbers, from all numbers of the file's tensor."""
        own = self._own(self._as_rows(whole))
        return np.ascontiguousarray(own.transpose(0, 2, 1) if self.transposed else own).reshape(self.shape)

    def scatter(self, whole: npt.NDArray[T], values: npt.NDArray[T]) -> None:
        """Write the slice's numbers into all numbers of the file's tensor."""
        own = self._own(self._as_rows(whole))
        own = own.transpose(0, 2, 1) if self.transposed else own
        own[:] = values.reshape(own.shape)

    def _as_rows(self, whole: npt.NDArray[T]) -> npt.NDArray[T]:
        return whole.reshape(-1, *((self.shape[0] // self.n_experts,) if self.transposed else self.shape[1:]))


Tensors = Iterator[tuple[str, TensorSlice]]  # by graph name
Present = Mapping[str, TensorInfo]  # tensors of the file


def tensor_map(h: Hparams, present: Present) -> Tensors:
    """Every tensor that this model may have, by graph name. Fused matrices (phi3) are split by
    rows."""
    prefix = h.architecture.prefix
    for name, part in _tensors(h, {name.removeprefix(prefix): info for name, info in present.items()}):
        if prefix and name.startswith("blk."):
            part = replace(part, source=prefix + part.source.replace("attn_output", "attn_o"))
        yield name, part
    if h.n_encoder:
        for name, part in tensor_map(h.encoder, present):
            if name.startswith(("blk.", "output_norm.")):
                yield f"enc.{name}", part


def _tensors(h: Hparams, present: Present) -> Tensors:
    if h.architecture.norm.post_residual:
        yield from _bert_tensors(h, present)
        return
    yield from _one("token_embd.weight", h.n_vocab, h.n_embd)
    if h.learned_positions:
        yield from _one("position_embd.weight", h.n_ctx_train, h.n_embd)
    if h.architecture.norm.embedding and h.architecture.norm.weighted:
        yield from _norm("token_embd_norm", h)
    if h.architecture.norm.weighted and h.architecture.norm.final:
        yield from _norm("output_norm", h, h.architecture.norm.output_name)
    if h.architecture.output_of_embeddings:
        yield "dense_2.weight", TensorSlice("output.weight", (_rows(present, "output"), h.n_embd))
    else:
        yield from _one("output.weight", h.n_vocab, h.n_embd, required=False)
    yield from _one("output.bias", h.n_vocab, required=False)
    for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
        yield from _one(name, h.rope_dim // (1 if h.architecture.rope.half_of_full else 2), required=False)
    yield from _head_tensors(h, present)
    if n := h.n_embd_per_layer:
        with_table = not h.architecture.output_of_embeddings
        yield from _one("per_layer_token_embd.weight", h.n_vocab, n * h.n_layer, required=with_table)
        yield from _one("per_layer_model_proj.weight", n * h.n_layer, h.n_embd)
        yield from _one("per_layer_proj_norm.weight", n)
    n = h.n_streams - 1
    if h.architecture.altup:
        yield "altup_proj.weight", TensorSlice("altup_proj.weight", (n * h.n_embd, h.n_embd), stacked=True)
    for i in range(n):
        part = TensorSlice("altup_unembd_proj.weight", (h.n_embd, h.n_embd), i * h.n_embd, stacked=True)
        yield f"altup_unembd_proj.{i}.weight", part
    if h.hyper_rank:
        yield from _gated_tensors(h, "output_hc")
    elif h.n_hyper and h.architecture.residual is not Residual.HYPER:
        yield from _hyper_tensors(h, "output_hc", (h.n_hyper,))
    if h.ngrams:
        rows = max(_rows(present, "per_layer_token_embd"), h.ngrams.n_rows)
        yield from _one("per_layer_token_embd.weight", rows, h.ngrams.width)
    if h.residual_period:
        yield from _one("output_res_score.weight", h.n_embd)
    for i in range(h.n_layer // h.n_loops):
        yield from layer_tensors(h, i, present)


def mtp_tensors(h: Hparams, present: Present) -> Tensors:
    """Tensors of the first MTP block (models/architectures/mtp.py)."""
    yield from layer_tensors(h, h.n_layer, present)
    b = f"blk.{h.n_layer}.nextn."
    yield from _one(b + "eh_proj.weight", h.n_embd, 2 * h.n_embd)
    yield from _norm(b + "enorm", h)
    if not h.hyper_rank:
        yield from _norm(b + "hnorm", h)
    name, other = h.architecture.mtp.norm_name, f"blk.{h.n_layer}.layer_output_norm"
    behind = other if name or (h.architecture.mtp.as_layer and f"{other}.weight" in present) else ""
    yield from _norm(b + "shared_head_norm", h, behind, required=h.architecture.mtp.layer_norm or bool(name))
    yield from _one(b + "embed_tokens.weight", h.n_vocab, h.n_embd, required=False)
    yield from _one(b + "shared_head_head.weight", h.n_vocab, h.n_embd, required=False)
    if h.hyper_rank:
        flat = (n := present.get(b + "hnorm.weight")) is not None and len(n.shape) == 1
        for own, part in _norms_of_streams(h, b + "hnorm"):
            yield own, replace(part, in_file=() if flat else (h.n_hyper, h.n_embd))
        for own, part in _gated_tensors(h, b + "hc_head"):
            yield own.replace("nextn.hc_head", "output_hc"), part


def layer_tensors(h: Hparams, i: int, present: Present) -> Tensors:
    """Tensors of layer i."""
    b = f"blk.{i}."
    second = h.architecture.norm.parallel_attention and b + "attn_norm_2.weight" in present
    pre = h.architecture.norm.pre and h.architecture.norm.weighted
    if pre:
        source = b + "attn_norm_2" if second else ""
        required = h.attends(i) or not h.architecture.attention.optional
        yield from _norm(b + "attn_norm", h, source, required and (i > 0 or h.architecture.norm.first))
    recurrent = h.recurrent_of(i)
    if recurrent:
        yield from _recurrent_tensors(h, b, recurrent, present)
    if h.attends(i):
        yield from _attention_tensors(h, i, present)
    elif h.architecture.attention.optional:
        yield from _one(b + "attn_output.weight", h.n_embd, h.n_embd, required=False)
    if h.architecture.norm.post:
        yield from _post_norm(b, 0, h, present)
    if pre and h.feeds(i) and (recurrent or h.attends(i) or not h.architecture.states.one_sublayer):
        if b + "ffn_norm" in present:  # as Falcon H1's files have it
            yield b + "ffn_norm.weight", TensorSlice(b + "ffn_norm", (h.n_embd,))
        else:
            name = "post_attention_norm" if h.architecture.states.one_sublayer else h.architecture.norm.ffn_name
            source = b + ("attn_norm" if second else name)
            yield from _norm(b + "ffn_norm", h, source, required=not h.architecture.ffn.parallel)
    if h.architecture.norm.post:
        yield from _post_norm(b, 1, h, present)
    if h.feeds(i):
        yield from _feed_forward_tensors(h, i, present)
    yield from _visual_tensors(h, i)
    n = h.n_hyper if i < h.n_layer or h.architecture.mtp.as_layer else 0
    for name in ("attn", "ffn") if n else ():
        if h.hyper_rank:
            yield from _gated_tensors(h, f"{b}hc_{name}")
            yield from _one(f"{b}hc_{name}_inject.weight", n, n * h.n_embd)
            continue
        yield from _hyper_tensors(h, f"{b}hc_{name}", (n, n, n * n) if h.hyper_iterations else (n, n))
    if h.ngrams and i == h.ngrams.layer:
        yield from _one(b + "ple_key.weight", n * h.n_embd, h.n_embd)
        yield from _one(b + "ple_value.weight", h.n_embd, h.n_embd)
        for name in ("key", "query", "conv"):
            yield from _norms_of_streams(h, f"{b}ple_norm_{name}")
        conv = f"{b}ple_conv1d.weight"
        yield conv, TensorSlice(conv, (n * h.n_embd, h.ngrams.n_taps), as_f32=True)
    if h.residual_period:
        for name in ("attn", "ffn")[i == 0 :]:  # nothing is set aside before the first
            yield from _one(f"{b}{name}_res_score.weight", h.n_embd)
    if n := h.n_embd_per_layer:
        yield from _one(b + "inp_gate.weight", n, h.n_embd)
        yield from _one(b + "proj.weight", h.n_embd, n)
        yield from _norm(b + "post_norm", h)
    if h.architecture.altup:
        yield from _altup_tensors(h, b, present)
    elif h.architecture.embedding_skips:
        yield from _one(b + "layer_output_scale.weight", 1)
    elif h.architecture.per_layer_embeddings:
        yield from _one(b + "layer_output_scale.weight", 1, required=False)


def _visual_tensors(h: Hparams, layer: int) -> Tensors:
    """Matrices for rows of images, beside those for rows of text."""
    if not h.architecture.visual_expert:
        return
    b, size, start = f"blk.{layer}.{VISUAL}", h.sizes(layer), 0
    for name, heads in (("q", size.n_head), ("k", size.n_head_kv), ("v", size.n_head_kv)):
        rows = heads * size.head_dim
        yield f"{b}attn_{name}.weight", TensorSlice(f"{b}attn_qkv.weight", (rows, h.n_embd), start)
        start += rows
    yield from _one(f"{b}attn_output.weight", h.n_embd, size.n_head * size.head_dim)
    for name, shape in (
        ("gate", (size.n_ff, h.n_embd)),
        ("up", (size.n_ff, h.n_embd)),
        ("down", (h.n_embd, size.n_ff)),
    ):
        yield f"{b}ffn_{name}.weight", TensorSlice(f"{b}{name}.weight", shape)


def _hyper_tensors(h: Hparams, name: str, widths: tuple[int, ...]) -> Tensors:
    """Tensors of hyper-connections, whose outputs are parts of these widths with a scale each."""
    yield from _one(f"{name}_fn.weight", sum(widths), h.n_hyper * h.n_embd)
    for i, width in enumerate(widths):
        for of, shape, start in (("scale", 1, i), ("base", width, i * h.n_hyper)):
            yield f"{name}_{of}.{i}.weight", TensorSlice(f"{name}_{of}.weight", (shape,), start)


def _gated_tensors(h: Hparams, name: str) -> Tensors:
    """Tensors of hyper-connections whose streams have gates of low rank."""
    yield from _norms_of_streams(h, f"{name}_norm")
    yield from _one(f"{name}_down.weight", h.hyper_rank, h.n_hyper * h.n_embd)
    yield from _one(f"{name}_up.weight", h.n_hyper * h.n_embd, h.hyper_rank)


def _norms_of_streams(h: Hparams, name: str) -> Tensors:
    for i in range(h.n_hyper):
        yield f"{name}.{i}.weight", TensorSlice(f"{name}.weight", (h.n_embd,), i * h.n_embd)


def _one(name: str, *shape: int, required: bool = True) -> Tensors:
    yield name, TensorSlice(name, shape, required=required)


def _norm(name: str, h: Hparams, source: str = "", required: bool = True) -> Tensors:
    """A norm's tensors; `source`: its name in the file, where it differs."""
    yield f"{name}.weight", TensorSlice(f"{source or name}.weight", (h.n_embd,), required=required)
    if h.architecture.norm.layer_norm:
        yield f"{name}.bias", TensorSlice(f"{source or name}.bias", (h.n_embd,), required=False)


def _post_norm(b: str, i: int, h: Hparams, present: Present) -> Tensors:
    """The norm behind attention (0) or the feed-forward block (1). Files of PLaMo 3 lack its suffix."""
    name = b + ("post_attention_norm", "post_ffw_norm")[i]
    if name in present:
        yield f"{name}.weight", TensorSlice(name, (h.n_embd,))
    else:
        yield from _norm(name, h, name if f"{name}.weight" in present else b + h.architecture.norm.post_names[i])


def _mla_tensors(h: Hparams, e: MLAParams, b: str, present: Present) -> Tensors:
    n, n_in, n_query = h.n_head, h.n_embd, h.n_head * e.size
    if e.q_rank:
        yield from _one(b + "attn_q_a.weight", e.q_rank, n_in)
        yield from _one(b + "attn_q_a_norm.weight", e.q_rank)
        yield from _one(b + "attn_q_b.weight", n_query, e.q_rank)
    else:
        yield from _one(b + "attn_q.weight", n_query, n_in)
    yield b + "attn_kv_a.weight", TensorSlice(b + "attn_kv_a_mqa.weight", (e.rank, n_in))
    if e.n_rope:
        yield b + "attn_k_turned.weight", TensorSlice(b + "attn_kv_a_mqa.weight", (e.n_rope, n_in), e.rank)
    yield from _one(b + "attn_kv_a_norm.weight", e.rank)
    if b + "attn_kv_b.weight" in present:
        both = TensorSlice(b + "attn_kv_b.weight", (), n_experts=n, in_file=(n * (e.n_nope + e.n_value), e.rank))
        yield b + "attn_k_b.weight", replace(both, shape=(n * e.rank, e.n_nope), transposed=True)
        yield b + "attn_v_b.weight", replace(both, shape=(n * e.n_value, e.rank), start=e.n_nope)
    else:
        yield b + "attn_k_b.weight", TensorSlice(b + "attn_k_b.weight", (n * e.rank, e.n_nope), n_experts=n)
        yield b + "attn_v_b.weight", TensorSlice(b + "attn_v_b.weight", (n * e.n_value, e.rank), n_experts=n)
    yield from _one(b + "attn_output.weight", h.n_embd, h.n_head * e.n_value)
    if h.indexes(int(b.split(".")[1])):
        yield from _indexer_tensors(h, b, e.q_rank)
    if h.has_sinks:
        yield from _one(b + "attn_sinks.weight", h.n_head)
    if h.architecture.attention.gate is OutputGate.OWN_WEIGHT:
        rows = h.n_head if _rows(present, b + "attn_gate") == h.n_head else h.n_head * e.n_value
        yield from _one(b + "attn_gate.weight", rows, h.n_embd, required=not h.architecture.attention.gate_optional)


def _indexer_tensors(h: Hparams, b: str, q_rank: int = 0) -> Tensors:
    p, kind, i = h.indexer, h.architecture.attention.indexer, b + "indexer."
    assert p is not None
    assert kind is not None
    yield from _one(i + "k_norm.weight", p.size)
    if not kind.latent:
        yield from _one(i + "q_norm.weight", p.size)
        yield from _one(i + "q_proj.weight", p.n_heads * p.size, h.n_embd)
        yield from _one(i + "k_proj.weight", p.size, h.n_embd)
        return
    yield from _one(i + "k_norm.bias", p.size)
    yield from _one(i + "attn_k.weight", p.size, h.n_embd)
    yield from _one(i + "attn_q_b.weight", p.n_heads * p.size, q_rank)
    yield from _one(i + "proj.weight", p.n_heads, h.n_embd)
    if kind.pool is KeyPool.SOFTMAX:
        yield from _one(b + "indexer_compressor_gate.weight", p.size, h.n_embd)
        for place in range(p.pool):
            own = TensorSlice(b + "indexer_compressor_ape.weight", (p.size,), place * p.size, in_file=(p.pool, p.size))
            yield f"{b}indexer_ape.{place}.weight", own


def _compressed_tensors(h: Hparams, c: CompressionParams, layer: int) -> Tensors:
    b, size, n_in = f"blk.{layer}.", h.head_dim, h.n_embd
    yield from _one(b + "attn_q_a.weight", c.q_rank, n_in)
    yield from _one(b + "attn_q_a_norm.weight", c.q_rank)
    yield from _one(b + "attn_q_b.weight", h.n_head * size, c.q_rank)
    yield from _one(b + "attn_kv.weight", size, n_in)
    yield from _one(b + "attn_kv_a_norm.weight", size)
    yield from _one(b + "attn_sinks.weight", h.n_head)
    rows, columns = c.n_groups * c.rank, h.n_head // c.n_groups * size
    out = b + "attn_output_a.weight"
    yield out, TensorSlice(out, (rows, columns), n_experts=c.n_groups, in_file=(rows, columns))
    yield from _one(b + "attn_output_b.weight", n_in, rows)
    for name, width, kept in zip(POOLS, (size, c.index_size), c.pooled(layer, size), strict=False):
        for part in ("kv", "gate"):
            yield from _one(f"{b}{name}_{part}.weight", kept // 2, n_in)
        places = f"{b}{name}_ape.weight"
        yield places, TensorSlice(places, (c.blocks[layer], kept // 2), as_f32=True)
        yield from _one(f"{b}{name}_norm.weight", width)
    if c.indexes(layer):
        yield from _one(b + "indexer.proj.weight", c.index_heads, n_in)
        yield from _one(b + "indexer.attn_q_b.weight", c.index_heads * c.index_size, c.q_rank)


def _attention_tensors(h: Hparams, layer: int, present: Present) -> Tensors:
    b, size = f"blk.{layer}.", h.sizes(layer)
    if h.mla:
        yield from _mla_tensors(h, h.mla, b, present)
        return
    if h.compression:
        yield from _compressed_tensors(h, h.compression, layer)
        return
    attn, kv = size.n_head * size.head_dim, size.n_head_kv * size.head_dim
    n_values = size.n_head * size.value_dim
    start, fused = 0, b + "attn_qkv.weight" in present
    n_query = attn * 2 if h.architecture.attention.gate is OutputGate.WITH_QUERY else attn
    n_kv = size.n_head_kv * size.value_dim
    heads = (("attn_q", attn), ("attn_k", kv), ("attn_v", n_kv))[: 3 if h.has_own_kv(layer) else 1]
    for name, rows in (("attn_q", n_query), *heads[1:]):
        source = b + ("attn_qkv" if fused else name)
        required = name != "attn_v" or not h.architecture.attention.k_as_v
        yield f"{b}{name}.weight", TensorSlice(f"{source}.weight", (rows, h.n_embd), start, required)
        yield f"{b}{name}.bias", TensorSlice(f"{source}.bias", (rows,), start, required=False)
        start += rows if fused else 0
    qk_norm, without = h.architecture.attention.qk_norm, (QKNorm.NONE, QKNorm.UNWEIGHTED, QKNorm.GAIN)
    if qk_norm is QKNorm.GAIN:
        gain, n = b + "attn_q_norm.weight", size.n_head
        yield gain, TensorSlice(gain, (n,), in_file=(n, 1), in_graph=(1, n, 1))
    for name, rows in ((f"{name}_norm", rows) for name, rows in heads[:2] if qk_norm not in without):
        own, source = qk_norm in (QKNorm.OWN, QKNorm.CENTRED), f"{b}{name}.weight"
        of_all = own or qk_norm is QKNorm.ALL_HEADS
        flat = source in present and present[source].shape == (rows,)  # as K2 Horizon's files have it
        in_file = (rows // size.head_dim, size.head_dim) if own and not flat else ()
        optional = qk_norm in (QKNorm.OPTIONAL, QKNorm.CENTRED) or h.architecture.norm.layer_norm
        optional = optional or (own and not h.recurrent)
        yield source, TensorSlice(source, (rows if of_all else size.head_dim,), required=not optional, in_file=in_file)
        if qk_norm is QKNorm.ALL_HEADS:
            yield from _one(f"{b}{name}.bias", rows, required=False)
    yield from _one(b + "attn_output.weight", h.n_embd, n_values)
    yield from _one(b + "attn_output.bias", h.n_embd, required=False)
    if h.architecture.attention.gate not in (OutputGate.NONE, OutputGate.WITH_QUERY):
        rows = size.n_head if _rows(present, b + "attn_gate") == size.n_head else n_values
        yield from _one(b + "attn_gate.weight", rows, h.n_embd, required=not h.architecture.attention.gate_optional)
    if h.indexes(layer):
        yield from _indexer_tensors(h, b)
    if h.n_buckets and not layer:
        yield from _one(b + "attn_rel_b.weight", h.n_buckets, size.n_head)
    if h.n_encoder:
        yield from _norm(b + "cross_attn_norm", h)
        for name, rows in heads:
            yield from _one(f"{b}cross_{name}.weight", rows, h.n_embd)
        yield from _one(b + "cross_attn_output.weight", h.n_embd, n_values)
    if h.architecture.norm.inner:
        yield from _one(b + "attn_sub_norm.weight", n_values)
    if h.has_sinks:
        required = h.architecture.attention.sinks is Presence.REQUIRED
        yield from _one(b + "attn_sinks.weight", size.n_head, required=required)


def _recurrent_tensors(h: Hparams, b: str, r: RecurrentParams, present: Present) -> Tensors:
    if not r.n_heads:
        name = f"{b}shortconv.conv.weight"
        yield name, TensorSlice(name, (r.n_columns, r.n_taps), as_f32=True)
        yield from _one(b + "shortconv.in_proj.weight", 3 * r.n_columns, h.n_embd)
        yield from _one(b + "shortconv.out_proj.weight", h.n_embd, r.n_columns)
        return
    of_kind = {
        StateKind.MAMBA2: _mamba2_tensors(h, b, r),
        StateKind.MAMBA: _mamba_tensors(h, b, r),
        StateKind.PLAMO2: _plamo2_tensors(h, b, r, present),
        StateKind.KDA: _kda_tensors(h, b, r, present),
        StateKind.RWKV6: _rwkv6_tensors(h, b, r, present),
        StateKind.RWKV7: _rwkv7_tensors(h, b, r, present),
    }
    if (tensors := of_kind.get(h.architecture.states.kind)) is not None:
        yield from tensors
        return
    name, n_values = f"{b}ssm_conv1d.weight", r.n_heads * r.size
    yield name, TensorSlice(name, (r.n_columns, r.n_taps), as_f32=True)
    yield from _one(b + "attn_qkv.weight", r.n_columns, h.n_embd)
    yield from _one(b + "attn_gate.weight", n_values, h.n_embd)
    if h.architecture.states.grouped_heads:
        yield from _one(b + "ssm_ba.weight", 2 * r.n_heads, h.n_embd)
    else:
        yield from _one(b + "ssm_alpha.weight", r.n_heads, h.n_embd)
        yield from _one(b + "ssm_beta.weight", r.n_heads, h.n_embd)
    yield from _one(b + "ssm_dt.bias", r.n_heads)
    yield from _one(b + "ssm_a", r.n_heads)
    yield from _one(b + "ssm_norm.weight", r.size)
    yield from _one(b + "ssm_out.weight", h.n_embd, n_values)


def _kda_tensors(h: Hparams, b: str, r: RecurrentParams, present: Present) -> Tensors:
    n = r.n_heads * r.size
    for name in ("q", "k", "v"):
        conv = f"{b}ssm_conv1d_{name}.weight"
        yield conv, TensorSlice(conv, (n, r.n_taps), as_f32=True, in_file=_with_ones(present, conv, n, 1, r.n_taps))
        yield from _one(f"{b}attn_{name}.weight", n, h.n_embd)
    whole = b + "ssm_g.weight" in present  # Kimi K3
    if whole:
        yield b + "ssm_g_a.weight", TensorSlice(b + "ssm_g.weight", (n, h.n_embd))
    for name in ("f",) if whole else ("f", "g"):  # Kimi Linear's are of low rank
        low = r.size if f"{b}ssm_{name}_b.weight" in present else n
        yield from _one(f"{b}ssm_{name}_a.weight", low, h.n_embd)
        yield from _one(f"{b}ssm_{name}_b.weight", n, r.size, required=False)
    yield from _one(b + "ssm_beta.weight", r.n_heads, h.n_embd)
    yield from _one(b + "ssm_dt.bias", n)
    in_file = _with_ones(present, b + "ssm_a", *((r.n_heads,) if h.architecture.states.negated else (r.n_heads, 1)))
    yield b + "ssm_a", TensorSlice(b + "ssm_a", (r.n_heads,), in_file=in_file, in_graph=(1, r.n_heads, 1))
    yield from _one(b + "ssm_norm.weight", r.size)
    yield from _one(b + "attn_output.weight", h.n_embd, n)


def _rwkv6_tensors(h: Hparams, b: str, r: RecurrentParams, present: Present) -> Tensors:
    n, mix, n_kv = h.n_embd, b + "time_mix_", r.n_key_heads * r.size
    of_mix, of_decay = _rows(present, mix + "w1") // 5, _rows(present, mix + "decay_w1")
    yield from _one(mix + "w1.weight", 5 * of_mix, n)
    for i in range(5):
        part = TensorSlice(mix + "w2.weight", (n, of_mix), i * n, in_file=(5, n, of_mix))
        yield f"{mix}w2.{i}.weight", part
    yield from _lerps(h, b, present, "wkvrg")
    yield from _vector(h, mix + "lerp_x", present, 1, 1)
    if h.architecture.states.channel_mix:
        first = mix + "first.weight"
        yield first, TensorSlice(first, (n,), in_file=(r.n_heads, r.size), in_graph=(1, r.n_heads, r.size))
    yield from _vector(h, mix + "decay", present)
    yield from _one(mix + "decay_w1.weight", of_decay, n)
    yield from _one(mix + "decay_w2.weight", n, of_decay)
    for name, rows in (("key", n_kv), ("value", n_kv), ("receptance", n), ("gate", n), ("output", n)):
        yield from _one(f"{mix}{name}.weight", rows, n)
        if not h.architecture.states.channel_mix and name in ("key", "value", "receptance"):
            yield from _one(f"{mix}{name}.bias", rows, required=False)
    if h.architecture.states.channel_mix:
        yield from _norm_of_heads(h, b)
        yield from _channel_mix_tensors(h, b, r, present)
        yield from _vector(h, b + "channel_mix_lerp_r", present, 1, 1)
        yield from _one(b + "channel_mix_receptance.weight", n, n)


def _rwkv7_tensors(h: Hparams, b: str, r: RecurrentParams, present: Present) -> Tensors:
    n, mix = h.n_embd, b + "time_mix_"
    gated = h.architecture.states.channel_mix or mix + "g1.weight" in present
    for name in ("w", "a", "g") if b == "blk.0." else ("w", "a", "v", "g"):  # the first layer has its own values
        rank = _rows(present, f"{mix}{name}1")
        if name != "g" or gated:
            yield from _one(f"{mix}{name}1.weight", rank, n)
            yield from _one(f"{mix}{name}2.weight", n, rank)
        if name != "g":
            yield from _vector(h, f"{mix}{name}0", present)
    yield from _lerps(h, b, present, "rwkvag"[: 5 + gated])
    for name in ("k_k", "k_a"):
        yield from _vector(h, mix + name, present)
    of_output = mix + "r_k.weight"
    in_file = _with_ones(present, of_output, n)
    yield of_output, TensorSlice(of_output, (n,), in_file=in_file, in_graph=(1, r.n_heads, r.size))
    for name in ("key", "value", "receptance", "output"):
        yield from _one(f"{mix}{name}.weight", n, n)
    yield from _norm_of_heads(h, b)
    if h.architecture.states.channel_mix:
        yield from _channel_mix_tensors(h, b, r, present)


def _norm_of_heads(h: Hparams, b: str) -> Tensors:
    """RWKV's norm of the time mix, which ARWKV 7 may lack."""
    required = h.architecture.states.channel_mix
    yield from _one(b + "time_mix_ln.weight", h.n_embd, required=required)
    yield from _one(b + "time_mix_ln.bias", h.n_embd, required=required)


def _lerps(h: Hparams, b: str, present: Present, names: str) -> Tensors:
    """RWKV's shares of the token before in each input: rows of one tensor, or tensors of their own (first files)."""
    n, fused = h.n_embd, b + "time_mix_lerp_fused.weight"
    apart = fused not in present and f"{b}time_mix_lerp_{names[0]}.weight" in present
    in_file = _with_ones(present, fused, len(names), 1, 1, n)
    for i, name in enumerate(names):
        source = f"{b}time_mix_lerp_{name}.weight"
        own = TensorSlice(source, (n,), in_file=_with_ones(present, source, n))
        yield f"{b}time_mix_lerp.{i}.weight", own if apart else TensorSlice(fused, (n,), i * n, in_file=in_file)


def _vector(h: Hparams, name: str, present: Present, *ones: int) -> Tensors:
    """A vector (n_embd,), which may have other axes of length 1 in the file."""
    in_file = _with_ones(present, f"{name}.weight", *ones, h.n_embd)
    yield f"{name}.weight", TensorSlice(f"{name}.weight", (h.n_embd,), in_file=in_file)


def _channel_mix_tensors(h: Hparams, b: str, r: RecurrentParams, present: Present) -> Tensors:
    yield from _norm(b + "ffn_norm", h, b + "attn_norm_2")
    yield from _vector(h, b + "channel_mix_lerp_k", present, 1, 1)
    yield from _one(b + "channel_mix_key.weight", r.n_channels, h.n_embd)
    yield from _one(b + "channel_mix_value.weight", h.n_embd, r.n_channels)


def _with_ones(present: Present, name: str, *shape: int) -> tuple[int, ...]:
    """A tensor's shape in the file, which may have other axes of length 1."""
    info = present.get(name)
    alike = info is not None and [n for n in info.shape if n > 1] == [n for n in shape if n > 1]
    return info.shape if info is not None and alike else shape


def _mamba_tensors(h: Hparams, b: str, r: RecurrentParams) -> Tensors:
    n = r.n_heads * r.width
    yield from _one(b + "ssm_in.weight", 2 * n, h.n_embd)
    yield b + "ssm_conv1d.weight", TensorSlice(b + "ssm_conv1d.weight", (n, r.n_taps), as_f32=True)
    yield from _one(b + "ssm_conv1d.bias", n, required=False)
    yield from _one(b + "ssm_x.weight", r.n_steps + 2 * r.size, n)
    for name, width in (("dt", r.n_steps), ("b", r.size), ("c", r.size)):
        yield from _one(f"{b}ssm_{name}_norm.weight", width, required=False)
    yield from _one(b + "ssm_dt.weight", n, r.n_steps)
    yield from _one(b + "ssm_dt.bias", n)
    by_head = (1, r.n_heads, r.size, r.width)
    whole = TensorSlice(b + "ssm_a", (r.n_heads * r.size, r.width), n_experts=r.n_heads, in_file=(n, r.size))
    yield b + "ssm_a", replace(whole, in_graph=by_head, transposed=True)
    yield from _one(b + "ssm_d", n)
    yield from _one(b + "ssm_out.weight", h.n_embd, n)


def _plamo2_tensors(h: Hparams, b: str, r: RecurrentParams, present: Present) -> Tensors:
    n = r.n_heads * r.width
    yield from _one(b + "ssm_in.weight", 2 * n, h.n_embd)
    yield b + "ssm_conv1d.weight", TensorSlice(b + "ssm_conv1d.weight", (n, r.n_taps), as_f32=True)
    yield from _one(b + "ssm_x.weight", 2 * r.size + r.n_steps, n)
    for name, width in (("b", r.size), ("c", r.size), ("dt", r.n_steps)):
        bare = f"{b}ssm_{name}_norm"
        yield f"{bare}.weight", TensorSlice(bare if bare in present else f"{bare}.weight", (width,))
    yield from _one(b + "ssm_dt.weight", r.n_heads, r.n_steps)
    yield from _one(b + "ssm_dt.bias", r.n_heads)
    yield from _one(b + "ssm_a", r.n_heads)
    yield b + "ssm_d", TensorSlice(b + "ssm_d", (r.n_heads,), in_graph=(1, r.n_heads, 1))
    yield from _one(b + "ssm_out.weight", h.n_embd, n)


def _mamba2_tensors(h: Hparams, b: str, r: RecurrentParams) -> Tensors:
    n = r.n_heads * r.width
    yield from _one(b + "ssm_in.weight", n + r.n_columns + r.n_heads, h.n_embd)
    yield b + "ssm_conv1d.weight", TensorSlice(b + "ssm_conv1d.weight", (r.n_columns, r.n_taps), as_f32=True)
    yield from _one(b + "ssm_conv1d.bias", r.n_columns, required=False)
    yield from _one(b + "ssm_dt.bias", r.n_heads)
    for name, shape in ((b + "ssm_a", ()), (b + "ssm_d", (1, r.n_heads, 1))):
        yield name, TensorSlice(name, (r.n_heads,), in_file=(r.n_heads, 1), in_graph=shape)
    norm, groups = b + "ssm_norm.weight", (r.n_key_heads, n // r.n_key_heads)
    yield norm, TensorSlice(norm, (n,), required=h.arch != "falcon-h1", in_file=groups)
    yield from _one(b + "ssm_out.weight", h.n_embd, n)


def _feed_forward_tensors(h: Hparams, layer: int, present: Present) -> Tensors:
    b, experts, n_ff = f"blk.{layer}.", h.experts_of(layer), h.sizes(layer).n_ff
    if experts:
        yield from _expert_tensors(h, b, experts, present)
        balanced = h.architecture.moe.balanced if layer >= experts.n_hashed else Presence.ABSENT
        if balanced is not Presence.ABSENT:
            balance = b + "exp_probs_b"
            source = balance if balance in present else balance + ".bias"
            yield balance + ".bias", TensorSlice(source, (experts.n,), required=balanced is Presence.REQUIRED)
    if experts and layer < experts.n_hashed:
        table, n = b + "ffn_gate_tid2eid.weight", experts.n_used
        yield table, TensorSlice(table, (h.n_vocab, n), in_graph=(h.n_vocab, 1, n), limit=experts.n)
    if experts and h.architecture.moe.early_experts:
        yield from _norm(b + "ffn_norm_exps", h)
        yield from _dense_tensors(h, b, h.n_embd, present)
    beside = h.architecture.moe.beside_dense and b + "ffn_up.weight" in present
    if n_ff and (not experts or h.architecture.moe.parallel_dense or beside):
        yield from _dense_tensors(h, b, n_ff, present)
    if h.architecture.norm.inner:
        yield from _one(b + "ffn_sub_norm.weight", n_ff)
    if experts and h.architecture.moe.parallel_dense:
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield from _norm(b + name, h)


def _dense_tensors(h: Hparams, b: str, n_ff: int, present: Present) -> Tensors:
    fused = b + "ffn_gate.weight" not in present and _rows(present, b + "ffn_up") == 2 * n_ff
    fused = fused and h.architecture.ffn.glu
    for start, name in enumerate(("ffn_gate", "ffn_up")[not h.architecture.ffn.glu :]):
        source, at = (b + "ffn_up", start * n_ff) if fused else (b + name, 0)
        required = name == "ffn_up" or h.architecture.ffn.ungated is None
        yield f"{b}{name}.weight", TensorSlice(f"{source}.weight", (n_ff, h.n_embd), at, required)
        yield f"{b}{name}.bias", TensorSlice(f"{source}.bias", (n_ff,), at, required=False)
    yield from _one(b + "ffn_down.weight", h.n_embd, n_ff)
    yield from _one(b + "ffn_down.bias", h.n_embd, required=False)


def _expert_tensors(h: Hparams, b: str, e: Experts, present: Present) -> Tensors:
    yield from _one(b + "ffn_gate_inp.weight", e.n, h.n_embd)
    yield from _one(b + "ffn_gate_inp.bias", e.n, required=False)
    if h.architecture.moe.parallel_dense:
        yield from _one(b + "ffn_gate_inp.scale", h.n_embd)
        yield from _one(b + "ffn_down_exps.scale", e.n, required=False)
    fused = b + "ffn_gate_up_exps.weight" in present
    n_row = e.n_latent or h.n_embd
    if e.n_latent:
        name = "routed" if b + "ffn_routed_down.weight" in present else "latent"  # Kimi K3's files
        for part, shape in (("down", (e.n_latent, h.n_embd)), ("up", (h.n_embd, e.n_latent))):
            yield f"{b}ffn_latent_{part}.weight", TensorSlice(f"{b}ffn_{name}_{part}.weight", shape)
        norm = f"{b}ffn_{name}_norm.weight"
        yield b + "ffn_latent_norm.weight", TensorSlice(norm, (e.n_latent,), required=False)
    for name in ("gate", "up", "down")[not h.architecture.ffn.glu :]:
        n_out, n_in = (n_row, e.n_ff) if name == "down" else (e.n_ff, n_row)
        source, start = f"ffn_{name}_exps", 0
        if fused and name != "down":
            source, start = "ffn_gate_up_exps", e.n_ff * (name == "up")
        own = TensorSlice(f"{b}{source}.weight", (e.n * n_out, n_in), start, n_experts=e.n)
        yield f"{b}ffn_{name}_exps.weight", own
        yield from _one(f"{b}ffn_{name}_exps.bias", e.n, n_out, required=False)
        if e.n_ff_shared:
            shape = (h.n_embd, e.n_ff_shared) if name == "down" else (e.n_ff_shared, h.n_embd)
            together = name != "down" and _rows(present, b + "ffn_up_shexp") == 2 * e.n_ff_shared
            source, start = ("up", shape[0] * (name == "up")) if together else (name, 0)
            yield f"{b}ffn_{name}_shexp.weight", TensorSlice(f"{b}ffn_{source}_shexp.weight", shape, start)
        if e.n_ff_chunk:
            rows, n_in = (h.n_embd, e.n_ff_chunk) if name == "down" else (e.n_ff_chunk, h.n_embd)
            chunked = f"{b}ffn_{name}_chexps.weight"
            yield chunked, TensorSlice(chunked, (e.n_chunks * rows, n_in), n_experts=e.n_chunks)
    if e.n_ff_shared:
        yield from _one(b + "ffn_gate_inp_shexp.weight", 1, h.n_embd, required=False)


def _altup_tensors(h: Hparams, b: str, present: Present) -> Tensors:
    a, rank = h.n_streams, _rows(present, b + "laurel_l")
    yield from _one(b + "altup_router.weight", a, h.n_embd)
    yield from _norm(b + "altup_router_norm", h)
    yield from _one(b + "altup_predict_coef.weight", a * a, a)
    yield from _one(b + "altup_correct_coef.weight", a, a)
    yield from _one(b + "altup_correct_scale.weight", h.n_embd)
    yield from _one(b + "laurel_l.weight", rank, h.n_embd)
    yield from _one(b + "laurel_r.weight", h.n_embd, rank)
    yield from _norm(b + "laurel_post_norm", h)


def _rows(present: Present, name: str) -> int:
    info = present.get(f"{name}.weight")
    return info.shape[0] if info is not None and len(info.shape) > 1 else 1


def _head_tensors(h: Hparams, present: Present) -> Tensors:
    """Tensors of embedding and classification heads."""
    if h.architecture.ranking.enabled:
        yield from _norm("cls.norm", h, required=False)
    n_in = h.n_embd
    for name in ("cls", "cls.output") if h.architecture.ranking.enabled else ():
        rows = h.n_embd if name == "cls" else _rows(present, name)
        yield from _one(name + ".weight", rows, h.n_embd, required=False)
        yield from _one(name + ".bias", rows, required=False)
    for name in ("dense_2", "dense_3") if h.architecture.dense_embeddings else ():
        rows = _rows(present, name)
        yield from _one(name + ".weight", rows, n_in, required=False)
        yield from _one(name + ".bias", rows, required=False)
        n_in = rows


def _bert_tensors(h: Hparams, present: Present) -> Tensors:
    def pair(name: str, *shape: int, required: bool = True) -> Tensors:
        yield f"{name}.weight", TensorSlice(f"{name}.weight", shape, required=required)
        yield f"{name}.bias", TensorSlice(f"{name}.bias", shape[:1], required=required)

    yield from _one("token_embd.weight", h.n_vocab, h.n_embd)
    yield from _one("token_types.weight", _rows(present, "token_types"), h.n_embd, required=False)
    if h.learned_positions:
        yield from _one("position_embd.weight", h.n_ctx_train, h.n_embd)
    yield from pair("token_embd_norm", h.n_embd)
    yield from _head_tensors(h, present)
    for i in range(h.n_layer):
        b = f"blk.{i}."
        yield from _attention_tensors(h, i, present)
        yield from pair(b + "attn_output_norm", h.n_embd)
        yield from pair(b + "attn_norm_2", h.n_embd, required=False)
        yield from _feed_forward_tensors(h, i, present)
        yield from pair(b + "layer_output_norm", h.n_embd)


def is_unused(h: Hparams, name: str, *, mtp: bool = False) -> bool:
    """True for tensors that no graph reads and that change no result: MTP blocks (`mtp`: but the
    first), K and V of layers with KV sharing, indexers, encoders of images and sounds, training state, what
    old files derived from hyper-parameters."""
    blocks = tuple(f"blk.{h.n_layer + i}." for i in range(mtp, h.n_mtp))
    shared = (f"blk.{i}.attn_{which}" for i in range(h.n_layer_kv, h.n_layer) for which in ("k", "v", "k_norm"))
    with_indexer = h.architecture.attention.indexer is not None
    if with_indexer and (".indexer." in name or ".indexer_compressor" in name):
        return True
    if h.architecture.states.kind is StateKind.RWKV7 and name.startswith("blk.0.time_mix_v") and name[16:17].isdigit():
        return True
    if h.architecture.moe.hashed and name.endswith(".exp_probs_b_vl.bias"):  # of rows of images
        return True
    if h.residual_period and name == "blk.0.attn_res_score.weight":
        return True
    return name.startswith((*blocks, *_UNUSED)) or name.endswith(_DERIVED) or name.rpartition(".")[0] in shared
