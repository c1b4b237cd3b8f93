"""Linear attention layers: short convolution, gated delta rule, Kimi Delta Attention, Mamba, Mamba 2.

Short convolution: LFM 2; gated delta rule: Qwen 3.5, Qwen 3 Next; Kimi Delta Attention: Kimi Linear,
Ling 3; Mamba: Falcon Mamba, Jamba; Mamba 2: Granite 4 H, Nemotron H, Falcon H1."""

from __future__ import annotations

from logitless.graph.ops.elementwise import add, broadcast_to, mul, scaled, silu
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.pointwise import exp, sigmoid, softplus
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import concat, take_block, take_columns
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.architecture import StateKind
from logitless.models.batch import LinearAttentionParams, Memory, RecurrentMemory
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.ssm import RecurrentParams
from logitless.models.weights.weights import Weights

OUTPUT = {  # the output projection
    StateKind.SHORT_CONV: "shortconv.out_proj",
    StateKind.GATED_DELTA: "ssm_out",
    StateKind.MAMBA2: "ssm_out",
    StateKind.MAMBA: "ssm_out",
    StateKind.KDA: "attn_output",
}


def recurrent(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: Memory) -> Tensor:
    """Output of a recurrent layer for x (T, n_embd), before its output projection."""
    # no model that sees texts as a whole has such layers
    assert isinstance(memory, RecurrentMemory)
    return LAYERS[h.architecture.states.kind](b, h, r, layer, x, memory)


def short_conv(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory) -> Tensor:
    """Gated short convolution of LFM 2, (T, n_embd)."""
    n = r.n_columns
    both = b.linear("shortconv.in_proj", x)  # (T, 3 · n): before, after, rows
    before, after, rows = (take_columns(both, i * n, n) for i in range(3))
    return mul(after, memory.causal_conv(layer, mul(before, rows), b["shortconv.conv"]))


