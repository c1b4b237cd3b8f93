"""Blocks of MobileNet V5 (Gemma 3n) in a projector file, by the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile

N_STAGES = 4
MAX_BLOCKS = 1000  # of a stage
MAX_SIDE = 31  # of a depthwise convolution; a graph has a node for each of its taps


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
    """Side of a depthwise convolution; 0: the file has none."""
    info = gguf.tensors.get(name)
    if info is None:
        return 0
    if len(info.shape) != 4 or not 1 <= info.shape[-1] <= MAX_SIDE:
        expected = f"(channels, 1, side, side), side at most {MAX_SIDE}"
        raise ModelFileError(gguf.path, f"tensor '{name}' has shape {info.shape}, expected {expected}")
    return info.shape[-1]
