"""Supported architectures by their GGUF name, with the traits that their files do not state.

The facts are llama.cpp's (`src/llama-model.cpp` and `src/models/`), whose results
tests/models/architectures/test_llama_cpp.py compares with.
"""

from __future__ import annotations

from dataclasses import replace

from logitless.models.architectures.architecture import (
    MTP,
    REQUIRED_KEY,
    Activation,
    Architecture,
    Attention,
    FeedForward,
    Indexer,
    KeyPool,
    MoE,
    Norm,
    OutputGate,
    Presence,
    QKNorm,
    RankingHead,
    Residual,
    Rope,
    RouterScore,
    Scales,
    StateKind,
    States,
    Temperature,
)

_INTERLEAVED = Rope(interleaved=True)
_PRE_LAYER_NORM = Norm(layer_norm=True)
_OTHER_FFN_NAME = Norm(ffn_name="post_attention_norm")
_PRE_AND_POST, _POST_ONLY = Norm(post=True), Norm(pre=False, post=True)
_PER_HEAD, _ALL_HEADS = Attention(qk_norm=QKNorm.PER_HEAD), Attention(qk_norm=QKNorm.ALL_HEADS)
_BIDIRECTIONAL = Attention(causal=False)
_NO_ROPE, _ALIBI, _ALIBI_OF_FILE = Rope(enabled=False), Attention(alibi=8.0), Attention(alibi=0.0)
_GELU_GLU = FeedForward(activation=Activation.GELU)
_GELU_MLP = FeedForward(glu=False, activation=Activation.GELU)
_T5_MLP = FeedForward(activation=Activation.GELU, ungated=Activation.RELU)
_RELU2_MLP = FeedForward(glu=False, activation=Activation.RELU2)
_MOE = MoE(Presence.REQUIRED)
_SIGMOID_MOE = MoE(Presence.REQUIRED, router=RouterScore.SIGMOID, normalize=None, balanced=Presence.OPTIONAL)
_BALANCED_MOE = replace(_SIGMOID_MOE, balanced=Presence.REQUIRED)
_ANY_ROUTER_MOE = MoE(Presence.REQUIRED, router=None, normalize=None, balanced=Presence.OPTIONAL)
_MIXER_MOE = MoE(Presence.REQUIRED, own_width=False, router=RouterScore.MIXER)
_SOFTMAX_MOE = MoE(Presence.REQUIRED, normalize=None, balanced=Presence.OPTIONAL)
_SHARED_KEY_MOE = MoE(Presence.REQUIRED, own_width=False)
_OPTIONAL_MOE = MoE(Presence.OPTIONAL, own_width=False)
_MTP, _UNUSED_MTP, _MTP_LAYER = MTP(enabled=True), MTP(known=True), MTP(enabled=True, as_layer=True)
_FILE_SCALES = Scales(from_file=True)
_CLASSES = RankingHead(enabled=True, softmax=True)

