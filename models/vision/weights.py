"""Weights of a vision encoder and its projector by GGUF name, checked against its hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import replace

from logitless.models.gguf.file import GGUFFile
from logitless.models.media.convolution import convolution
from logitless.models.media.projector_weights import (
    Declared,
    DeclaredTensors,
    matrix,
    n_rows,
    norm,
    plain,
)
from logitless.models.vision.mobilenet_blocks import mobilenet_tensors
from logitless.models.vision.params import VisionParams
from logitless.models.vision.projectors import Head, Positions
from logitless.models.vision.resampler import UNUSED, resampler_tensors
from logitless.models.vision.towers.sam import sam_tensors
from logitless.models.weights.tensor_map import TensorSlice

_NORMS = tuple(f"{name}.weight" for name in ("norm", "ln", "ln1", "ln2", "mm.model.mlp.0", "ln_q", "ln_kv", "ln_post"))
MATRICES = {  # the two matrices of heads with a hidden layer
    Head.MLP: ("mm.0", "mm.2"),
    Head.JANUS: ("mm.0", "mm.1"),
    Head.MERGER: ("mm.0", "mm.2"),
    Head.MERGE_MLP: ("mm.1", "mm.2"),
    Head.NORM_MERGE_MLP: ("mm.1", "mm.2"),
    Head.PATCH_MERGER: ("mm.1", "mm.2"),
    Head.CONVOLUTIONS: ("mm.0", "mm.2"),
    Head.MERGE_NORM_MLP: ("mm.model.mlp.1", "mm.model.mlp.3"),
    Head.ADAPTER: ("mm.model.mlp.1", "mm.model.mlp.2"),
}


def vision_tensors(gguf: GGUFFile, p: VisionParams, n_embd_text: int) -> DeclaredTensors:
    """The tensors of the encoder and the projector of a text model of this width."""
    return DeclaredTensors(
        p.kind,
        dict(_tensors(gguf, p, n_embd_text)),
        bounded=p.projector.bounded,
        biased=() if p.projector.rms_norm else _NORMS,
        unused=("v.patch_embd.weight", *UNUSED) if p.sam else UNUSED,
    )


def _tensors(gguf: GGUFFile, p: VisionParams, n_text: int) -> Declared:
    if p.blocks:
        yield from mobilenet_tensors(gguf, p.blocks, n_text)
        return
    if p.sam is None:
        yield from _patch_tensors(gguf, p)
    else:
        yield from sam_tensors(gguf, p.sam, p.n_embd)
    yield from plain("v.class_embd", p.n_embd, required=p.sam is not None)
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
    for i, n in enumerate((3 * p.patch_size**2, p.n_embd, p.n_embd) if p.projector.whole_patches else (), 1):
        yield from norm(f"v.patch_norm.{i}", n, required=True)
    for name in ("v.norm_embd", "v.pre_ln", "v.post_ln"):
        yield from norm(name, p.n_embd, required=name in p.projector.norms)
    for i in range(p.n_layer):
        yield from _layer(gguf, p, f"v.blk.{i}.")
    for i in p.deepstack:
        name, merged = f"v.deepstack.{i}.", p.n_embd * p.merge**2
        yield from norm(f"{name}norm", merged, required=True)
        n_hidden = n_rows(gguf, f"{name}fc1.weight")
        yield from matrix(f"{name}fc1", n_hidden, merged)
        yield from matrix(f"{name}fc2", n_text, n_hidden)
    yield from _head(gguf, p, n_text)


def _patch_tensors(gguf: GGUFFile, p: VisionParams) -> Declared:
    size = p.patch_size
    flat = (p.n_embd, 3 * size**2)
    rows, in_file = (p.n_embd * 3 * size, size), (p.n_embd, 3, size, size)  # type: tuple[int, ...], tuple[int, ...]
    first = gguf.tensors.get("v.patch_embd.weight")
    if first is not None and len(first.shape) == 2:  # a matrix, and no convolution
        rows, in_file = flat, flat
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")[: 1 + p.projector.two_patch_weights]:
        yield name, TensorSlice(name, rows, in_file=in_file, in_graph=flat)
    yield from plain("v.patch_embd.bias", p.n_embd)


def _layer(gguf: GGUFFile, p: VisionParams, b: str) -> Declared:
    n = p.n_embd
    if any(f"{b}attn_qkv.{end}" in gguf.tensors for end in ("weight", "bias")):
        for i, name in enumerate(("attn_q", "attn_k", "attn_v")):
            yield f"{b}{name}.weight", TensorSlice(f"{b}attn_qkv.weight", (n, n), i * n)
            yield f"{b}{name}.bias", TensorSlice(f"{b}attn_qkv.bias", (n,), i * n, required=False)
    else:
        for name in ("attn_q", "attn_k", "attn_v"):
            yield from matrix(b + name, n, n)
    yield from matrix(f"{b}attn_out", n, n)
    for name in ("attn_q_norm", "attn_k_norm"):
        yield from norm(b + name, p.head_dim, required=p.projector.value_norm)
    own = ("attn_post_norm", "ffn_post_norm") if p.projector.norm_outputs else ("ln1", "ln2")
    for name, source in zip(own, ("ln1", "ln2"), strict=True):
        yield from _renamed(norm(b + name, n, required=True), name, source)
    for name in ("ls1", "ls2", "out_scale", *(() if p.projector.norm_outputs else ("attn_post_norm", "ffn_post_norm"))):
        yield from plain(f"{b}{name}.weight", n)
    yield from matrix(f"{b}ffn_gate", p.n_ff, n, required=False)
    up, down = matrix(f"{b}ffn_up", p.n_ff, n), matrix(f"{b}ffn_down", n, p.n_ff)
    n_out = n_rows(gguf, f"{b}ffn_up.weight"), n_rows(gguf, f"{b}ffn_down.weight")
    if n != p.n_ff and (n_out[0] == n or n_out[1] == p.n_ff):  # as the first converters call them
        up, down = _renamed(up, "ffn_up", "ffn_down"), _renamed(down, "ffn_down", "ffn_up")
    yield from up
    yield from down


def _renamed(parts: Declared, name: str, source: str) -> Declared:
    """Tensors that have another name in the file."""
    for own, part in parts:
        yield own, replace(part, source=part.source.replace(name, source))


def _head(gguf: GGUFFile, p: VisionParams, n_text: int) -> Declared:
    """The projector's own tensors: matrices in order, each as wide as the one before is long."""
    head, merged = p.projector.head, p.n_embd * p.merge**2
    if head is Head.WITH_SAM:
        yield from matrix("mm.model.fc", n_text, 2 * p.n_embd)
        yield from plain("v.image_newline", n_text, required=True)
        as_row = n_rows(gguf, "v.view_seperator") == 1  # as today's converter writes it
        in_file = (1, n_text) if as_row else ()
        yield "v.view_seperator", TensorSlice("v.view_seperator", (n_text,), in_file=in_file)
        return
    if head is Head.RESAMPLER:
        yield from resampler_tensors(gguf, p, n_text)
        return
    if head is Head.POOL_NORM:
        yield from norm("mm.soft_emb_norm", p.n_embd, required=True)
        name = "mm.input_projection.weight"
        yield name, TensorSlice(name, (n_text, p.n_embd), transposed=True, n_experts=1, in_file=(p.n_embd, n_text))
        return
    if head is Head.NORM_LINEAR:
        yield from matrix("mm.input_projection", n_text, p.n_embd)
        return
    if head is Head.POOL_STANDARDIZE:
        yield from plain("v.std_bias", p.n_embd)
        yield from plain("v.std_scale", p.n_embd)
        yield from matrix("mm.input_projection", n_text, p.n_embd)
        return
    if head in (Head.LDP, Head.LDP_V2):
        yield from _ldp(gguf, p, n_text)
        return
    if head is Head.GATED_MERGER:
        n_hidden = n_rows(gguf, "mm.up.weight")
        yield from convolution("mm.patch_merger", n_text, p.n_embd, p.merge)
        yield from matrix("mm.model.fc", n_text, n_text)
        yield from norm("mm.post_norm", n_text, required=True)
        yield from matrix("mm.gate", n_hidden, n_text)
        yield from matrix("mm.up", n_hidden, n_text)
        yield from matrix("mm.down", n_text, n_hidden)
        return
    if head is Head.EXPERT:
        n_out, n_hidden = n_rows(gguf, "mm.model.fc.weight"), n_rows(gguf, "mm.gate.weight")
        yield from matrix("mm.model.fc", n_out, p.n_embd)
        yield from norm("mm.post_fc_norm", n_out, required=True)
        yield from matrix("mm.gate", n_hidden, n_out)
        yield from matrix("mm.up", n_hidden, n_out)
        yield from matrix("mm.down", n_text, n_hidden)
        for name in ("v.boi", "v.eoi"):
            yield from plain(name, n_text, required=True)
        return
    if head is Head.CONVOLUTIONS:
        yield from _convolutions(gguf, p, n_text)
        return
    if head is Head.MERGE_LINEAR:
        yield from matrix("mm.model.fc", n_text, merged)
        return
    first, second = MATRICES[head]
    n_in = p.n_embd if head in (Head.MLP, Head.JANUS, Head.PATCH_MERGER) else merged
    if head is Head.MERGE_NORM_MLP:
        yield from norm("mm.model.mlp.0", merged, required=True)
    elif head is Head.MLP:
        yield from plain("v.image_newline", n_text)  # of no use to tiles one by one, as in llama.cpp
    elif head is Head.PATCH_MERGER:
        yield from norm("mm.input_norm", p.n_embd, required="mm.patch_merger.weight" in gguf.tensors)
        yield from matrix("mm.patch_merger", p.n_embd, merged, required=False)
        yield from plain("v.token_embd.img_break", n_text)
    elif head is Head.NORM_MERGE_MLP:
        yield from norm("mm.input_norm", p.n_embd, required=True)
    elif head is Head.MERGE_MLP:
        yield from norm("mm.input_norm", merged)
    n_hidden, n_out = n_rows(gguf, f"{first}.weight"), n_text
    yield from matrix(first, n_hidden, n_in)
    if head is Head.ADAPTER:
        n_out = n_rows(gguf, f"{second}.weight")
        yield from matrix("mm.model.fc", n_text, n_out)
    yield from matrix(second, n_out, n_hidden)


