"""Instructions of layers that keep a state."""

from __future__ import annotations

from backends.cpu.lowering import At, lower
from backends.cpu.pool import Instruction, bits
from graph.tensor import Tensor

COLUMNS, WIDTH, AT_ONCE, SAVED = 64, 32, 4, 16  # kernels/recurrent.py


@lower("text_states")
def _(t: Tensor, at: At) -> list[Instruction]:
    return [Instruction("text_states", (at(t.src[0]), at(t), t.shape[1], t.attrs["length"]), t.shape[1], 4096)]


@lower("causal_conv")
def _(t: Tensor, at: At) -> list[Instruction]:
    rows, columns, size = *t.shape, t.src[1].shape[2]
    args = (*map(at, t.src), at(t), rows, columns, size)
    return [Instruction("causal_conv", args, -(-columns // COLUMNS), 1, 4 * size * COLUMNS)]


@lower("causal_conv_back")
def _(t: Tensor, at: At) -> list[Instruction]:
    (rows, columns), size = t.src[1].shape, t.src[2].shape[2]
    args = (*map(at, t.src), at(t), rows, columns, size)
    return [Instruction("causal_conv_back", args, -(-columns // COLUMNS), 1, 4 * size * COLUMNS)]


@lower("gated_delta_rule")
def _(t: Tensor, at: At) -> list[Instruction] | None:
    (rows, heads, width), (_, k_heads, size) = t.shape, t.src[0].shape
    if size % AT_ONCE:
        return None
    args = (*map(at, t.src), at(t), rows, heads, k_heads, size, width, bits(t.attrs["scale"]))
    return [Instruction("gated_delta_rule", args, heads * -(-width // WIDTH), 1, 4 * (size + 2) * WIDTH)]


@lower("gated_delta_rule_back")
def _(t: Tensor, at: At) -> list[Instruction]:
    (rows, heads, width), (_, k_heads, size) = t.src[3].shape, t.src[1].shape
    args = (*map(at, t.src), at(t), rows, heads, k_heads, size, width, bits(t.attrs["scale"]))
    states = -(-rows // SAVED) + SAVED + 2
    return [Instruction("gated_delta_rule_back", args, k_heads, 1, 4 * (states * size * width + (SAVED + 2) * width))]
