"""Architecture traits: differences of an architecture from a plain pre-norm decoder, by part."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

REQUIRED_KEY = -1  # a number that has no default: the file must have its key


class Activation(StrEnum):
    """The activation function of feed-forward blocks."""

    SILU = "silu"
    GELU = "gelu"
    RELU = "relu"
    RELU2 = "relu2"  # squared ReLU
    XIELU = "xielu"  # Hparams.xielu has its parameters
    SITU = "situ"  # tanh of gate and up, Hparams.situ has their widths


class QKNorm(Enum):
    """Norms of queries and keys before RoPE."""

    NONE = "none"
    OPTIONAL = "optional"  # per head, where the file has the weight
    PER_HEAD = "per head"
    ALL_HEADS = "all heads"  # one norm over all heads together; optional in architectures of layer norms
    OWN = "own"  # each head has its own weights; optional but in PLaMo 2
    CENTRED = "centred"  # the same, optional, and the mean of a head is subtracted
    UNWEIGHTED = "unweighted"  # per head, without weights, in layers with RoPE (Llama 4)
    GAIN = "gain"  # per head, without weights but for a factor of each query head (Talkie)


class OutputGate(Enum):
    """The gate on the attention output, a sigmoid."""

    NONE = "none"
    WITH_QUERY = "with query"  # attn_q has a gate behind each head's query
    OWN_WEIGHT = "own weight"  # attn_gate, of each element or of each head
    SOFTPLUS = "softplus"  # the same, with softplus for the sigmoid (Laguna)
    SOFTPLUS2 = "softplus of 2"  # the same, to the base of 2: log2(1 + 2^x) (K2 Horizon)


class Residual(Enum):
    """The residual around attention and feed-forward blocks (models/architectures/decoder.py)."""

    PLAIN = "plain"
    HYPER = "hyper-connections"  # several streams, mixed with each other at each block (GLM 5.3)
    HYPER_OUTPUT = "hyper-connections, the output's too"  # the output is a weighted sum of them (DeepSeek V4)
    INDEPENDENT = "independent hyper-connections"  # the same, each apart but for the block (Hunyuan 4)
    GATED = "gated hyper-connections"  # each apart, with gates of elements, of low rank (Qwen 4)
    ATTENTION = "attention"  # a block's input is attention over the streams of earlier layers (Kimi K3)


class KeyPool(Enum):
    """Way in which an indexer scores neighbouring cells together."""

    NONE = "each apart"
    SOFTMAX = "by one key, a mean of theirs whose weights are gates' softmax"  # GLM 5.3
    MEAN = "by one key, the mean of theirs"  # Qwen 4
    GREATEST = "by the greatest of their scores, for each key head"  # MiniMax M3


class Presence(Enum):
    """Presence of a part in models of an architecture."""

    ABSENT = "absent"
    OPTIONAL = "optional"  # where the file has it
    REQUIRED = "required"


class RouterScore(StrEnum):
    """Router logits to expert probabilities."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    ROOT_SOFTPLUS = "root of softplus"  # DeepSeek V4
    MIXER = "mixer"  # SparseMixer (Liu et al., 2024)


class StateKind(StrEnum):
    """Kinds of layers with a recurrent state (models/architectures/linear_attention.py)."""

    NONE = ""
    SHORT_CONV = "conv"  # LFM 2
    GATED_DELTA = "delta"  # Qwen 3.5, Qwen 3 Next
    MAMBA2 = "mamba"
    MAMBA = "mamba1"
    PLAMO2 = "plamo2"  # heads of Mamba 2, whose keys and steps Mamba's projection makes
    KDA = "kda"  # Kimi Delta Attention
    RWKV6 = "rwkv6"
    RWKV7 = "rwkv7"


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation of the residual stream. The names are the file's."""

    layer_norm: bool = False  # LayerNorm with optional bias (Ba et al., 2016); else RMSNorm
    weighted: bool = True  # False: norms have no weights (OLMo)
    final: bool = True  # output_norm
    pre: bool = True  # pre_norm: the input of attention and of the feed-forward block
    post: bool = False  # post_norm: their output, before the residual sum
    post_residual: bool = False  # post-LN: the residual sum instead (BERT)
    embedding: bool = False  # token embeddings, by a norm that may have no weights
    first: bool = True  # False: the first layer has no attention norm (ModernBERT)
    ffn_name: str = "ffn_norm"  # pre-norm of the feed-forward block
    post_names: tuple[str, str] = ("post_attention_norm", "post_ffw_norm")  # of attention, of the FFN
    inner: bool = False  # norms before the output matrices, attn_sub_norm and ffn_sub_norm (BitNet)
    output_name: str = "output_norm"  # final norm
    grouped: bool = False  # the file may divide rows into groups, which are normed apart (K2 Horizon)
    parallel_attention: bool = False  # attn_norm_2 may exist: attention's own pre-norm (Falcon 40B)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    enabled: bool = True
    optional: bool = False  # rope.scaling.finetuned = false disables it
    # pairs are neighbours ("normal" in llama.cpp); else halves of a head ("neox")
    interleaved: bool = False
    # M-RoPE's components take turns (Qwen 3 VL); else sections in a row
    interleaved_sections: bool = False
    # default base of sliding-window layers, unscaled; 0: that of the others
    local_base: float | None = None
    # full-attention layers have no RoPE (NoPE), if the model has sliding-window layers
    local_only: bool = False
    dense_layers: bool = False  # despite `local_only`, leading layers without experts have it
    half_of_full: bool = False  # full-attention layers turn half of rope.dimension_count (Step 3.5)
    nope_period: int = 0  # every n-th layer has no RoPE; 0: none
    ntk_alpha: bool = False  # dynamic NTK: the base grows by rope.scaling.alpha
    # YaRN's magnitude goes to the attention scale, not to cos and sin (DeepSeek)
    yarn_scales_scores: bool = False


