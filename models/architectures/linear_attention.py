"""Linear attention layers: short convolution, gated delta rule, Kimi Delta Attention, Mamba, Mamba 2, RWKV.

Short convolution: LFM 2; gated delta rule: Qwen 3.5, Qwen 3 Next; Kimi Delta Attention: Kimi Linear,
Ling 3; Mamba: Falcon Mamba, Jamba; Mamba 2: Granite 4 H, Nemotron H, Falcon H1; RWKV 6 and 7, and QRWKV 6
and ARWKV 7, which are Qwen 2 with their layers for attention."""

from __future__ import annotations

from logitless.graph.ops.elementwise import add, broadcast_to, mul, scaled, silu, softcap, sub, sum_to
from logitless.graph.ops.norm import centred, rms_norm
from logitless.graph.ops.pointwise import exp, neg, relu, sigmoid, softplus, square
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
    StateKind.PLAMO2: "ssm_out",
    StateKind.KDA: "attn_output",
    StateKind.RWKV6: "time_mix_output",
    StateKind.RWKV7: "time_mix_output",
}
GROUP_EPS = 64e-5  # of RWKV's norm of heads


def recurrent(
    b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: Memory, first_values: list[Tensor]
) -> Tensor:
    """Output of a recurrent layer for x (T, n_embd), before its output projection. The first layer leaves its
    values in `first_values`, where the others mix them with their own (RWKV 7)."""
    # no model that sees texts as a whole has such layers
    assert isinstance(memory, RecurrentMemory)
    if h.architecture.states.kind is StateKind.RWKV7:
        return rwkv7(b, r, layer, x, memory, first_values)
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
    y = mul(rms_norm(y, b["ssm_norm"], eps=h.eps), (sigmoid if h.architecture.states.sigmoid_gate else silu)(gate))
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
        steps = scaled(steps, -1.0 if h.architecture.states.negated else 1.0)
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


def plamo2(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory) -> Tensor:
    """Mamba of PLaMo 2, (T, n_heads · width): a decay and steps for each head, as Mamba 2, from norms of a projection,
    as Mamba; no convolution of keys, no norm behind the gate."""
    both = reshape(b.linear("ssm_in", x), shape=(-1, r.n_heads, 2, r.width))
    gate, rows = (_half(both, i) for i in range(2))
    mixed = silu(memory.causal_conv(layer, rows, b["ssm_conv1d"]))
    parts, v = b.linear("ssm_x", mixed), reshape(mixed, shape=(-1, r.n_heads, r.width))
    k, q = (b.norm(f"ssm_{'bc'[i]}_norm", take_columns(parts, i * r.size, r.size), h) for i in range(2))
    steps = b.norm("ssm_dt_norm", take_columns(parts, 2 * r.size, r.n_steps), h)
    steps = softplus(b.linear("ssm_dt", steps))
    decay = exp(mul(steps, b.tensors[f"{b.prefix}ssm_a"]))
    k, q = (reshape(part, shape=(-1, 1, r.size)) for part in (k, q))
    y = memory.linear_attention(layer, q, k, v, decay, steps, LinearAttentionParams(grouped=True))
    y = add(y, mul(v, b.tensors[f"{b.prefix}ssm_d"]))
    return mul(reshape(y, shape=gate.shape), silu(gate))


def rwkv6(b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory) -> Tensor:
    """Time mix of RWKV 6 (Peng et al., 2024), (T, n_embd), or of QRWKV 6, whose keys are times 1 − decay for
    a bonus."""
    change, heads = _change(layer, x, memory), (-1, r.n_heads, r.size)
    low = softcap(b.linear("time_mix_w1", add(mul(change, b["time_mix_lerp_x"]), x)), cap=1.0)  # tanh
    rank, inputs = low.shape[1] // 5, []
    for i in range(5):
        own = add(b.linear(f"time_mix_w2.{i}", take_columns(low, i * rank, rank)), b[f"time_mix_lerp.{i}"])
        inputs.append(add(mul(own, change), x))
    steps = b.linear("time_mix_decay_w2", softcap(b.linear("time_mix_decay_w1", inputs[0]), cap=1.0))
    decay = reshape(exp(neg(exp(add(steps, b["time_mix_decay"])))), shape=heads)
    names = ("key", "value", "receptance", "gate")
    k, v, q, gate = (b.linear(f"time_mix_{name}", x) for name, x in zip(names, inputs[1:], strict=True))
    k, v, q = _repeated(k, r), _repeated(v, r), reshape(q, shape=heads)
    if "time_mix_first" in b:
        bonus = broadcast_to(b["time_mix_first"], shape=v.shape)
        y = memory.linear_attention(layer, q, k, v, decay, bonus, LinearAttentionParams())
        return mul(_norm_of_heads(b, y), silu(gate))
    k, ones = sub(k, mul(k, decay)), broadcast_to(const(1.0), shape=v.shape[:2])
    y = memory.linear_attention(layer, q, k, v, decay, ones, LinearAttentionParams(r.size**-0.5))
    return mul(reshape(y, shape=x.shape), sigmoid(gate))


