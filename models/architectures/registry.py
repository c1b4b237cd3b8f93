"""What the name of an architecture says that its files do not: one row for each, of which
models/architectures/decoder.py makes the
layers.

The facts are llama.cpp's (`src/llama-model.cpp` and `src/models/`), whose results
tests/models/architectures/test_llama_cpp.py compares with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MUST = -1  # a number that has no default


@dataclass(frozen=True, slots=True)
class Architecture:
    interleaved: bool = False  # rotary pairs are neighbours; else halves of a head
    layer_norm: bool = False  # norms take the mean away and may have a bias (Ba et al., 2016); else only scale
    before: bool = True  # what attention and the feed-forward block get is normalised
    after: bool = False  # what they give is
    parallel: bool = False  # without a norm of its own the feed-forward block gets what attention gets
    may_be_parallel: bool = False  # with one it may begin with the same rows: the file must say
    second_norm: bool = False  # the file may have a norm of attention's own, and the first is the feed-forward block's
    ffn_norm: str = "ffn_norm"  # the norm before the feed-forward block, as the file calls it
    gated: bool = True  # the feed-forward block multiplies what is activated by a second product
    activation: str = "silu"  # silu, gelu, relu2 (the square of what is positive) or xielu (Hparams.xielu)
    head_norm: bool | None = None  # queries and keys have a norm of each head; None: where the file has one
    row_norm: bool = False  # queries and keys have a norm of all heads together
    norm_after_rope: bool = False  # that of each head comes when they are turned
    norm_for_head: bool = False  # that of each head has a row of weights for each, and takes the mean away
    experts: bool | None = None  # always, never (None), or where the file has them (False)
    several_shared: bool = False  # the width that the file names is that of one of the experts that all rows have
    mean_with_shared: bool = False  # what a row's experts give and what the shared one does count a half each
    experts_beside: bool = False  # of a dense block, each with norms of its own; a norm of what they give says who
    n_ff_of_expert: bool = True  # an expert's width has a key of its own
    gating: str | None = "softmax"  # of experts, where the file does not say: softmax or sigmoid; None: it must
    weights_norm: bool | None = True  # a row's experts count 1 together; None: where the file says so
    window: int | None = None  # of sliding-window layers, where the file does not say (MUST: it must); None: none has
    window_period: int = 0  # every so many-th layer sees everything, where the file does not say
    first_sees_all: bool = False  # the first of each so many layers, not the last
    local_base: float | None = None  # sliding-window layers turn unscaled, by this base; 0: that of the others
    local_rope_only: bool = False  # layers that see everything do without rotary embedding, if others do not
    dense_turn: bool = False  # but those without experts, before the others, turn
    nope_period: int = 0  # every so many-th layer does without
    base_by_alpha: bool = False  # the base grows by what the file calls alpha
    yarn_softmax: bool = False  # YaRN does not make longer what it turns: what is weighed grows instead
    latent: bool = False  # keys and values of all heads are made of one short row a token (models/architectures/mla.py)
    attention_temperature: bool = False  # beyond the original context queries may grow with their position
    scales: bool = False  # the file may scale what goes in, what blocks add, what is weighed and what comes out
    multiplied_logits: bool = False  # what it calls a scale of logits multiplies them; else they are divided by it
    embedding_norm: bool = False  # embeddings are normalised, and not again before the first attention
    embedding_by_root: bool = False  # embeddings are multiplied by the root of their size
    attn_softcap: float | None = None  # of what is weighed, where the file does not say; None: none
    final_softcap: float | None = None  # of logits, the same
    glu_limit: float = (
        0.0  # what joins gate and up is clamped there (logitless.graph.ops.elementwise.glu_clamped); 0: is not
    )
    sinks: bool = False  # attention has sinks
    unscaled: bool = False  # queries times keys are weighed as they are
    value_norm: bool = False  # each head's values are normalised, without a weight
    skips: bool = False  # layers may do without attention, or have a matrix in its place, or do nothing
    keys_as_values: bool = False  # layers may do without a matrix of values: these are the keys, before their norm
    shares_keys: bool = False  # the last layers may see the keys and values of earlier ones
    inputs_of_layers: bool = False  # each layer may be given an embedding of its own of the tokens
    after_sum: bool = False  # not what a sublayer gives is normalised, but its sum with the residual stream (BERT)
    # beside the residual stream run others, and only the largest gates count (models/architectures/gemma3n.py)
    altup: bool = False
    learned_positions: bool = False  # positions are vectors that are added to the embeddings, and turn nothing
    head_of_mean: bool = False  # a head that ranks gets the mean of a text's rows, and activates it as blocks do
    head_softmax: bool = False  # what it says of a pair are the chances of its classes
    gated_attention: bool = False  # each query has a gate behind it, by whose sigmoid what its head gets is multiplied
    gate_of_input: bool = False  # that gate is a product of its own (attn_gate)
    heads_by_group: bool = (
        False  # of the delta rule: those that share keys stand side by side (models/architectures/linear_attention.py)
    )
    recurrent: str = ""  # layers that keep a state (models/architectures/linear_attention.py): conv, delta or mamba
    all_recurrent: bool = False  # all layers do; else those that the file says
    attends: bool = True  # some layers attend, and have feed-forward blocks
    sublayers_apart: bool = False  # a layer keeps a state, attends, or has a feed-forward block
    rotary: bool = True  # layers that attend turn queries and keys, unless the positions are learned
    may_do_without_rotary: bool = False  # the file may say that they do not
    output_norm: str = "output_norm"  # the norm of what the last layer gives, as the file calls it
    # files may have a block that predicts one token more (models/architectures/mtp.py), with what a layer has
    nextn: bool = False
    nextn_layer_norm: bool = False  # the norm behind it takes the mean away
    causal: bool = True  # false: a text's rows see all of it; the model makes vectors, not texts


_A = Architecture
_LLAMA = _A(interleaved=True)
_GEMMA = _A(activation="gelu", embedding_by_root=True)
_GEMMA3 = replace(_GEMMA, after=True, head_norm=True, window=0, window_period=6, local_base=10000.0)
_GEMMA3N = replace(
    _GEMMA,
    after=True,
    head_norm=True,
    window=MUST,
    window_period=5,
    local_base=10000.0,
    final_softcap=30.0,
    unscaled=True,
    value_norm=True,
    shares_keys=True,
    inputs_of_layers=True,
)
_EXAONE4 = _A(head_norm=True, window_period=4, local_rope_only=True)
_COHERE = _A(interleaved=True, layer_norm=True, norm_for_head=True, parallel=True, multiplied_logits=True)
_COHERE2 = replace(_COHERE, window=MUST, window_period=4, local_rope_only=True)
_HUNYUAN = _A(head_norm=True, norm_after_rope=True)
_GELU = _A(layer_norm=True, gated=False, activation="gelu")
_GPT2 = replace(_GELU, head_norm=False, learned_positions=True)
_QWEN35 = _A(ffn_norm="post_attention_norm", head_norm=True, gated_attention=True, recurrent="delta", nextn=True)
_DEEPSEEK2 = _A(
    interleaved=True,
    latent=True,
    experts=True,
    weights_norm=None,
    attention_temperature=True,
    yarn_softmax=True,
    nextn=True,
)
_GRANITE = _A(interleaved=True, scales=True, may_do_without_rotary=True)
_NEMOTRON_H = _A(gated=False, activation="relu2", recurrent="mamba", sublayers_apart=True, rotary=False)
_LFM2 = _A(head_norm=True, recurrent="conv", output_norm="token_embd_norm")
_NOMIC = _A(layer_norm=True, head_norm=False, after_sum=True, causal=False)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _A(interleaved=True, experts=False, n_ff_of_expert=False),
    "deci": _A(interleaved=True, skips=True),
    "mistral3": _A(interleaved=True, experts=False, n_ff_of_expert=False, attention_temperature=True),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, experts=True, n_ff_of_expert=False),
    "granitehybrid": replace(_GRANITE, experts=False, n_ff_of_expert=False, recurrent="mamba"),
    "minicpm": _A(interleaved=True, scales=True),
    "smollm3": _A(interleaved=True, nope_period=4),
    "ernie4_5": _LLAMA,
    "internlm2": _LLAMA,
    "xverse": _LLAMA,
    "chatglm": _LLAMA,
    "arcee": _A(interleaved=True, gated=False, activation="relu2"),
    "glm4": _A(interleaved=True, after=True),
    "qwen2": _A(),
    "qwen2vl": _A(),  # of vl the part that reads text
    "paddleocr": _A(),
    "pangu-embedded": _A(),
    "qwen3": _A(head_norm=True, head_softmax=True),
    "qwen3vl": _A(head_norm=True, head_softmax=True),
    "qwen3moe": _A(head_norm=True, experts=True),
    "qwen3vlmoe": _A(head_norm=True, experts=True),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, experts=True),
    "qwen3next": replace(_QWEN35, experts=True, heads_by_group=True),
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, experts=True, gating=None),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H, experts=True, gating="sigmoid", weights_norm=None, nextn=True, nextn_layer_norm=True
    ),
    "falcon-h1": _A(recurrent="mamba", all_recurrent=True),
    "mamba2": _A(recurrent="mamba", all_recurrent=True, attends=False),
    "qwen2moe": _A(experts=True, weights_norm=False),
    "olmoe": _A(row_norm=True, experts=True, n_ff_of_expert=False, weights_norm=False),
    "ernie4_5-moe": _A(interleaved=True, experts=True),
    "deepseek": _A(interleaved=True, experts=True, weights_norm=False),
    "deepseek2": _DEEPSEEK2,
    "mistral4": replace(_DEEPSEEK2, nextn=False),  # which llama.cpp does not know either
    "minicpm3": _A(latent=True, scales=True),
    "plm": _A(interleaved=True, latent=True, gated=False, activation="relu2"),
    "bailingmoe": _A(interleaved=True, experts=True, weights_norm=None),
    "bailingmoe2": _A(head_norm=True, experts=True, several_shared=True, gating=None, weights_norm=None),
    "dots1": _A(head_norm=True, experts=True, gating=None, weights_norm=None),
    "glm4moe": _A(ffn_norm="post_attention_norm", experts=True, gating="sigmoid", weights_norm=None, nextn=True),
    "hy_v3": _A(head_norm=True, experts=True, gating="sigmoid", weights_norm=None, nextn=True),
    "mellum": _A(head_norm=True, experts=True, window=0, window_period=4, local_base=0),
    "minimax-m2": _A(row_norm=True, experts=True, n_ff_of_expert=False, gating="sigmoid"),
    "phi3": _A(),
    "exaone": _A(),
    "exaone4": replace(_EXAONE4, before=False, after=True, window=0),
    "exaone-moe": replace(_EXAONE4, window=128, experts=True, gating=None, weights_norm=None),
    "afmoe": _A(
        after=True,
        head_norm=True,
        gated_attention=True,
        gate_of_input=True,
        embedding_by_root=True,
        window=0,
        window_period=4,
        nope_period=4,
        experts=True,
        gating="sigmoid",
        weights_norm=None,
    ),
    "hunyuan-dense": _HUNYUAN,
    "hunyuan_vl": replace(_HUNYUAN, base_by_alpha=True),  # of vl the part that reads text, as of the others
    "maincoder": replace(_HUNYUAN, interleaved=True),
    "hunyuan-moe": replace(_HUNYUAN, experts=True, n_ff_of_expert=False),
    "apertus": _A(head_norm=True, gated=False, activation="xielu"),
    "seed_oss": _A(ffn_norm="post_attention_norm"),
    "olmo2": _A(before=False, after=True, row_norm=True, window=0, window_period=4, local_base=0),
    "gpt-oss": _A(ffn_norm="post_attention_norm", experts=True, window=0, window_period=2, glu_limit=7.0, sinks=True),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, after=True, window=4096, window_period=2, attn_softcap=50.0, final_softcap=30.0),
    "gemma3": replace(_GEMMA3, final_softcap=0.0),
    "gemma3n": replace(_GEMMA3N, altup=True),
    "gemma4": replace(_GEMMA3N, window_period=MUST, experts=False, experts_beside=True, keys_as_values=True),
    "gemma-embedding": replace(_GEMMA3, causal=False),
    "command-r": _COHERE,
    "cohere2": _COHERE2,
    "cohere2moe": replace(
        _COHERE2,
        first_sees_all=True,
        dense_turn=True,
        experts=True,
        gating="sigmoid",
        weights_norm=None,
        mean_with_shared=True,
        nextn=True,
    ),
    "stablelm": _A(layer_norm=True, norm_for_head=True, parallel=True),
    "orion": _A(layer_norm=True),
    "starcoder2": _GELU,
    "nemotron": _A(layer_norm=True, gated=False, activation="relu2"),
    "jais2": _A(layer_norm=True, gated=False, activation="relu2"),
    "codeshell": _GELU,
    "falcon": replace(_GELU, parallel=True, second_norm=True),
    "phi2": replace(_GELU, parallel=True),
    "gptneox": replace(_GELU, may_be_parallel=True),
    "gpt2": _GPT2,
    "starcoder": _GPT2,
    "bert": replace(_GPT2, after_sum=True, causal=False),
    "jina-bert-v3": replace(_GELU, head_norm=False, after_sum=True, causal=False),
    "eurobert": _A(causal=False),
    "llama-embed": replace(_LLAMA, causal=False),
    "nomic-bert": _NOMIC,
    "nomic-bert-moe": replace(
        _NOMIC, gated=False, activation="gelu", experts=True, n_ff_of_expert=False, weights_norm=False
    ),
    "modern-bert": _A(
        layer_norm=True,
        activation="gelu",
        head_norm=False,
        window=MUST,
        window_period=3,
        first_sees_all=True,
        local_base=10000.0,
        embedding_norm=True,
        head_of_mean=True,
        causal=False,
    ),
}