def _ldp(gguf: GGUFFile, p: VisionParams, n: int) -> Declared:
    first, second = (1, 3) if p.projector.head is Head.LDP else (0, 2)
    yield from matrix(f"mm.model.mlp.{first}", n, p.n_embd)
    yield from matrix(f"mm.model.mlp.{second}", n, n)
    if p.projector.head is Head.LDP_V2:
        yield from _depthwise("mm.model.peg.0", n)
        yield from plain("mm.model.peg.0.bias", n, required=True)
        return
    for b in ("mm.model.mb_block.1.block.", "mm.model.mb_block.2.block."):
        n_hidden = n_rows(gguf, f"{b}1.fc1.weight")
        yield from _depthwise(f"{b}0.0", n)
        yield from matrix(f"{b}1.fc1", n_hidden, n)
        yield from matrix(f"{b}1.fc2", n, n_hidden)
        yield from matrix(f"{b}2.0", n, n)
        for name in ("0.1", "2.1"):
            yield from plain(f"{b}{name}.weight", n, required=True)
            yield from plain(f"{b}{name}.bias", n, required=True)


def _depthwise(name: str, n: int) -> Declared:
    """A depthwise convolution of 3 × 3: a row for each tap."""
    yield f"{name}.weight", TensorSlice(f"{name}.weight", (9, n), transposed=True, n_experts=1, in_file=(n, 1, 3, 3))


