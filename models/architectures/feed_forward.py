"""Feed-forward blocks: dense (GLU or MLP), and MoE with its router."""

from __future__ import annotations

from logitless.graph.ops.elementwise import (
    add,
    broadcast_to,
    gelu,
    glu_clamped,
    mul,
    scale,
    scaled,
    silu,
    softcap,
    sub,
    sum_to,
)
from logitless.graph.ops.gather import get_ids
from logitless.graph.ops.moe import (
    expert_gather,
    expert_order,
    expert_rows,
    expert_scatter,
    expert_sum,
    expert_weights,
    top_experts,
)
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.pointwise import clamp, div, elu, exp, neg, relu, sigmoid, softplus, sqrt, square, step
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import concat, take_columns
from logitless.graph.ops.training.loss import softmax
from logitless.graph.tensor import Tensor, const
from logitless.models.architectures.architecture import Activation, RouterScore
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.moe import Experts
from logitless.models.weights.weights import Weights

ALPHA = 1.702  # of gpt-oss's sigmoid
JITTER = 0.01  # of SparseMixer's router
AWAY = 1e9  # the mask; probabilities and biases are small


def feed_forward(b: Weights, h: Hparams, layer: int, x: Tensor, before: Tensor) -> Tensor:
    """Output (T, n_embd) of a layer's feed-forward block: dense, MoE, or both in parallel. x:
    the block's normalised input; `before`: the residual stream before that norm, or before the
    layer where the router reads that."""
    experts = h.experts_of(layer)
    if not experts:
        return dense(b, h, x, layer=layer)
    if not h.architecture.moe.parallel_dense:
        if h.architecture.moe.early_experts:
            before = b.norm("ffn_norm_exps", before, h)
            return add(moe(b, h, experts, before, before, layer), dense(b, h, x))
        y = moe(b, h, experts, x, before if h.architecture.moe.early_router else x, layer)
        return scale(add(y, dense(b, h, x)), factor=0.5**0.5) if "ffn_up" in b else y
    router_input = scaled(rms_norm(before, b.tensors[f"{b.prefix}ffn_gate_inp.scale"], eps=h.eps), h.n_embd**-0.5)
    y = moe(b, h, experts, b.norm("pre_ffw_norm_2", before, h), router_input, layer)
    return add(b.norm("post_ffw_norm_1", dense(b, h, x), h), b.norm("post_ffw_norm_2", y, h))


def dense(b: Weights, h: Hparams, x: Tensor, which: str = "", layer: int = 0) -> Tensor:
    """Dense FFN (T, n_embd): GLU (SwiGLU, GeGLU: Shazeer, 2020) or a plain MLP. `which`:
    "_shexp" for the shared experts."""
    if f"ffn_gate{which}" in b:
        gate, up = b.linear(f"ffn_gate{which}", x), b.linear(f"ffn_up{which}", x)
        limit = h.glu_limits[layer][1] if h.glu_limits else 0.0
        inner = b.norm(f"ffn_sub_norm{which}", glu(h, gate, up, limit), h)
        return b.linear(f"ffn_down{which}", inner)
    up = b.linear(f"ffn_up{which}", x)
    return b.linear(f"ffn_down{which}", xielu(up, *h.xielu[layer]) if h.xielu else activated(h, up, gated=False))