def delta_net(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory) -> Tensor:
    """Gated DeltaNet (Yang et al., 2024), (T, n_heads · size): gated delta rule, norm and output
    gate."""
    mixed = silu(memory.causal_conv(layer, b.linear("attn_qkv", x), b["ssm_conv1d"]))
    n_keys = r.n_key_heads * r.size
    q, k = (_unit(take_columns(mixed, i * n_keys, n_keys), r, h.eps) for i in range(2))
    v = reshape(take_columns(mixed, 2 * n_keys, r.n_heads * r.size), shape=(-1, r.n_heads, r.size))
    # of each group first its heads' β, then their decay
    if h.architecture.states.grouped_heads:
        both = reshape(b.linear("ssm_ba", x), shape=(-1, r.n_key_heads, 2, r.n_heads // r.n_key_heads))
        learned, steps = (_half(both, i) for i in range(2))
    else:
        learned, steps = b.linear("ssm_beta", x), b.linear("ssm_alpha", x)  # (T, n_heads)
    learned, decay = sigmoid(learned), exp(mul(_steps(b, steps), b.tensors[f"{b.prefix}ssm_a"]))
    y = memory.linear_attention(
        layer, q, k, v, decay, learned, LinearAttentionParams(r.size**-0.5, True, h.architecture.states.grouped_heads)
    )
    gate = reshape(b.linear("attn_gate", x), shape=y.shape)
    y = mul(rms_norm(y, b["ssm_norm"], eps=h.eps), silu(gate))
    return reshape(y, shape=(-1, r.n_heads * r.size))


def kda(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory) -> Tensor:
    """Kimi Delta Attention (Kimi Team, 2025), (T, n_heads · size): the gated delta rule with a decay
    of each element of a key."""
    n, names = r.n_heads * r.size, ("q", "k", "v")
    rows = concat(*(b.linear(f"attn_{name}", x) for name in names))
    # copies: constants cannot be reshaped
    copies = (mul(b[f"ssm_conv1d_{name}"], const(1.0)) for name in names)
    taps = concat(*(reshape(copy, shape=(1, n * r.n_taps)) for copy in copies))
    mixed = silu(memory.causal_conv(layer, rows, reshape(taps, shape=(3 * n, 1, r.n_taps))))
    q, k = (_unit(take_columns(mixed, i * n, n), r, h.eps) for i in range(2))
    v = reshape(take_columns(mixed, 2 * n, n), shape=(-1, r.n_heads, r.size))
    steps, gate = b.linear("ssm_f_a", x), b.linear("ssm_g_a", x)
    steps = b.linear("ssm_f_b", steps) if "ssm_f_b" in b else steps
    gate = b.linear("ssm_g_b", gate) if "ssm_g_b" in b else gate
    steps = reshape(add(steps, b.tensors[f"{b.prefix}ssm_dt.bias"]), shape=v.shape)
    factor = b.tensors[f"{b.prefix}ssm_a"]  # (1, n_heads, 1)
    if r.lower_bound:
        decay = exp(scaled(sigmoid(mul(steps, factor)), r.lower_bound))
    else:
        decay = exp(mul(softplus(steps), factor))
    learned = sigmoid(b.linear("ssm_beta", x))
    y = memory.linear_attention(layer, q, k, v, decay, learned, LinearAttentionParams(r.size**-0.5, True))
    y = mul(rms_norm(y, b["ssm_norm"], eps=h.eps), sigmoid(reshape(gate, shape=y.shape)))
    return reshape(y, shape=(-1, n))


def mamba(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory) -> Tensor:
    """Mamba (Gu and Dao, 2023), (T, n_heads · width): the selective state space model of each channel,
    with D skip and output gate."""
    n = r.n_heads * r.width
    both = b.linear("ssm_in", x)  # input of the convolution, gate
    convolved = memory.causal_conv(layer, take_columns(both, 0, n), b["ssm_conv1d"])
    bias = b.bias("ssm_conv1d")
    mixed = silu(convolved if bias is None else add(convolved, bias))
    parts, start = b.linear("ssm_x", mixed), 0
    normed = []
    for name, width in (("ssm_dt_norm", r.n_steps), ("ssm_b_norm", r.size), ("ssm_c_norm", r.size)):
        part = take_columns(parts, start, width)
        normed.append(rms_norm(part, const(1.0), eps=h.eps) if r.normed else b.norm(name, part, h))
        start += width
    steps, k, q = normed
    steps = softplus(b.linear("ssm_dt", steps))  # (T, n)
    heads = (-1, r.n_heads, r.width)
    decay = exp(mul(reshape(steps, shape=(-1, r.n_heads, 1, r.width)), b.tensors[f"{b.prefix}ssm_a"]))
    v = reshape(mul(mixed, steps), shape=heads)
    k, q = (reshape(part, shape=(-1, 1, r.size)) for part in (k, q))
    ones = broadcast_to(const(1.0), shape=v.shape[:2])
    y = memory.linear_attention(layer, q, k, v, decay, ones, LinearAttentionParams(grouped=True))
    y = add(reshape(y, shape=(-1, n)), mul(mixed, b.tensors[f"{b.prefix}ssm_d"]))
    return mul(y, silu(take_columns(both, n, n)))


def mamba2(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory) -> Tensor:
    """Mamba 2 (Dao and Gu, 2024), (T, n_heads · width): SSD with D skip, output gate and grouped
    norm."""
    rows, n, n_keys = x.shape[0], r.n_heads * r.width, r.n_key_heads * r.size
    both = b.linear("ssm_in", x)  # gate, input of the convolution, steps
    convolved = memory.causal_conv(layer, take_columns(both, n, r.n_columns), b["ssm_conv1d"])
    bias = b.bias("ssm_conv1d")
    mixed = silu(convolved if bias is None else add(convolved, bias))
    v = reshape(take_columns(mixed, 0, n), shape=(rows, r.n_heads, r.width))
    k, q = (reshape(take_columns(mixed, n + i * n_keys, n_keys), shape=(rows, r.n_key_heads, r.size)) for i in range(2))
    steps = _steps(b, take_columns(both, n + r.n_columns, r.n_heads))
    decay = exp(mul(steps, b.tensors[f"{b.prefix}ssm_a"]))
    y = memory.linear_attention(layer, q, k, v, decay, steps, LinearAttentionParams(grouped=True))
    y = add(y, mul(v, b.tensors[f"{b.prefix}ssm_d"]))
    y = mul(silu(take_columns(both, 0, n)), reshape(y, shape=(rows, n)))
    if "ssm_norm" not in b:  # Falcon H1 may do without
        return y
    groups = reshape(y, shape=(rows, r.n_key_heads, n // r.n_key_heads))
    return mul(reshape(rms_norm(groups, const(1.0), eps=h.eps), shape=y.shape), b["ssm_norm"])


LAYERS = {
    StateKind.SHORT_CONV: short_conv,
    StateKind.GATED_DELTA: delta_net,
    StateKind.MAMBA2: mamba2,
    StateKind.MAMBA: mamba,
    StateKind.KDA: kda,
}


def _steps(b: Weights, x: Tensor) -> Tensor:
    """Time steps Δ (T, n_heads)."""
    return softplus(add(x, b.tensors[f"{b.prefix}ssm_dt.bias"]))


def _half(both: Tensor, i: int) -> Tensor:
    """Half i of (T, groups, 2, heads per group) as (T, n_heads)."""
    part = take_block(both, start=(0, 0, i, 0), shape=(*both.shape[:2], 1, both.shape[3]))
    return reshape(part, shape=(both.shape[0], -1))


def _unit(x: Tensor, r: RecurrentParams, eps: float) -> Tensor:
    """L2-normalised heads (T, n_key_heads, size)."""
    heads = reshape(x, shape=(-1, r.n_key_heads, r.size))
    return rms_norm(heads, const(r.size**-0.5), eps=eps / r.size)