@dataclass(frozen=True, slots=True)
class Temperature:
    """Attention temperature: queries grow with their position, by default by nothing."""

    scale: float = 0.0
    length: int = 0  # positions of a step of growth; 0: the original context
    offset: int = 0  # added to positions
    only_nope: bool = False  # only in layers without RoPE


@dataclass(frozen=True, slots=True)
class Indexer:
    """The indexer that chooses what a token attends to, once there is more than it chooses (DeepSeek V3.2)."""

    pool: KeyPool = KeyPool.NONE
    latent: bool = True  # its queries are of rows of low rank, and heads have weights; else it is as attention is
    interleaved: bool = False  # pairs of its RoPE are neighbours
    rope_last: bool = False  # the last elements of a head have it, not the first
    rms_eps: bool = False  # its keys' LayerNorm has the epsilon of the RMS norms
    optional_key: str = ""  # which is 0 or missing where a file has no indexer


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention and its masks."""

    enabled: bool = True  # False: no layer attends, or has a feed-forward block (Mamba 2)
    # a layer may have no attention, one matrix instead, or nothing at all (Deci)
    optional: bool = False
    causal: bool = True  # default; False: bidirectional; the model makes embeddings, not text
    mla: bool = False  # multi-head latent attention (models/architectures/mla.py)
    compressed: bool = False  # a token sees a window, and a row for each block of tokens (DeepSeek V4)
    indexer: Indexer | None = None
    qk_norm: QKNorm = QKNorm.OPTIONAL
    qk_norm_after_rope: bool = False
    value_norm: bool = False  # RMSNorm of each value head, without a weight
    gate: OutputGate = OutputGate.NONE
    gate_optional: bool = False  # files may lack attn_gate
    # default sliding window (REQUIRED_KEY: the file has it); None: no such layers
    window: int | None = None
    # every n-th layer attends fully, where the file does not say; 0: none does
    window_period: int = 0
    full_first: bool = False  # the first layer of each period has full attention, not the last
    # windows do not slide: a token sees its own chunk of the sequence, of attention.chunk_size positions (Llama 4)
    chunked: bool = False
    images_in_window: bool = False  # images are bidirectional only in layers with a sliding window (Gemma 4)
    softcap: float | None = None  # default soft-cap of attention scores; None: none
    sinks: Presence = Presence.ABSENT  # attention sinks (gpt-oss)
    unscaled: bool = False  # scores are not divided by the root of the head size
    temperature: Temperature | None = None
    relative: bool = False  # scores have a learned bias for each bucket of distances (T5)
    # a decoder behind an encoder, which computes the prompt: layers attend to its output, too (T5)
    cross: bool = False
    # default of max_alibi_bias: scores fall with distance (ALiBi), unless it is 0; None: without ALiBi
    alibi: float | None = None
    k_as_v: bool = False  # K=V: a layer without attn_v has its keys, before their norm, as values
    kv_sharing: bool = False  # the last layers may use the keys and values of an earlier layer


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Dense feed-forward blocks; experts have the same activation and gating."""

    glu: bool = True  # gated linear unit: SwiGLU, GeGLU; else up, activation, down
    activation: Activation = Activation.SILU
    ungated: Activation | None = None  # activation of files without ffn_gate; None: they must have it
    # clamp of gate and up (gpt-oss: graph/ops/elementwise.py, glu_clamped); 0: none
    glu_limit: float = 0.0
    half_width: bool = False  # feed_forward_length is that of gate and up together (Qwen 1)
    expert_limit: float = 0.0  # default of swiglu_clamp_exp
    one_limit: bool = False  # that of experts is also that of shared experts and dense blocks, by default
    clamps_input: bool = False  # the clamps are in front of the activation (Maple), not behind it
    activation_in_file: bool = False  # hidden_activation may say another
    parallel: bool = False  # a block without its own pre-norm runs parallel to attention
    # use_parallel_residual may make one with its own pre-norm parallel, too
    may_be_parallel: bool = False