def glu(h: Hparams, gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Gated activation; `limit`: clamp of both factors, 0 for none (Step 3.5), or of gate and up (Maple)."""
    if h.activation is Activation.SITU:
        of_gate, of_up = h.situ
        up = softcap(up, cap=of_up) if of_up else up
        return mul(mul(softcap(gate, cap=of_gate), sigmoid(gate)), up)
    if h.architecture.ffn.glu_limit:
        return glu_clamped(gate, up, alpha=ALPHA, limit=h.architecture.ffn.glu_limit)
    before = h.architecture.ffn.clamps_input
    gate = gate if before else activated(h, gate)
    if limit:
        low = -AWAY if before else -limit - 1.0  # SiLU is above -1
        gate, up = clamp(gate, low=low, high=limit), clamp(up, low=-limit, high=limit)
    return mul(activated(h, gate) if before else gate, up)


def activated(h: Hparams, x: Tensor, *, gated: bool = True) -> Tensor:
    kind = h.activation if gated else h.architecture.ffn.ungated or h.activation
    if kind in (Activation.RELU, Activation.RELU2):
        return square(relu(x)) if kind is Activation.RELU2 else relu(x)
    return gelu(x) if kind is Activation.GELU else silu(x)


def xielu(x: Tensor, below: float, above: float, beta: float) -> Tensor:
    """xIELU: above · x² for x > 0, below · (eˣ − 1 − x) for x < 0, plus β x (Huang and Schlag,
    2024)."""
    negative = neg(relu(neg(x)))
    curved = add(scale(square(relu(x)), factor=above), scale(sub(elu(negative), negative), factor=below))
    return add(curved, scale(x, factor=beta))


def moe(b: Weights, h: Hparams, e: Experts, x: Tensor, router_input: Tensor, layer: int) -> Tensor:
    """MoE output (T, n_embd): the weighted sum of each row's top experts, and the shared
    experts."""
    ids, weights = route(b, e, router_input)
    order = expert_order(ids, n=e.n)
    rows = b.linear("ffn_latent_down", x) if e.n_latent else x
    if h.architecture.moe.weighted_input:
        each = broadcast_to(reshape(rows, shape=(rows.shape[0], 1, -1)), shape=(*weights.shape, rows.shape[1]))
        rows = reshape(mul(each, reshape(weights, shape=(*weights.shape, 1))), shape=(-1, rows.shape[1]))
        weights = broadcast_to(const(1.0), shape=weights.shape)
    rows = expert_rows(rows, order)  # (T · n_used, n_embd)
    inner = b.experts("ffn_up_exps", rows, order, e.n, e.n_ff)
    if not h.architecture.ffn.glu:
        inner = activated(h, inner)
    else:
        gate = b.experts("ffn_gate_exps", rows, order, e.n, e.n_ff)
        inner = glu(h, gate, inner, h.glu_limits[layer][0] if h.glu_limits else 0.0)
    y = expert_sum(b.experts("ffn_down_exps", inner, order, e.n, e.n_latent or h.n_embd), weights, order)
    y = b.linear("ffn_latent_up", b.norm("ffn_latent_norm", y, h)) if e.n_latent else y
    if e.n_ff_chunk:
        y = add(y, scaled(adjugate(b, h, e, x, ids, weights), e.chunk_scale))
    if not e.n_ff_shared:
        return y
    shared = dense(b, h, x, "_shexp", layer)
    if "ffn_gate_inp_shexp" in b:  # Qwen's
        shared = mul(shared, sigmoid(b.linear("ffn_gate_inp_shexp", x)))
    y = add(y, shared)
    return scale(y, factor=0.5) if h.architecture.moe.average_shared else y


def adjugate(b: Weights, h: Hparams, e: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Adjugate experts of the experts `ids` (T, n_used), each with the sum of their weights (Wu et
    al., 2025: Grove MoE)."""
    n = min(e.n_used, e.n_chunks)
    by_expert = expert_scatter(weights, ids, n=e.n)
    grouped = reshape(by_expert, shape=(-1, e.per_chunk))
    sums = reshape(sum_to(grouped, shape=(grouped.shape[0], 1)), shape=(x.shape[0], e.n_chunks))
    chunks = top_experts(sums, n=n)
    order = expert_order(chunks, n=e.n_chunks)
    rows = expert_rows(x, order)
    gate, up = (b.experts(f"ffn_{name}_chexps", rows, order, e.n_chunks, e.n_ff_chunk) for name in ("gate", "up"))
    y = b.experts("ffn_down_chexps", glu(h, gate, up, 0.0), order, e.n_chunks, h.n_embd)
    return expert_sum(y, expert_gather(sums, chunks), order)


def route(b: Weights, e: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Router: expert ids and weights (T, n_used) of each row. Softmax (Mixtral: Jiang et al.,
    2024) or sigmoid probabilities; a bias on the scores may balance the choice (DeepSeek-AI,
    2024)."""
    logits = b.linear("ffn_gate_inp", x)  # (T, n)
    if e.router is RouterScore.SIGMOID:
        # softmax over the chosen log-sigmoids normalises their sigmoids
        logits = log_sigmoid(logits)
    if e.router is RouterScore.ROOT_SOFTPLUS:
        probs = logits = sqrt(softplus(logits))
    else:
        probs = exp(logits) if e.router is RouterScore.SIGMOID else softmax(logits)
    score_bias = b.bias("exp_probs_b")
    scores = add(probs, score_bias) if score_bias is not None else logits if e.n_groups == 1 else probs
    if "ffn_gate_tid2eid" in b:
        assert b.tokens is not None
        ids = get_ids(b["ffn_gate_tid2eid"], b.tokens, limit=e.n)
    else:
        ids = top_experts(scores if e.n_groups == 1 else mask_other_groups(e, scores), n=e.n_used)
    if e.router is RouterScore.MIXER:
        weights = mixer_weights(logits, ids)
    elif e.router is RouterScore.ROOT_SOFTPLUS:
        weights = expert_gather(probs, ids)
        weights = div(weights, sum_to(weights, shape=(x.shape[0], 1))) if e.weights_norm else weights
    else:
        weights = expert_weights(logits, ids) if e.weights_norm else expert_gather(probs, ids)
    if (times := b.scale("ffn_down_exps")) is not None:  # per-expert output scale (Gemma 4)
        weights = mul(weights, expert_gather(broadcast_to(times, shape=logits.shape), ids))
    return ids, scaled(weights, e.scale)


def mixer_weights(logits: Tensor, ids: Tensor) -> Tensor:
    """SparseMixer: the softmax (T, n_used) of each chosen expert among those whose logits (T, n) are within 2 % of
    its own and not above it."""
    best, weights = expert_gather(logits, ids), []
    for i in range(ids.shape[1]):
        own = broadcast_to(take_columns(best, i, 1), shape=logits.shape)
        behind, size = sub(own, logits), add(relu(logits), relu(neg(logits)))
        far = step(sub(behind, scale(add(own, relu(sub(size, own))), factor=2 * JITTER)))
        near = sub(const(1.0), add(far, step(neg(behind))))
        odds = mul(exp(neg(relu(behind))), near)
        weights.append(div(const(1.0), sum_to(odds, shape=(logits.shape[0], 1))))
    return concat(*weights)


def mask_other_groups(e: Experts, scores: Tensor) -> Tensor:
    """Router scores (T, n) with all but each row's best expert groups masked by a large negative
    number (DeepSeek-AI, 2024: V3)."""
    rows, size = scores.shape[0], e.n // e.n_groups
    each = reshape(scores, shape=(rows * e.n_groups, size))
    best = sum_to(expert_gather(each, top_experts(each, n=2)), shape=(rows * e.n_groups, 1))
    groups = top_experts(reshape(best, shape=(rows, e.n_groups)), n=e.n_groups_used)
    ones = broadcast_to(const(1.0), shape=groups.shape)
    # 0 for the best
    away = scale(sub(expert_scatter(ones, groups, n=e.n_groups), const(1.0)), factor=AWAY)
    return reshape(add(each, reshape(away, shape=(rows * e.n_groups, 1))), shape=scores.shape)


def log_sigmoid(x: Tensor) -> Tensor:
    return neg(softplus(neg(x)))
