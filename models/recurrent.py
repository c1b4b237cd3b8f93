"""Layers that keep a state of each sequence: short convolutions (LFM 2), gated delta nets (Qwen 3.5)."""

from __future__ import annotations

from graph.ops.elementwise import add, mul, silu
from graph.ops.norm import rms_norm
from graph.ops.pointwise import exp, sigmoid, softplus
from graph.ops.shape import reshape
from graph.ops.window import take_block
from graph.tensor import Tensor, const
from models.batch import Memory, States
from models.hparams import Hparams
from models.recurrent_params import Recurrent
from models.weights import Weights

OUTPUT = {"conv": "shortconv.out_proj", "delta": "ssm_out"}  # what the layer ends with


def recurrent(b: Weights, h: Hparams, r: Recurrent, layer: int, x: Tensor, memory: Memory) -> Tensor:
    """Rows x (T, n_embd), normalised, as the layer's last product takes them."""
    assert isinstance(memory, States)  # no model that sees texts as a whole has such layers
    return (short_conv if h.kind.recurrent == "conv" else delta_net)(b, h, r, layer, x, memory)


def columns(x: Tensor, start: int, stop: int) -> Tensor:
    return take_block(x, start=(0, start), shape=(x.shape[0], stop - start))


def short_conv(b: Weights, h: Hparams, r: Recurrent, layer: int, x: Tensor, memory: States) -> Tensor:
    """(T, n_embd): a convolution of rows that are gated before and after."""
    n = r.n_columns
    both = b.linear("shortconv.in_proj", x)  # (T, 3 · n): before, after, rows
    before, after, rows = (columns(both, i * n, (i + 1) * n) for i in range(3))
    return mul(after, memory.convolve(layer, mul(before, rows), b["shortconv.conv"]))


def delta_net(b: Weights, h: Hparams, r: Recurrent, layer: int, x: Tensor, memory: States) -> Tensor:
    """(T, n_heads · size): what each head recalls, normalised and gated (Yang et al., 2024)."""
    mixed = silu(memory.convolve(layer, b.linear("attn_qkv", x), b["ssm_conv1d"]))
    n_keys = r.n_key_heads * r.size
    q, k = (_unit(columns(mixed, i * n_keys, (i + 1) * n_keys), r, h.eps) for i in range(2))
    v = reshape(columns(mixed, 2 * n_keys, r.n_columns), shape=(-1, r.n_heads, r.size))
    learned = sigmoid(b.linear("ssm_beta", x))  # (T, n_heads)
    steps = softplus(add(b.linear("ssm_alpha", x), b.tensors[f"{b.prefix}ssm_dt.bias"]))
    decay = exp(mul(steps, b.tensors[f"{b.prefix}ssm_a"]))
    y = memory.recall(layer, q, k, v, decay, learned)
    gate = reshape(b.linear("attn_gate", x), shape=y.shape)
    y = mul(rms_norm(y, b["ssm_norm"], eps=h.eps), silu(gate))
    return reshape(y, shape=(-1, r.n_heads * r.size))


def _unit(x: Tensor, r: Recurrent, eps: float) -> Tensor:
    """(T, n_key_heads, size): heads of length 1."""
    heads = reshape(x, shape=(-1, r.n_key_heads, r.size))
    return rms_norm(heads, const(r.size**-0.5), eps=eps / r.size)