@dataclass(frozen=True, slots=True)
class MoE:
    """Mixture of experts."""

    presence: Presence = Presence.ABSENT
    # expert_feed_forward_length is an expert's width; else feed_forward_length
    own_width: bool = True
    # default; None: the file has expert_gating_func
    router: RouterScore | None = RouterScore.SOFTMAX
    balanced: Presence = Presence.ABSENT  # of the bias of scores that balances the experts, exp_probs_b
    # weights of a token's experts sum to 1; None: expert_weights_norm says so
    normalize: bool | None = True
    # expert_shared_feed_forward_length is the width of one of several shared experts
    shared_width_each: bool = False
    one_shared: bool = False  # one shared expert as wide as the others; the file does not state it
    weighted_input: bool = False  # a row's weights multiply its experts' input, not their output (Llama 4)
    # the output is the mean of routed and shared experts, not their sum
    average_shared: bool = False
    # MoE in parallel with the dense FFN (Gemma 4); router input has its own norm
    parallel_dense: bool = False
    # a dense block with the same input may exist; the output is their sum, divided by √2 (Grok)
    beside_dense: bool = False
    hashed: bool = False  # the first layers have a table of each token's experts (DeepSeek V4)
    early_router: bool = False  # the router reads the residual stream before attention (SmallThinker)
    # so do the experts, by a norm of their own, beside a dense block as wide as the model (Arctic)
    early_experts: bool = False
    in_any_layer: bool = False  # the tensors say which layers are dense, not leading_dense_block_count


@dataclass(frozen=True, slots=True)
class States:
    """Layers with a recurrent state: SSM, gated delta rule, short convolution."""

    kind: StateKind = StateKind.NONE
    every_layer: bool = False  # else the layers that the file says
    # gated delta rule: heads of one key head are neighbours (Qwen 3 Next)
    grouped_heads: bool = False
    # a layer is either a state layer, attention, or a feed-forward block (Nemotron H)
    one_sublayer: bool = False
    sigmoid_gate: bool = False  # of the output of the gated delta rule; else SiLU
    feed_forward: bool = False  # blocks of a model without attention have it
    negated: bool = False  # KDA's factors of decays are negative, with a lower bound, too
    channel_mix: bool = False  # its input is mixed with that of the token before (RWKV)


@dataclass(frozen=True, slots=True)
class MTP:
    """Multi-token prediction block (models/architectures/mtp.py)."""

    enabled: bool = False  # files may have one
    known: bool = False  # files may have one that is not run, as in llama.cpp
    layer_norm: bool = False  # its last norm is a LayerNorm
    norm_name: str = ""  # of its last norm, which files must have; else nextn.shared_head_norm (Ling 3)
    # it is as the model's layers: hidden states are those before the last norm, of all streams, and it may have a
    # sliding window
    as_layer: bool = False


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors along the residual stream and of logits."""

    # keys of embedding, residual, attention and logit scales (Granite, MiniCPM)
    from_file: bool = False
    root_of_embedding: bool = False  # embeddings are multiplied by √n_embd (Gemma)
    # logit_scale multiplies logits (Cohere); with `from_file` it divides them
    logits_multiplied: bool = False
    final_softcap: float | None = None  # default soft-cap of logits; None: none


@dataclass(frozen=True, slots=True)
class RankingHead:
    """Classification head of rerankers."""

    enabled: bool = False  # files may have one
    # its input is the mean over tokens, its activation that of the feed-forward blocks
    of_mean: bool = False
    softmax: bool = False  # scores are class probabilities


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture; defaults are a Qwen 2-like pre-norm decoder."""

    prefix: str = ""  # of the blocks' names in the file, where attn_output is attn_o
    norm: Norm = Norm()
    rope: Rope = Rope()
    attention: Attention = Attention()
    ffn: FeedForward = FeedForward()
    moe: MoE = MoE()
    states: States = States()
    mtp: MTP = MTP()
    scales: Scales = Scales()
    ranking: RankingHead = RankingHead()
    # rows of images have matrices of their own in all layers (CogVLM)
    visual_expert: bool = False
    # embeddings may pass dense layers behind the pooling (sentence-transformers)
    dense_embeddings: bool = False
    output_of_embeddings: bool = False  # output.weight is such a dense layer (EmbeddingGemma 2)
    learned_positions: bool = False  # position embeddings are added to token embeddings; no RoPE, no ALiBi
    ngrams: bool = False  # one layer may add embeddings of hashed n-grams (Qwen 4)
    loops: bool = False  # the layers may run several times, each time with a KV cache of their own (Nanbeige 4.2)
    embedding_skips: bool = False  # each layer adds the token embeddings times a number of its own (Talkie)
    residual: Residual = Residual.PLAIN
    # PLE: each layer may get its own embedding of the tokens (Gemma 3n)
    per_layer_embeddings: bool = False  # of tokens and of their embeddings, or of the latter alone
    # parallel residual streams, LAuReL and sparse gates (models/architectures/gemma3n.py)
    altup: bool = False
