"""Blocks of MobileNet V5 (Gemma 3n): the blocks of a projector file, and their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from logitless.models.gguf.file import GGUFFile
from logitless.models.weights.tensor_map import TensorSlice

N_STAGES = 4
MAX_BLOCKS = 1000  # of a stage
Declared = Iterator[tuple[str, TensorSlice]]


class Kind(Enum):
    """The computation of a block."""

    EDGE = auto()  # a convolution of 3 × 3, then one of 1 × 1
    INVERTED = auto()  # optional depthwise convolutions before and between two of 1 × 1
    ATTENTION = auto()  # multi-query attention, perhaps to a halved map


@dataclass(frozen=True)
class Block:
    """One block; `stride` 2 halves the map."""

    stage: int
    name: str  # before the names of its tensors
    kind: Kind
    stride: int
    start: int = 0  # sides of its depthwise convolutions; 0: it has none
    middle: int = 0
    key: int = 0
    value: int = 0


def read_blocks(gguf: GGUFFile) -> tuple[Block, ...]:
    """The blocks of a file, in order."""
    blocks = []
    for stage in range(N_STAGES):
        for i in range(MAX_BLOCKS):
            b = f"v.blk.{stage}.{i}."
            start, middle = (_side(gguf, f"{b}{name}.conv.weight") for name in ("dw_start", "dw_mid"))
            key, value = (_side(gguf, f"{b}attn.{name}.down_conv.weight") for name in ("key", "value"))
            if f"{b}conv_exp.weight" in gguf.tensors:
                block = Block(stage, b, Kind.EDGE, 1 + (i == 0))
            elif f"{b}attn.query.proj.weight" in gguf.tensors:
                block = Block(stage, b, Kind.ATTENTION, 1, key=key, value=value)
            elif start or f"{b}pw_exp.conv.weight" in gguf.tensors:
                block = Block(stage, b, Kind.INVERTED, 1 + (i == 0 and middle > 0), start, middle)
            else:
                break
            blocks.append(block)
    return tuple(blocks)


def _side(gguf: GGUFFile, name: str) -> int:
    info = gguf.tensors.get(name)
    return info.shape[-1] if info is not None else 0


def mobilenet_tensors(gguf: GGUFFile, blocks: tuple[Block, ...], n_text: int) -> Declared:
    """Every tensor of the encoder and its projector. Widths are those of the file's matrices."""
    n = _rows(gguf, "v.conv_stem.conv")
    yield from _convolution("v.conv_stem.conv", n, 3, 3)
    yield from _of_channels(gguf, "v.conv_stem.conv.bias", n)
    yield from _vector("v.conv_stem.bn.weight", n)
    widths = {}
    for block in blocks:
        b = block.name
        if block.kind is Kind.EDGE:
            hidden, out = _rows(gguf, f"{b}conv_exp"), _rows(gguf, f"{b}conv_pwl")
            yield from _normed(f"{b}conv_exp", f"{b}bn1", hidden, n, 3)
            yield from _normed(f"{b}conv_pwl", f"{b}bn2", out, hidden)
            n = out
        elif block.kind is Kind.ATTENTION:
            yield from _attention(gguf, block, n)
        else:
            if block.start:
                yield from _depthwise(f"{b}dw_start.conv", n, block.start, f"{b}dw_start.bn")
            hidden = _rows(gguf, f"{b}pw_exp.conv")
            yield from _normed(f"{b}pw_exp.conv", f"{b}pw_exp.bn", hidden, n)
            if block.middle:
                yield from _depthwise(f"{b}dw_mid.conv", hidden, block.middle, f"{b}dw_mid.bn")
            n = _rows(gguf, f"{b}pw_proj.conv")
            yield from _normed(f"{b}pw_proj.conv", f"{b}pw_proj.bn", n, hidden)
            yield from _of_channels(gguf, f"{b}layer_scale.gamma", n)
        widths[block.stage] = n
    joined = widths.get(N_STAGES - 2, 1) + widths.get(N_STAGES - 1, 1)
    hidden, n = (_rows(gguf, f"v.msfa.ffn.{name}.conv") for name in ("pw_exp", "pw_proj"))
    yield from _normed("v.msfa.ffn.pw_exp.conv", "v.msfa.ffn.pw_exp.bn", hidden, joined)
    yield from _normed("v.msfa.ffn.pw_proj.conv", "v.msfa.ffn.pw_proj.bn", n, hidden)
    yield from _vector("v.msfa.norm.weight", n)
    yield from _vector("mm.soft_emb_norm.weight", n)
    yield "mm.input_projection.weight", TensorSlice("mm.input_projection.weight", (n_text, n))
    for name, shape in (("embedding", (_rows(gguf, "mm.embedding"), n)), ("hard_emb_norm", (n,))):  # of no use here
        yield f"mm.{name}.weight", TensorSlice(f"mm.{name}.weight", shape, required=False)


def _attention(gguf: GGUFFile, block: Block, n: int) -> Declared:
    b = block.name
    yield from _vector(f"{b}norm.weight", n)
    n_query, size = (_rows(gguf, f"{b}attn.{name}.proj") for name in ("query", "key"))
    yield from _convolution(f"{b}attn.query.proj", n_query, n)
    for name, side in (("key", block.key), ("value", block.value)):
        if side:
            yield from _depthwise(f"{b}attn.{name}.down_conv", n, side, f"{b}attn.{name}.norm")
        yield from _convolution(f"{b}attn.{name}.proj", size, n)
    yield from _convolution(f"{b}attn.output.proj", n, n_query)
    yield from _of_channels(gguf, f"{b}layer_scale.gamma", n)


def _rows(gguf: GGUFFile, name: str) -> int:
    info = gguf.tensors.get(f"{name}.weight")
    return info.shape[0] if info is not None and info.shape else 1


def _vector(name: str, n: int) -> Declared:
    yield name, TensorSlice(name, (n,))


def _of_channels(gguf: GGUFFile, name: str, n: int) -> Declared:
    """An optional vector; its shape in files is (1, n, 1, 1)."""
    info = gguf.tensors.get(name)
    shape = info.shape if info is not None and math.prod(info.shape) == n else (n,)
    yield name, TensorSlice(name, (n,), required=False, in_file=shape)


def _normed(name: str, norm: str, n_out: int, n_in: int, side: int = 1) -> Declared:
    yield from _convolution(name, n_out, n_in, side)
    yield from _vector(f"{norm}.weight", n_out)


def _convolution(name: str, n_out: int, n_in: int, side: int = 1) -> Declared:
    """A convolution as a matrix of flat patches."""
    rows, shape = (n_out * n_in * side, side), (n_out, n_in, side, side)
    yield f"{name}.weight", TensorSlice(f"{name}.weight", rows, in_file=shape, in_graph=(n_out, n_in * side**2))


def _depthwise(name: str, n: int, side: int, norm: str) -> Declared:
    """A depthwise convolution: a row for each tap."""
    taps, shape = (side**2, n), (n, 1, side, side)
    yield f"{name}.weight", TensorSlice(f"{name}.weight", taps, transposed=True, n_experts=1, in_file=shape)
    yield from _vector(f"{norm}.weight", n)