_GEMMA = Architecture(ffn=_GELU_GLU, scales=Scales(root_of_embedding=True))
_GEMMA3 = replace(
    _GEMMA,
    norm=_PRE_AND_POST,
    rope=Rope(local_base=10000.0),
    attention=Attention(qk_norm=QKNorm.PER_HEAD, window=0, window_period=6),
)
_GEMMA3N = replace(
    _GEMMA3,
    attention=Attention(
        qk_norm=QKNorm.PER_HEAD,
        value_norm=True,
        window=REQUIRED_KEY,
        window_period=5,
        unscaled=True,
        kv_sharing=True,
    ),
    scales=Scales(root_of_embedding=True, final_softcap=30.0),
    per_layer_embeddings=True,
)
_EXAONE4 = Architecture(
    rope=Rope(local_only=True),
    attention=Attention(qk_norm=QKNorm.PER_HEAD, window_period=4),
)
_COHERE = Architecture(
    norm=_PRE_LAYER_NORM,
    rope=_INTERLEAVED,
    attention=Attention(qk_norm=QKNorm.CENTRED),
    ffn=FeedForward(parallel=True),
    scales=Scales(logits_multiplied=True),
)
_COHERE2 = replace(
    _COHERE,
    rope=Rope(interleaved=True, local_only=True),
    attention=Attention(qk_norm=QKNorm.CENTRED, window=REQUIRED_KEY, window_period=4),
)
_HUNYUAN = Architecture(attention=Attention(qk_norm=QKNorm.PER_HEAD, qk_norm_after_rope=True))
_GELU = Architecture(norm=_PRE_LAYER_NORM, ffn=_GELU_MLP)
_GPT2 = replace(_GELU, attention=Attention(qk_norm=QKNorm.NONE), learned_positions=True)
_INTERLEAVED_SECTIONS = Rope(interleaved_sections=True)
_QWEN35 = Architecture(
    norm=_OTHER_FFN_NAME,
    rope=_INTERLEAVED_SECTIONS,
    attention=Attention(qk_norm=QKNorm.PER_HEAD, gate=OutputGate.WITH_QUERY),
    states=States(StateKind.GATED_DELTA),
    mtp=_MTP,
)
_DEEPSEEK2 = Architecture(
    rope=Rope(interleaved=True, yarn_scales_scores=True),
    attention=Attention(mla=True, temperature=Temperature()),
    moe=_SOFTMAX_MOE,
    mtp=_MTP,
)
_DEEPSEEK32 = replace(
    _DEEPSEEK2,
    attention=replace(_DEEPSEEK2.attention, indexer=Indexer()),
    moe=replace(_DEEPSEEK2.moe, router=RouterScore.SIGMOID),
)
_GRANITE = Architecture(rope=Rope(interleaved=True, optional=True), scales=_FILE_SCALES)
_NEMOTRON_H = Architecture(
    rope=_NO_ROPE,
    ffn=_RELU2_MLP,
    states=States(StateKind.MAMBA2, one_sublayer=True),
)
_RWKV = Architecture(
    norm=Norm(layer_norm=True, embedding=True),
    attention=Attention(enabled=False),
    states=States(StateKind.RWKV6, every_layer=True, channel_mix=True),
)
_RWKV_QWEN = Architecture(
    attention=Attention(enabled=False), states=States(StateKind.RWKV6, every_layer=True, feed_forward=True)
)
_GROUPED_WINDOWS = Attention(window=REQUIRED_KEY, window_period=REQUIRED_KEY)
_LFM2 = Architecture(
    norm=Norm(output_name="token_embd_norm"),
    attention=_PER_HEAD,
    states=States(StateKind.SHORT_CONV),
    dense_embeddings=True,
)
_NOMIC = Architecture(
    norm=Norm(layer_norm=True, post_residual=True),
    attention=Attention(causal=False, qk_norm=QKNorm.NONE),
    ranking=RankingHead(enabled=True),
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(rope=_INTERLEAVED, moe=_OPTIONAL_MOE),
    "deci": Architecture(rope=_INTERLEAVED, attention=Attention(optional=True)),
    "llama4": Architecture(
        rope=Rope(interleaved=True, nope_period=4),
        attention=Attention(
            qk_norm=QKNorm.UNWEIGHTED,
            window=8192,
            window_period=4,
            chunked=True,
            temperature=Temperature(0.1, 8192, offset=1, only_nope=True),
        ),
        moe=MoE(Presence.REQUIRED, router=RouterScore.SIGMOID, normalize=False, one_shared=True, weighted_input=True),
    ),
    "mistral3": Architecture(rope=_INTERLEAVED, attention=Attention(temperature=Temperature()), moe=_OPTIONAL_MOE),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, moe=_SHARED_KEY_MOE),
    "granite_swa": replace(
        _GRANITE, rope=_INTERLEAVED, attention=replace(_GROUPED_WINDOWS, sinks=Presence.REQUIRED), moe=_OPTIONAL_MOE
    ),
    "granitehybrid": replace(_GRANITE, moe=_OPTIONAL_MOE, states=States(StateKind.MAMBA2)),
    "minicpm": Architecture(rope=_INTERLEAVED, scales=_FILE_SCALES),
    "smollm3": Architecture(rope=Rope(interleaved=True, nope_period=4)),
    "ernie4_5": Architecture(rope=_INTERLEAVED),
    "internlm2": Architecture(rope=_INTERLEAVED),
    "baichuan": Architecture(rope=_INTERLEAVED, attention=_ALIBI),
    "refact": Architecture(rope=_NO_ROPE, attention=_ALIBI),
    "nanbeige": Architecture(rope=_INTERLEAVED, loops=True),
    "arctic": Architecture(rope=_INTERLEAVED, moe=replace(_SHARED_KEY_MOE, early_router=True, early_experts=True)),
    "talkie": Architecture(
        norm=Norm(weighted=False, embedding=True),
        attention=Attention(qk_norm=QKNorm.GAIN),
        scales=Scales(logits_multiplied=True),
        embedding_skips=True,
    ),
    "xverse": Architecture(rope=_INTERLEAVED),
    "cogvlm": Architecture(visual_expert=True),
    "chatglm": Architecture(rope=_INTERLEAVED),
    "arcee": Architecture(rope=_INTERLEAVED, ffn=_RELU2_MLP),
    "glm4": Architecture(norm=_PRE_AND_POST, rope=_INTERLEAVED),
    "qwen2": Architecture(),
    "qwen2vl": Architecture(),
    "paddleocr": Architecture(),
    "pangu-embedded": Architecture(),
    "qwen3": Architecture(attention=_PER_HEAD, ranking=_CLASSES),
    "qwen3vl": Architecture(rope=_INTERLEAVED_SECTIONS, attention=_PER_HEAD, ranking=_CLASSES),
    "qwen3moe": Architecture(attention=_PER_HEAD, moe=_MOE),
    "qwen3vlmoe": Architecture(rope=_INTERLEAVED_SECTIONS, attention=_PER_HEAD, moe=_MOE),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, moe=_MOE),
    "qwen3next": replace(_QWEN35, moe=_MOE, states=States(StateKind.GATED_DELTA, grouped_heads=True)),
    "qwen4exp": replace(
        _QWEN35,
        norm=Norm(pre=False, final=False),
        attention=replace(
            _QWEN35.attention, indexer=Indexer(KeyPool.MEAN, latent=False, optional_key="attention.compress_ratios")
        ),
        moe=_MOE,
        states=States(StateKind.GATED_DELTA, sigmoid_gate=True),
        mtp=_MTP_LAYER,
        residual=Residual.GATED,
        ngrams=True,
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, moe=MoE(Presence.REQUIRED, router=None, balanced=Presence.REQUIRED)),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(_NEMOTRON_H, moe=_BALANCED_MOE, mtp=MTP(enabled=True, layer_norm=True)),
    "falcon-h1": Architecture(states=States(StateKind.MAMBA2, every_layer=True)),
    "mamba2": Architecture(attention=Attention(enabled=False), states=States(StateKind.MAMBA2, every_layer=True)),
    "mamba": Architecture(attention=Attention(enabled=False), states=States(StateKind.MAMBA, every_layer=True)),
    "rwkv6": _RWKV,
    "rwkv7": replace(_RWKV, states=replace(_RWKV.states, kind=StateKind.RWKV7)),
    "rwkv6qwen2": _RWKV_QWEN,
    "arwkv7": replace(_RWKV_QWEN, states=replace(_RWKV_QWEN.states, kind=StateKind.RWKV7)),
    "jamba": Architecture(
        rope=_NO_ROPE,
        moe=MoE(Presence.OPTIONAL, own_width=False, normalize=False, in_any_layer=True),
        states=States(StateKind.MAMBA),
    ),
    "kimi-linear": Architecture(
        rope=_NO_ROPE,
        attention=Attention(mla=True, gate=OutputGate.OWN_WEIGHT, gate_optional=True),
        moe=MoE(Presence.REQUIRED, router=None, balanced=Presence.REQUIRED),
        states=States(StateKind.KDA),
    ),
    "kimi-k3": Architecture(
        rope=_NO_ROPE,
        attention=Attention(mla=True, gate=OutputGate.OWN_WEIGHT, gate_optional=True),
        ffn=FeedForward(activation=Activation.SITU),
        moe=replace(_ANY_ROUTER_MOE, balanced=Presence.REQUIRED),
        states=States(StateKind.KDA, negated=True),
        residual=Residual.ATTENTION,
    ),
    "hy_v4": Architecture(
        rope=_INTERLEAVED,
        attention=Attention(
            mla=True,
            indexer=Indexer(interleaved=True, rope_last=True, rms_eps=True, optional_key="attention.indexer.top_k"),
            sinks=Presence.REQUIRED,
            gate=OutputGate.OWN_WEIGHT,
        ),
        ffn=FeedForward(clamps_input=True),
        moe=_SIGMOID_MOE,
        residual=Residual.INDEPENDENT,
    ),
    "glm5-next": Architecture(
        rope=_NO_ROPE,
        attention=Attention(mla=True, indexer=Indexer(KeyPool.SOFTMAX)),
        ffn=FeedForward(one_limit=True, clamps_input=True),
        moe=_BALANCED_MOE,
        states=States(StateKind.KDA, negated=True),
        mtp=_MTP,
        residual=Residual.HYPER,
    ),
    "bailingmoe3": Architecture(
        rope=_INTERLEAVED,
        attention=Attention(mla=True, gate=OutputGate.OWN_WEIGHT),
        moe=replace(_ANY_ROUTER_MOE, balanced=Presence.REQUIRED),
        states=States(StateKind.KDA),
        mtp=MTP(enabled=True, norm_name="layer_output_norm"),
    ),
    "qwen2moe": Architecture(moe=MoE(Presence.REQUIRED, normalize=False)),
    "olmoe": Architecture(attention=_ALL_HEADS, moe=MoE(Presence.REQUIRED, own_width=False, normalize=False)),
    "ernie4_5-moe": Architecture(rope=_INTERLEAVED, moe=replace(_MOE, balanced=Presence.OPTIONAL)),
    "deepseek": Architecture(rope=_INTERLEAVED, moe=MoE(Presence.REQUIRED, normalize=False)),
    "deepseek2": _DEEPSEEK2,
    "deepseek2-ocr": Architecture(moe=_SOFTMAX_MOE),
    "deepseek32": _DEEPSEEK32,
    "deepseek4": Architecture(
        rope=_INTERLEAVED,
        attention=Attention(compressed=True, sinks=Presence.REQUIRED),
        ffn=FeedForward(one_limit=True, clamps_input=True),
        moe=replace(_ANY_ROUTER_MOE, hashed=True, balanced=Presence.REQUIRED),
        mtp=_MTP_LAYER,
        residual=Residual.HYPER_OUTPUT,
    ),
    "glm-dsa": replace(_DEEPSEEK32, attention=replace(_DEEPSEEK32.attention, indexer=Indexer(interleaved=True))),
    "mistral4": replace(_DEEPSEEK2, mtp=_UNUSED_MTP),
    "minicpm3": Architecture(attention=Attention(mla=True), scales=_FILE_SCALES),
    "plm": Architecture(rope=_INTERLEAVED, attention=Attention(mla=True), ffn=_RELU2_MLP),
    "bailingmoe": Architecture(rope=_INTERLEAVED, moe=MoE(Presence.REQUIRED, normalize=None)),
    "bailingmoe2": Architecture(
        attention=_PER_HEAD, moe=replace(_ANY_ROUTER_MOE, shared_width_each=True), mtp=_UNUSED_MTP
    ),
    "dots1": Architecture(attention=_PER_HEAD, moe=_ANY_ROUTER_MOE),
    "glm4moe": Architecture(norm=_OTHER_FFN_NAME, moe=_BALANCED_MOE, mtp=_MTP),
    "hy_v3": Architecture(attention=_PER_HEAD, moe=_SIGMOID_MOE, mtp=_MTP),
    "mellum": Architecture(
        rope=Rope(local_base=0),
        attention=Attention(qk_norm=QKNorm.PER_HEAD, window=0, window_period=4),
        moe=_MOE,
    ),
    "minimax-m2": Architecture(
        attention=_ALL_HEADS,
        moe=MoE(Presence.REQUIRED, own_width=False, router=RouterScore.SIGMOID, balanced=Presence.REQUIRED),
    ),
    "minimax-m3": Architecture(
        attention=replace(_PER_HEAD, indexer=Indexer(KeyPool.GREATEST, latent=False)),
        ffn=FeedForward(glu_limit=7.0),
        moe=_BALANCED_MOE,
    ),
    "phi3": Architecture(),
    "phimoe": Architecture(norm=_PRE_LAYER_NORM, moe=_MIXER_MOE),
    "exaone": Architecture(),
    "exaone4": replace(_EXAONE4, norm=_POST_ONLY, attention=replace(_EXAONE4.attention, window=0)),
    "exaone-moe": replace(
        _EXAONE4, attention=replace(_EXAONE4.attention, window=128), moe=_ANY_ROUTER_MOE, mtp=_UNUSED_MTP
    ),
    "afmoe": Architecture(
        norm=_PRE_AND_POST,
        rope=Rope(nope_period=4),
        attention=Attention(qk_norm=QKNorm.PER_HEAD, gate=OutputGate.OWN_WEIGHT, window=0, window_period=4),
        moe=_BALANCED_MOE,
        scales=Scales(root_of_embedding=True),
    ),
    "hunyuan-dense": _HUNYUAN,
    "hunyuan_vl": replace(_HUNYUAN, rope=Rope(ntk_alpha=True)),
    "maincoder": replace(_HUNYUAN, rope=_INTERLEAVED),
    "hunyuan-moe": replace(_HUNYUAN, moe=_SHARED_KEY_MOE),
    "apertus": Architecture(attention=_PER_HEAD, ffn=FeedForward(glu=False, activation=Activation.XIELU)),
    "seed_oss": Architecture(norm=_OTHER_FFN_NAME),
    "olmo2": Architecture(
        norm=_POST_ONLY,
        rope=Rope(local_base=0),
        attention=Attention(qk_norm=QKNorm.ALL_HEADS, window=0, window_period=4),
    ),
    "gpt-oss": Architecture(
        norm=_OTHER_FFN_NAME,
        attention=Attention(window=0, window_period=2, sinks=Presence.REQUIRED),
        ffn=FeedForward(glu_limit=7.0),
        moe=_MOE,
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        norm=_PRE_AND_POST,
        attention=Attention(window=4096, window_period=2, softcap=50.0),
        scales=Scales(root_of_embedding=True, final_softcap=30.0),
    ),
    "gemma3": replace(_GEMMA3, scales=Scales(root_of_embedding=True, final_softcap=0.0)),
    "gemma3n": replace(_GEMMA3N, altup=True),
    "gemma4": replace(
        _GEMMA3N,
        attention=replace(_GEMMA3N.attention, window_period=REQUIRED_KEY, k_as_v=True, images_in_window=True),
        moe=MoE(Presence.OPTIONAL, parallel_dense=True),
    ),
    "gemma-embedding": replace(_GEMMA3, attention=replace(_GEMMA3.attention, causal=False), dense_embeddings=True),
    "gemma-embedding2": replace(
        _GEMMA3N,
        attention=replace(_GEMMA3N.attention, causal=False, window_period=6, kv_sharing=False),
        scales=Scales(root_of_embedding=True),
        output_of_embeddings=True,
    ),
    "command-r": _COHERE,
    "cohere2": _COHERE2,
    "cohere2moe": replace(
        _COHERE2,
        rope=Rope(interleaved=True, local_only=True, dense_layers=True),
        attention=replace(_COHERE2.attention, full_first=True),
        moe=replace(_SIGMOID_MOE, average_shared=True, balanced=Presence.ABSENT),
        mtp=_MTP,
    ),
    "olmo": Architecture(norm=Norm(layer_norm=True, weighted=False), rope=_INTERLEAVED),
    "dbrx": Architecture(norm=Norm(layer_norm=True, ffn_name="attn_output_norm"), moe=_SHARED_KEY_MOE),
    "openelm": Architecture(attention=_PER_HEAD),
    "grok": Architecture(
        norm=Norm(post=True, post_names=("attn_output_norm", "layer_output_norm")),
        attention=Attention(softcap=30.0),
        ffn=_GELU_GLU,
        moe=MoE(Presence.REQUIRED, beside_dense=True),
        scales=Scales(from_file=True, final_softcap=0.0),
    ),
    "smallthinker": Architecture(
        rope=Rope(local_only=True),
        attention=Attention(window=0, window_period=4, full_first=True),
        ffn=FeedForward(activation=Activation.RELU),
        moe=MoE(Presence.REQUIRED, router=None, early_router=True),
    ),
    "grovemoe": Architecture(attention=_PER_HEAD, moe=_MOE),
    "bitnet": Architecture(norm=Norm(inner=True), ffn=FeedForward(activation_in_file=True)),
    "mimo2": Architecture(
        rope=Rope(local_base=0),
        attention=replace(_GROUPED_WINDOWS, sinks=Presence.OPTIONAL),
        moe=replace(_SIGMOID_MOE, normalize=True, in_any_layer=True),
        mtp=_MTP_LAYER,
    ),
    "step35": Architecture(
        rope=Rope(local_base=0, half_of_full=True),
        attention=replace(_GROUPED_WINDOWS, gate=OutputGate.OWN_WEIGHT, gate_optional=True),
        moe=replace(_SIGMOID_MOE, in_any_layer=True),
        mtp=_MTP_LAYER,
    ),
    "spark2_5": Architecture(
        rope=Rope(local_base=0), attention=replace(_GROUPED_WINDOWS, gate=OutputGate.OWN_WEIGHT), ffn=_GELU_GLU
    ),
    "k2-horizon": Architecture(
        norm=Norm(grouped=True),
        attention=Attention(qk_norm=QKNorm.OWN, gate=OutputGate.SOFTPLUS2, gate_optional=True),
        moe=replace(_SIGMOID_MOE, presence=Presence.OPTIONAL),
    ),
    "qwen": Architecture(ffn=FeedForward(half_width=True)),
    "laguna": Architecture(
        rope=Rope(local_base=0),
        attention=Attention(
            qk_norm=QKNorm.PER_HEAD, gate=OutputGate.SOFTPLUS, window=0, window_period=4, full_first=True
        ),
        moe=_BALANCED_MOE,
    ),
    "plamo": Architecture(ffn=FeedForward(parallel=True)),
    "plamo2": Architecture(
        norm=_PRE_AND_POST, attention=Attention(qk_norm=QKNorm.OWN), states=States(StateKind.PLAMO2)
    ),
    "maple": Architecture(
        rope=Rope(local_only=True, local_base=0),
        attention=replace(_GROUPED_WINDOWS, qk_norm=QKNorm.PER_HEAD),
        ffn=FeedForward(expert_limit=7.0, clamps_input=True),
        moe=_MOE,
    ),
    "plamo3": Architecture(
        norm=_PRE_AND_POST,
        rope=Rope(local_base=10000.0),
        attention=Attention(qk_norm=QKNorm.PER_HEAD, window=0, window_period=8),
    ),
    "stablelm": Architecture(
        norm=_PRE_LAYER_NORM,
        attention=Attention(qk_norm=QKNorm.CENTRED),
        ffn=FeedForward(parallel=True),
    ),
    "orion": Architecture(norm=_PRE_LAYER_NORM),
    "starcoder2": _GELU,
    "nemotron": Architecture(norm=_PRE_LAYER_NORM, ffn=_RELU2_MLP),
    "jais2": Architecture(norm=_PRE_LAYER_NORM, ffn=_RELU2_MLP),
    "codeshell": _GELU,
    "falcon": replace(
        _GELU,
        norm=Norm(layer_norm=True, parallel_attention=True),
        ffn=replace(_GELU_MLP, parallel=True),
    ),
    "phi2": replace(_GELU, ffn=replace(_GELU_MLP, parallel=True)),
    "gptneox": replace(_GELU, ffn=replace(_GELU_MLP, may_be_parallel=True)),
    "bloom": replace(_GELU, norm=Norm(layer_norm=True, embedding=True), rope=_NO_ROPE, attention=_ALIBI),
    "mpt": replace(_GPT2, attention=replace(_ALL_HEADS, alibi=0.0)),
    "jais": Architecture(norm=_PRE_LAYER_NORM, rope=_NO_ROPE, attention=_ALIBI_OF_FILE),
    "gpt2": _GPT2,
    "starcoder": _GPT2,
    "bert": replace(_NOMIC, ffn=_GELU_MLP, learned_positions=True),
    "jina-bert-v2": replace(
        _NOMIC, ffn=_GELU_GLU, attention=Attention(causal=False, qk_norm=QKNorm.ALL_HEADS, alibi=8.0)
    ),
    "jina-bert-v3": replace(_NOMIC, ffn=_GELU_MLP),
    "neo-bert": Architecture(
        norm=Norm(output_name="enc.output_norm"),
        rope=_INTERLEAVED,
        attention=_BIDIRECTIONAL,
        ranking=RankingHead(enabled=True),
    ),
    "t5encoder": Architecture(
        prefix="enc.",
        norm=Norm(output_name="enc.output_norm"),
        rope=_NO_ROPE,
        attention=Attention(causal=False, unscaled=True, relative=True),
        ffn=_T5_MLP,
    ),
    "t5": Architecture(
        prefix="dec.",
        norm=Norm(output_name="dec.output_norm"),
        rope=_NO_ROPE,
        attention=Attention(unscaled=True, relative=True, cross=True),
        ffn=_T5_MLP,
    ),
    "eurobert": Architecture(attention=_BIDIRECTIONAL),
    "llama-embed": Architecture(rope=_INTERLEAVED, attention=_BIDIRECTIONAL),
    "nomic-bert": _NOMIC,
    "nomic-bert-moe": replace(_NOMIC, ffn=_GELU_MLP, moe=MoE(Presence.REQUIRED, own_width=False, normalize=False)),
    "modern-bert": Architecture(
        norm=Norm(layer_norm=True, embedding=True, first=False),
        rope=Rope(local_base=10000.0),
        attention=Attention(
            causal=False,
            qk_norm=QKNorm.NONE,
            window=REQUIRED_KEY,
            window_period=3,
            full_first=True,
        ),
        ffn=replace(_GELU_GLU, activation_in_file=True),
        ranking=RankingHead(enabled=True, of_mean=True),
    ),
}

# Networks in files of their own that draft from a model's hidden states (models/drafters/)
DRAFTERS: dict[str, Architecture] = {
    "eagle3": Architecture(rope=_INTERLEAVED),
    "dflash": Architecture(attention=replace(_PER_HEAD, window=0, sinks=Presence.OPTIONAL)),
    "gemma4-assistant": replace(
        _GEMMA3N, attention=replace(_GEMMA3N.attention, window_period=REQUIRED_KEY, kv_sharing=False)
    ),
}
TRAITS = ARCHITECTURES | DRAFTERS  # of all files with layers