def _convolutions(gguf: GGUFFile, p: VisionParams, n_text: int) -> Declared:
    n_hidden, n_out = (n_rows(gguf, f"{name}.weight") for name in MATRICES[Head.CONVOLUTIONS])
    yield from plain("mm.pre_norm.weight", p.n_embd, required=True)
    yield from convolution("mm.0", n_hidden, p.n_embd, p.merge)
    yield from convolution("mm.2", n_out, n_hidden, 1)
    yield from matrix("mm.model.fc", n_text, n_out)
    yield from plain("mm.post_norm.weight", n_text, required=True)
    yield from plain("v.image_newline", n_out, required=True)
    for name in ("mm.image_begin", "mm.image_end"):
        yield from plain(name, n_text, required=True)
    yield from plain("v.view_seperator", n_rows(gguf, "v.view_seperator"))  # of no use to one tile


def _places(gguf: GGUFFile, p: VisionParams) -> int:
    """Rows of the position table: at least those of a tile, or as many as a square grid has."""
    name = "v.position_embd.weight"
    if p.projector.positions is Positions.SUMMED_TABLES:
        shape = gguf.tensors[name].shape if name in gguf.tensors else ()
        return max(p.most_columns * p.merge, shape[1] if len(shape) == 3 else 1)
    n = n_rows(gguf, name)
    if p.sam:  # the class token has the first
        return math.isqrt(max(1, n - 1)) ** 2 + 1
    if p.projector.positions is not Positions.TABLE:
        return math.isqrt(n) ** 2
    return max(n, (p.image_size // p.patch_size) ** 2 + ("v.class_embd" in gguf.tensors))