def rwkv7(
    b: Weights, r: RecurrentParams, layer: int, x: Tensor, memory: RecurrentMemory, first_values: list[Tensor]
) -> Tensor:
    """Time mix of RWKV 7 (Peng et al., 2025), (T, n_embd): the generalised delta rule."""
    change, heads = _change(layer, x, memory), (-1, r.n_heads, r.size)

    def mixed(i: int) -> Tensor:
        return add(mul(change, b[f"time_mix_lerp.{i}"]), x)

    def low_rank(name: str, x: Tensor) -> Tensor:
        return add(b.linear(f"time_mix_{name}2", x), b[f"time_mix_{name}0"])

    steps = low_rank("w", softcap(b.linear("time_mix_w1", mixed(1)), cap=1.0))
    decay = reshape(exp(scaled(sigmoid(steps), -0.606531)), shape=heads)
    q, k, v = (b.linear(f"time_mix_{name}", mixed(i)) for name, i in (("receptance", 0), ("key", 2), ("value", 3)))
    if first_values:
        share = sigmoid(low_rank("v", b.linear("time_mix_v1", mixed(3))))
        v = add(v, mul(sub(first_values[0], v), share))
    else:
        first_values.append(v)
    rate = sigmoid(low_rank("a", b.linear("time_mix_a1", mixed(4))))  # of learning in context
    read = rms_norm(reshape(mul(k, b["time_mix_k_k"]), shape=heads), const(r.size**-0.5), eps=1e-24 / r.size)
    own = mul(k, b["time_mix_k_a"])
    q, k, v = (reshape(t, shape=heads) for t in (q, add(k, sub(mul(rate, own), own)), v))
    both = concat(
        *(reshape(t, shape=(-1, 1, r.size)) for t in (scaled(read, -1.0), mul(read, reshape(rate, shape=heads))))
    )
    both = reshape(both, shape=(-1, r.n_heads, 2, r.size))
    y = memory.linear_attention(layer, q, k, v, decay, both, LinearAttentionParams(delta=True))
    y = _norm_of_heads(b, y)
    weights = sum_to(mul(mul(k, q), b["time_mix_r_k"]), shape=(*k.shape[:2], 1))
    y = add(y, reshape(mul(v, weights), shape=x.shape))
    if "time_mix_g1" not in b:
        return y
    return mul(y, b.linear("time_mix_g2", sigmoid(b.linear("time_mix_g1", mixed(5)))))


def channel_mix(
    b: Weights, h: Hparams, r: RecurrentParams, layer: int, x: Tensor, mixed: Tensor, memory: Memory
) -> Tensor:
    """Residual stream (T, n_embd) after a layer of RWKV: x plus the time mix `mixed` plus the channel mix."""
    assert isinstance(memory, RecurrentMemory)
    x = add(x, b.linear(OUTPUT[h.architecture.states.kind], mixed))
    y = b.norm("ffn_norm", x, h)
    change = _change(layer, y, memory, 1)
    inner = square(relu(b.linear("channel_mix_key", add(mul(change, b["channel_mix_lerp_k"]), y))))
    output = b.linear("channel_mix_value", inner)
    if "channel_mix_receptance" in b:  # version 6
        gate = b.linear("channel_mix_receptance", add(mul(change, b["channel_mix_lerp_r"]), y))
        output = mul(output, sigmoid(gate))
    x = add(x, output)
    return scaled(x, 0.5) if r.rescale_period and (layer + 1) % r.rescale_period == 0 else x


def _change(layer: int, x: Tensor, memory: RecurrentMemory, which: int = 0) -> Tensor:
    """Token shift: x (T, n_embd) of the token before, minus x."""
    n = x.shape[1]
    taps = concat(*(broadcast_to(const(tap), shape=(n, 1)) for tap in (1.0, -1.0)))
    return memory.causal_conv(layer, x, reshape(taps, shape=(n, 1, 2)), which)


def _repeated(x: Tensor, r: RecurrentParams) -> Tensor:
    """Keys or values (T, n_key_heads · size) of all heads, (T, n_heads, size)."""
    each = (x.shape[0], r.n_key_heads, r.n_heads // r.n_key_heads, r.size)
    if each[2] > 1:
        x = broadcast_to(reshape(x, shape=(*each[:2], 1, r.size)), shape=each)
    return reshape(x, shape=(-1, r.n_heads, r.size))


def _norm_of_heads(b: Weights, y: Tensor) -> Tensor:
    """Layer norm of each head (T, H, D), where the file has it, as (T, H · D)."""
    flat = (y.shape[0], y.shape[1] * y.shape[2])
    if "time_mix_ln" not in b:
        return reshape(y, shape=flat)
    y = reshape(rms_norm(centred(y), const(1.0), eps=GROUP_EPS), shape=flat)
    bias = b.bias("time_mix_ln")
    y = mul(y, b["time_mix_ln"])
    return y if bias is None else add(y, bias)


LAYERS = {
    StateKind.SHORT_CONV: short_conv,
    StateKind.GATED_DELTA: delta_net,
    StateKind.MAMBA2: mamba2,
    StateKind.MAMBA: mamba,
    StateKind.PLAMO2: plamo2,
    StateKind.KDA: kda,
    StateKind.RWKV6: rwkv6,
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
