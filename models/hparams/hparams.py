"""A model's hyper-parameters, read from its GGUF metadata with GGUF's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from logitless.models.architectures.architecture import (
    REQUIRED_KEY,
    Activation,
    Architecture,
    Presence,
    QKNorm,
    Residual,
    Temperature,
)
from logitless.models.architectures.registry import ARCHITECTURES, DRAFTERS, TRAITS
from logitless.models.errors import ModelFileError, unsupported
from logitless.models.hparams.keys import MAX_LAYERS, Keys
from logitless.models.hparams.layer_sizes import LayerSizes, read_layer_sizes, read_n_heads
from logitless.models.hparams.mla import (
    CompressionParams,
    IndexerParams,
    MLAParams,
    read_compression,
    read_indexer,
    read_mla,
)
from logitless.models.hparams.moe import Experts, read_experts
from logitless.models.hparams.rope_scaling import RopeScaling, RopeScalingType
from logitless.models.hparams.ssm import NGrams, RecurrentParams, read_ngrams, read_recurrent

DIFFUSION = ("dream", "llada", "llada-moe", "rnd1")  # architectures that write texts in no order
POOLINGS = ("none", "mean", "cls", "last", "rank")  # by GGUF's numbers
MAX_STREAMS = 64


@dataclass(frozen=True, slots=True)
class Hparams:
    """Sizes and constants of one model, by GGUF's names.

    `n_ff`, `n_head_kv`, `head_dim` and `rope_dim` are those of most layers, or of the
    full-attention layers; `sizes(layer)` has each layer's own."""

    arch: str
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    value_dim: int
    n_vocab: int
    eps: float
    rope_dim: int
    rope_base: float
    rope_scaling: RopeScaling
    attention_scale: float
    window: int = 0
    local: tuple[bool, ...] = ()  # flags of the sliding-window layers
    situ: tuple[float, float] = (0.0, 0.0)  # widths of SITU's tanh of gate and up; 0: none
    residual_period: int = 0  # attention over residuals: each so many layers the stream is set aside; 0: never
    n_hyper: int = 0  # hyper-connections: streams of the residual, rounds of Sinkhorn's algorithm, its epsilon
    hyper_iterations: int = 0
    hyper_rank: int = 0  # of gates (Qwen 4); 0: streams have weights instead
    hyper_eps: float = 0.0
    hyper_magnitude: float = 2.0  # the most of a block's output that a stream takes
    rope_base_local: float = 0.0  # RoPE base of sliding-window layers, unscaled; 0: as the others
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    pooling: str = "none"  # one of POOLINGS, of embeddings
    experts: Experts | None = None
    mla: MLAParams | None = None  # head_dim and n_head_kv are then those of the compressed KV row
    indexer: IndexerParams | None = None
    compression: CompressionParams | None = None  # of cached rows by blocks of tokens
    # MTP blocks of the file; models/architectures/mtp.py runs the first
    n_mtp: int = 0
    mtp_eps: float = 0.0  # of the MTP block's last norm
    residual_scale: float = 1.0  # factor of each block's output
    logit_scale: float = 1.0  # factor of logits
    xielu: tuple[tuple[float, float, float], ...] = ()  # (below, above, beta) of each layer
    # attention temperature: q · (1 + scale · ln(⌊(pos + offset) / length⌋ + 1))
    temperature: Temperature | None = None
    interleaved: bool = False  # RoPE pairs are neighbours
    n_shared: int = 0  # number of last layers without their own KV cache
    n_embd_per_layer: int = 0  # width of per-layer embeddings (PLE); 0: none
    n_streams: int = 1  # AltUp streams
    ngrams: NGrams | None = None  # embeddings of hashed n-grams
    n_loops: int = 1  # how often the file's blocks run, each time as layers of their own
    norm_between_loops: bool = False
    sparsity: tuple[float | None, ...] = ()  # Gaussian top-k of FFN gates, in deviations, by layer
    layers: tuple[LayerSizes, ...] = ()  # by layer; (): all alike
    parallel: bool = False  # attention and FFN read the same residual stream
    recurrent: RecurrentParams | None = None  # recurrent layers
    rotary: bool = True  # layers have RoPE
    rope_layers: tuple[bool, ...] = ()  # flags of the layers with RoPE; (): the traits say so
    activation: Activation = Activation.SILU
    alibi: float = 0.0  # ALiBi: the exponent of 2 of the flattest of the first slopes is −alibi; 0: none
    norm_groups: int = 1  # groups of a row, which are normed apart
    n_buckets: int = 0  # of relative positions; 0: no biases by them
    qkv_limit: float = 0.0  # clamp of queries, keys and values; 0: none
    value_scale: float = 1.0  # factor of the attention output
    # by layer: clamps of SwiGLU, of experts and of shared experts; 0: none; (): no layer has any
    glu_limits: tuple[tuple[float, float], ...] = ()
    causal: bool = True  # False: attention is bidirectional; the model makes embeddings, not text
    n_encoder: int = 0  # layers of an encoder in front, which computes the prompt; 0: there is none (T5)
    start_token: int = -1  # with an encoder: the token behind the prompt, from which the decoder goes on
    mrope: tuple[int, ...] = ()  # M-RoPE: each pair's component of a position: 0 time, 1 height, 2 width

    @property
    def architecture(self) -> Architecture:
        return TRAITS[self.arch]

    @property
    def untrainable(self) -> str:
        """Why the model cannot be trained, nor score texts; "": it can."""
        if not self.causal:
            return "makes vectors of texts"
        if self.compression:
            return "reads rows of blocks that only a cache has"
        return "has an encoder that reads prompts" if self.n_encoder else ""

    @property
    def remembers(self) -> str:
        """The part that cannot forget tokens, nor know them at other positions; "": all can."""
        if self.compression:
            return "rows of blocks"
        if self.recurrent:
            return "layers keep states, which"
        return "encoder has read the prompt, which" if self.n_encoder else ""

    @property
    def encoder(self) -> Hparams:
        """Hyper-parameters of the encoder in front."""
        return replace(self, arch=f"{self.arch}encoder", n_layer=self.n_encoder, n_encoder=0, causal=False)

    @property
    def cross_layers(self) -> tuple[LayerSizes, ...]:
        """Sizes of the layers whose keys and values are of the encoder's output."""
        return tuple(self.sizes(i) for i in range(self.n_layer if self.n_encoder else 0))

    @property
    def learned_positions(self) -> bool:
        """True if position embeddings are added to token embeddings."""
        return self.architecture.learned_positions and not self.alibi

    @property
    def hidden_width(self) -> int:
        """Elements of a hidden state as an MTP block reads it: of all streams, where the block has them."""
        return self.n_embd * (self.n_hyper if self.n_hyper and self.architecture.mtp.as_layer else 1)

    def has_rope(self, layer: int) -> bool:
        if layer < len(self.rope_layers):
            return self.rope_layers[layer]
        period = self.architecture.rope.nope_period
        if self.learned_positions or not self.rotary:
            return False
        if layer >= self.n_layer:
            return True
        if period and (layer + 1) % period == 0:
            return False
        if self.architecture.rope.dense_layers and self.experts_of(layer) is None:
            return True
        return self.is_local(layer) or not (self.window and self.architecture.rope.local_only)

    @property
    def n_ctx_whole(self) -> int:
        """Most tokens of a sequence without a cache (training): indexers choose among cached cells only."""
        return min(self.n_ctx_train, self.indexer.most) if self.indexer else self.n_ctx_train

    def indexes(self, layer: int) -> bool:
        """True for a layer with an indexer of its own."""
        i = self.indexer
        return i is not None and i.layers[layer] and self.attends(layer)

    def indexer_of(self, layer: int) -> IndexerParams | None:
        """The indexer whose choice a layer attends to; None: it attends to all cells."""
        i = self.indexer
        return i if i and (self.indexes(layer) or (i.shared and layer < self.n_layer)) else None

    @property
    def has_sinks(self) -> bool:
        return self.architecture.attention.sinks is not Presence.ABSENT

    def has_temperature(self, layer: int) -> bool:
        """True if the layer's queries grow with their position."""
        return self.temperature is not None and not (self.temperature.only_nope and self.has_rope(layer))

    def has_unweighted_norm(self, layer: int) -> bool:
        """True if queries and keys have an RMSNorm without weights. Maverick (128 experts) has none."""
        unweighted = self.architecture.attention.qk_norm is QKNorm.UNWEIGHTED
        return unweighted and self.has_rope(layer) and not (self.experts and self.experts.n == 128)

    def recurrent_of(self, layer: int) -> RecurrentParams | None:
        """Recurrent-state sizes of a layer; None: it has no state."""
        return self.recurrent if self.recurrent and self.recurrent.layers[layer] else None

    def attends(self, layer: int) -> bool:
        return self.sizes(layer).n_head_kv > 0 and (self.recurrent is None or self.recurrent.attention[layer])

    def feeds(self, layer: int) -> bool:
        """True if the layer has a feed-forward block, dense or MoE."""
        return self.sizes(layer).n_ff > 0

    def experts_of(self, layer: int) -> Experts | None:
        """MoE parameters of a layer; None: its feed-forward block is dense."""
        return self.experts if self.experts and self.experts.are_in(layer) and self.feeds(layer) else None

    def is_local(self, layer: int) -> bool:
        """True for a sliding-window layer."""
        return layer < len(self.local) and self.local[layer]

    def has_own_kv(self, layer: int) -> bool:
        """True unless the layer uses the keys and values of an earlier one."""
        return layer < self.n_layer_kv or layer >= self.n_layer

    @property
    def has_windows(self) -> bool:
        """True if the model mixes sliding-window and full-attention layers, or both in each layer."""
        if self.compression:
            return True
        return len({self.is_local(layer) for layer in range(self.n_layer_kv)}) == 2 and not self.recurrent

    def sizes(self, layer: int) -> LayerSizes:
        if self.layers:
            return self.layers[layer]
        return LayerSizes(self.n_ff, self.n_head, self.n_head_kv, self.head_dim, self.rope_dim, self.value_dim)

    @property
    def n_layer_kv(self) -> int:
        """Number of layers up to the last with its own KV cache or recurrent state."""
        n = self.n_layer - self.n_shared
        return next(i + 1 for i in reversed(range(n)) if self.attends(i) or self.recurrent_of(i))

    def kv_source(self, layer: int) -> int:
        """KV-sharing source: the layer whose keys and values this one reads; itself without sharing."""
        if self.has_own_kv(layer):
            return layer
        return max(i for i in range(self.n_layer_kv) if self.is_local(i) == self.is_local(layer))


def read_hparams(metadata: Mapping[str, Any], n_vocab: int, file: str) -> Hparams:
    """Hyper-parameters of a supported architecture; ModelFileError names the file and the key at fault."""
    arch = metadata.get("general.architecture")
    if arch in DIFFUSION:
        raise ModelFileError(file, f"architecture {arch!r} fills masks in rounds and has no next token: docs/models.md")
    if not isinstance(arch, str) or arch not in TRAITS:
        raise ModelFileError(file, unsupported("architecture", arch, ARCHITECTURES))
    architecture, keys = TRAITS[arch], Keys(metadata, arch, file)
    attention, rope = architecture.attention, architecture.rope
    experts = read_experts(keys, n_vocab)
    n_embd = keys.count("embedding_length")
    n_blocks, n_ctx_train = keys.layers(), keys.count("context_length")
    n_mtp = 0 if arch in DRAFTERS else keys.count_or_none("nextn_predict_layers")
    if n_mtp >= n_blocks:
        raise keys.error("nextn_predict_layers", f"is {n_mtp}, of {n_blocks} blocks")
    if n_mtp and not (architecture.mtp.enabled or architecture.mtp.known):
        raise keys.error("nextn_predict_layers", f"is {n_mtp}, but {arch} has no MTP blocks")
    n_loops = keys.count("num_loops", 1) if architecture.loops else 1
    if n_blocks * n_loops > MAX_LAYERS:
        raise keys.error("num_loops", f"is {n_loops}, of {n_blocks} blocks; at most {MAX_LAYERS} layers are supported")
    n_layer, n_head = n_blocks * n_loops - n_mtp, max(read_n_heads(keys, n_blocks))
    window = 0
    if attention.chunked:
        window = keys.count("attention.chunk_size", attention.window)
    elif attention.window is not None:
        window = keys.count_or_none(
            "attention.sliding_window",
            None if attention.window == REQUIRED_KEY else attention.window,
        )
    n_windowed = n_layer + n_mtp * architecture.mtp.as_layer
    local = _local_layers(keys, n_layer, n_windowed) if window else (False,) * n_layer
    mla = read_mla(keys, n_embd // n_head) if attention.mla else None
    local_blocks = [*local, *[False] * (n_blocks - len(local))]
    most, layers = read_layer_sizes(keys, n_blocks, experts.n_ff if experts else None, local_blocks, mla)
    eps_key, other = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
    if not architecture.norm.layer_norm or (eps_key not in keys and other in keys):  # Phi MoE's has the other
        eps_key = other
    eps = float(keys.number(eps_key))
    if eps < 0:
        raise keys.error(eps_key, f"is {eps:g}, which is negative")
    pooling = keys.number("pooling_type", 0)
    if pooling not in range(len(POOLINGS)):
        raise keys.error("pooling_type", f"is {pooling:g}; supported are 0 to {len(POOLINGS) - 1}")
    rope_base = keys.positive("rope.freq_base", 10000.0)
    if rope.ntk_alpha and most.head_dim > 2:  # dynamic NTK
        rope_base *= keys.factor("rope.scaling.alpha") ** (most.head_dim / (most.head_dim - 2))
    scaling = _rope_scaling(keys, n_ctx_train)
    alibi = _alibi(keys, n_layer)
    ngrams = read_ngrams(keys, n_layer, n_embd) if architecture.ngrams else None
    indexer = read_indexer(keys, n_layer, n_mtp, mla.n_rope if mla else most.rope_dim, most.n_head_kv)
    h = Hparams(
        arch=arch,
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer=n_layer,
        n_ff=most.n_ff,
        n_head=n_head,
        n_head_kv=most.n_head_kv,
        head_dim=most.head_dim,
        value_dim=most.value_dim,
        n_vocab=n_vocab,
        eps=eps,
        rope_dim=most.rope_dim,
        rope_base=rope_base,
        rope_scaling=scaling,
        attention_scale=_attention_scale(arch, n_layer, n_embd // max(1, n_head), most.head_dim, mla, scaling),
        window=window,
        local=local,
        rope_base_local=0.0
        if rope.local_base is None
        else keys.positive("rope.freq_base_swa", rope.local_base or rope_base),
        attn_softcap=_softcap(keys, "attn_logit_softcapping", attention.softcap),
        final_softcap=_softcap(keys, "final_logit_softcapping", architecture.scales.final_softcap),
        embedding_scale=float(n_embd) ** 0.5 if architecture.scales.root_of_embedding else 1.0,
        logit_scale=keys.factor("logit_scale") if architecture.scales.logits_multiplied else 1.0,
        pooling=POOLINGS[int(pooling)],
        experts=experts,
        mla=mla,
        indexer=indexer,
        n_mtp=n_mtp,
        mtp_eps=float(keys.number("attention.layer_norm_epsilon", eps)) if architecture.mtp.layer_norm else eps,
        temperature=_temperature(keys, scaling),
        xielu=_xielu(keys, n_layer) if architecture.ffn.activation is Activation.XIELU else (),
        n_shared=_n_idle(keys, layers or (most,)) if attention.optional else _n_shared(keys, local),
        n_embd_per_layer=keys.count_or_none("embedding_length_per_layer_input")
        if architecture.per_layer_embeddings
        else 0,
        n_streams=_n_streams(keys) if architecture.altup else 1,
        sparsity=_sparsity(keys, n_layer) if architecture.altup else (),
        layers=layers * n_loops,
        n_loops=n_loops,
        norm_between_loops=n_loops > 1 and not keys.flag("skip_loop_final_norm", False),
        parallel=architecture.norm.parallel_attention
        or (architecture.ffn.may_be_parallel and keys.flag("use_parallel_residual")),
        interleaved=rope.interleaved and not _of_several_positions(keys),
        recurrent=read_recurrent(keys, n_layer, n_embd, n_mtp, ngrams, indexer),
        ngrams=ngrams,
        mrope=_mrope(keys, most.rope_dim // 2, interleaved=rope.interleaved_sections),
        alibi=alibi,
        n_buckets=_n_buckets(keys),
        norm_groups=_norm_groups(keys, n_embd),
        rotary=rope.enabled and not alibi and not (rope.optional and not keys.flag("rope.scaling.finetuned", True)),
        rope_layers=keys.flags("attention.rope_pattern", n_layer),
        activation=_activation(keys),
        situ=_situ(keys),
        residual_period=keys.count_or_none("attn_res.block_size", None)
        if architecture.residual is Residual.ATTENTION
        else 0,
        qkv_limit=keys.at_least_0("attention.clamp_kqv"),
        value_scale=keys.factor("attention.value_scale"),
        glu_limits=_glu_limits(keys, n_layer + n_mtp),
        causal=_causal(keys),
    )
    h = _with_streams(h, keys)
    if indexer and indexer.shared and not h.indexes(next(filter(h.attends, range(n_layer)), 0)):
        raise keys.error("attention.indexer.types", "has no indexer in the first layer that attends")
    if attention.cross:
        h = _behind_encoder(h, keys)
    if attention.compressed:
        h = _compressed(h, keys)
    return _with_scales(h, keys) if architecture.scales.from_file else h


def _behind_encoder(h: Hparams, keys: Keys) -> Hparams:
    """The decoder of a model whose file counts the encoder's blocks. Layers of both are alike; prompt and text
    may have the context of the file each."""
    n_layer = keys.layers("decoder_block_count", h.n_layer)
    bos = keys.metadata.get("tokenizer.ggml.bos_token_id", 0)
    start = keys.number("decoder_start_token_id", bos if isinstance(bos, int) else 0)
    if start not in range(h.n_vocab):
        raise keys.error("decoder_start_token_id", f"is {start:g}, of {h.n_vocab} tokens")
    h = replace(h, n_encoder=h.n_layer, n_layer=n_layer, local=(False,) * n_layer, layers=())
    return replace(h, start_token=int(start), n_ctx_train=2 * h.n_ctx_train)


def _compressed(h: Hparams, keys: Keys) -> Hparams:
    """A model whose layers compress their cache; those without blocks have RoPE of their own, without scaling."""
    if (h.n_head_kv, h.value_dim) != (1, h.head_dim) or h.layers:
        raise keys.error("attention.head_count_kv", "must be 1, with values as wide as keys")
    compression = read_compression(keys, h.n_layer, h.n_mtp, h.n_head, h.rope_dim)
    return replace(
        h,
        compression=compression,
        window=compression.n_recent,
        local=tuple(size == 0 for size in compression.blocks),
        rope_base=keys.positive("attention.compress_rope_freq_base", h.rope_base),
        rope_base_local=h.rope_base,
        rope_scaling=replace(h.rope_scaling, attn_factor=1.0, log_multiplier=1.0),  # the magnitude stays
    )


def _with_scales(h: Hparams, keys: Keys) -> Hparams:
    """The file's constant factors. The first files of MiniCPM and those of MiniCPM 3 lack the keys."""
    if h.arch == "grok":  # the first files lack keys
        return replace(
            h,
            embedding_scale=keys.factor("embedding_scale", 78.38367176906169),
            logit_scale=keys.factor("logit_scale", 0.5773502691896257),
            attention_scale=keys.positive("attention.output_scale", 0.08838834764831845),
        )
    of_embedding, of_residual, of_logits = 1.0, 1.0, 1.0
    if h.arch in ("minicpm", "minicpm3"):
        of_embedding, of_residual = 12.0, 1.4 / h.n_layer**0.5
        of_logits = 256 / h.n_embd if h.arch == "minicpm" else h.n_embd / 256
    scale = h.attention_scale
    if h.arch != "minicpm" and keys.number("attention.scale", 0.0):
        scale = keys.positive("attention.scale", scale)
    return replace(
        h,
        embedding_scale=keys.factor("embedding_scale", of_embedding),
        residual_scale=keys.factor("residual_scale", of_residual),
        logit_scale=1 / keys.factor("logit_scale", of_logits),
        attention_scale=scale,
    )


def _alibi(keys: Keys, n_layer: int) -> float:
    """ALiBi's greatest exponent; 0: none. Of Baichuan's models only that of 40 layers (13B) has it."""
    default = TRAITS[keys.arch].attention.alibi
    if default is None or (keys.arch == "baichuan" and n_layer != 40):
        return 0.0
    return keys.at_least_0("attention.max_alibi_bias", default)


def _norm_groups(keys: Keys, n_embd: int) -> int:
    if not TRAITS[keys.arch].norm.grouped:
        return 1
    n, experts = keys.count("attention.group_norm_groups", 1), "attention.value_expert_count"
    if n_embd % n:
        raise keys.error("attention.group_norm_groups", f"is {n}, of which embedding_length {n_embd} is no multiple")
    if keys.count_or_none(experts):
        raise keys.error(experts, "is not 0: experts of values are not supported")
    return n


def _n_buckets(keys: Keys) -> int:
    if not TRAITS[keys.arch].attention.relative:
        return 0
    n = keys.count("attention.relative_buckets_count")
    if n % 4 or n > 256:
        raise keys.error("attention.relative_buckets_count", f"is {n}; supported are multiples of 4 up to 256")
    return n


def _causal(keys: Keys) -> bool:
    """True if a token attends to earlier ones only. A graph of recurrences, latent keys, sinks or
    soft-caps is causal, one of BERT is not."""
    key, architecture = "attention.causal", TRAITS[keys.arch]
    attention = architecture.attention
    causal = keys.flag(key, attention.causal)
    always = architecture.states.kind or attention.mla or attention.sinks is not Presence.ABSENT
    always = always or attention.softcap is not None or attention.cross
    encodes = architecture.norm.post_residual or (attention.relative and not attention.cross)
    if (causal and encodes) or (not causal and (always or not attention.enabled)):
        raise keys.error(key, f"is {str(causal).lower()}, which is not supported in {keys.arch}")
    return causal


def _activation(keys: Keys) -> Activation:
    ffn = TRAITS[keys.arch].ffn
    name = keys.get("hidden_activation", str(ffn.activation)) if ffn.activation_in_file else ffn.activation
    special = Activation.XIELU, Activation.SITU
    supported = [kind for kind in Activation if kind is ffn.activation or kind not in special]
    if name not in supported:
        raise keys.error("hidden_activation", f"is {name!r}; supported are {', '.join(supported)}")
    return Activation(name)


def _with_streams(h: Hparams, keys: Keys) -> Hparams:
    """The model with its hyper-connections, where the architecture has them."""
    kind = TRAITS[keys.arch].residual
    if kind not in (Residual.HYPER, Residual.HYPER_OUTPUT, Residual.INDEPENDENT, Residual.GATED):
        return h
    n, apart = keys.count("hyper_connection.count", high=MAX_STREAMS), kind is Residual.INDEPENDENT
    mixed = kind in (Residual.HYPER, Residual.HYPER_OUTPUT)
    iterations = keys.count("hyper_connection.sinkhorn_iterations", high=MAX_STREAMS) if mixed else 0
    if kind is Residual.GATED:
        return replace(h, n_hyper=n, hyper_rank=keys.count("hyper_connection.low_rank"))
    eps = keys.at_least_0("hyper_connection.epsilon")
    magnitude = keys.positive("hyper_connection.magnitude", 0.0) if apart else 2.0
    return replace(h, n_hyper=n, hyper_iterations=iterations, hyper_eps=eps, hyper_magnitude=magnitude)


def _situ(keys: Keys) -> tuple[float, float]:
    if TRAITS[keys.arch].ffn.activation is not Activation.SITU:
        return 0.0, 0.0
    of_gate = keys.at_least_0("activation.situ_beta")
    if not of_gate:
        raise keys.error("activation.situ_beta", "is missing or 0, which is not supported")
    return of_gate, max(0.0, float(keys.number("activation.situ_linear_beta", 0.0)))


def _glu_limits(keys: Keys, n_layer: int) -> tuple[tuple[float, float], ...]:
    """SwiGLU clamps of each layer, from one number or one for each."""
    both = []
    ffn = TRAITS[keys.arch].ffn
    of_experts = keys.get("swiglu_clamp_exp", ffn.expert_limit)
    limits = {"swiglu_clamp_exp": of_experts, "swiglu_clamp_shexp": of_experts if ffn.one_limit else 0.0}
    for key, default in limits.items():
        value = np.asarray(keys.get(key, default))
        if value.ndim:
            keys.check_length(key, value)
        if value.ndim > 1 or value.dtype.kind not in "fiu" or not (np.isfinite(value) & (value >= 0)).all():
            raise keys.error(key, f"is not a number of at least 0 for each of {n_layer} layers")
        both.append(np.broadcast_to(value[:n_layer] if value.ndim else value, (n_layer,)).tolist())
    return tuple(zip(*both, strict=True)) if any(map(any, both)) else ()


def _of_several_positions(keys: Keys) -> bool:
    """True for M-RoPE, whose pairs are halves; of text all sections have the same position."""
    key = "rope.dimension_sections"
    sections = keys.get(key)
    if isinstance(sections, np.ndarray) and len(sections) not in (3, 4):
        raise keys.error(key, f"has {len(sections)} values, expected 4")
    return isinstance(sections, np.ndarray) and bool((sections[:2] > 0).all())


def _mrope(keys: Keys, n_pairs: int, *, interleaved: bool) -> tuple[int, ...]:
    """M-RoPE's component for each RoPE pair: sections one after the other, or one pair of each in
    turn as far as a section reaches, and time for the rest. (): the model has none."""
    if not _of_several_positions(keys):
        return ()
    sections = [int(n) for n in keys.get("rope.dimension_sections")[:4]]
    if interleaved:
        return tuple(i % 3 if i // 3 < sections[i % 3] else 0 for i in range(n_pairs))
    components = [component for component, n in enumerate(sections) for _ in range(n)]
    return tuple([*components, *[0] * n_pairs][:n_pairs])


def _xielu(keys: Keys, n_layer: int) -> tuple[tuple[float, float, float], ...]:
    """xIELU's (below, above, beta) of each layer; one number in the file stands for all layers.
    Its keys have no architecture prefix."""
    parameters = []
    for name in ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta"):
        value = np.asarray(keys.metadata.get(name))
        if value.shape not in ((), (n_layer,)) or value.dtype.kind not in "fiu" or not np.isfinite(value).all():
            raise ModelFileError(keys.file, f"key '{name}' is not a number for each of {n_layer} layers")
        parameters.append(np.broadcast_to(value, (n_layer,)))
    alpha_n, alpha_p, beta = parameters
    below, above = beta + np.logaddexp(0, alpha_n), np.logaddexp(0, alpha_p)
    return tuple((float(n), float(p), float(b)) for n, p, b in zip(below, above, beta, strict=True))


def _temperature(keys: Keys, scaling: RopeScaling) -> Temperature | None:
    default = TRAITS[keys.arch].attention.temperature
    if default is None:
        return None
    length = keys.count("attention.temperature_length", default.length or scaling.original_context)
    return replace(default, scale=keys.at_least_0("attention.temperature_scale", default.scale), length=length)


def _softcap(keys: Keys, key: str, default: float | None) -> float:
    return 0.0 if default is None else float(keys.number(key, default))


def _attention_scale(
    arch: str, n_layer: int, per_head: int, head_dim: int, mla: MLAParams | None, scaling: RopeScaling
) -> float:
    """1/√head_dim; the 27B Gemmas use n_embd / n_head (llama.cpp tells them by their depth)."""
    attention = TRAITS[arch].attention
    if mla and TRAITS[arch].rope.yarn_scales_scores:
        return mla.yarn_scale(scaling)
    if attention.unscaled or not attention.enabled:
        return 1.0
    if (arch, n_layer) in (("gemma2", 46), ("gemma3", 62)):
        return float(per_head**-0.5)
    return float((mla.size if mla else head_dim) ** (-1.0 if arch == "jais" else -0.5))


def _n_shared(keys: Keys, local: Sequence[bool]) -> int:
    """Number of last layers that use the KV cache of an earlier layer; `local`: sliding-window layers."""
    key = "attention.shared_kv_layers"
    n = keys.count_or_none(key) if TRAITS[keys.arch].attention.kv_sharing else 0
    if n and not set(local) == set(local[:-n]):
        raise keys.error(key, f"is {n}: {len(local)} layers with as many shared have none of a kind that keeps some")
    return n


def _n_idle(keys: Keys, layers: Sequence[LayerSizes]) -> int:
    """Number of last layers without attention."""
    attend = [layer.n_head_kv > 0 for layer in reversed(layers)]
    if True not in attend:
        raise keys.error("attention.head_count_kv", "is 0: no layer attends")
    return attend.index(True)


def _n_streams(keys: Keys) -> int:
    if active := keys.number("altup.active_idx", 0):
        raise keys.error("altup.active_idx", f"is {active:g}: only the first stream may run through the layers")
    return keys.count("altup.num_inputs", 4, 2, MAX_STREAMS)


def _sparsity(keys: Keys, n_layer: int) -> tuple[float | None, ...]:
    """Gaussian top-k deviations of each layer; −∞ in the file: None. The default is llama.cpp's:
    the top 5 % in the first ten layers."""
    key, default = "activation_sparsity_scale", [1.6448535] * 10 + [-np.inf] * (MAX_LAYERS - 10)
    values = keys.get(key, np.array(default[:n_layer], np.float32))
    if not isinstance(values, np.ndarray) or values.shape != (n_layer,) or values.dtype.kind != "f":
        raise keys.error(key, f"must be {n_layer} numbers")
    if not (values < np.inf).all():
        raise keys.error(key, "has a number that is not possible")
    return tuple(None if v == -np.inf else float(v) for v in values)


def _local_layers(keys: Keys, n_layer: int, n: int) -> tuple[bool, ...]:
    """Flags of the sliding-window layers, `n` with MTP blocks: `sliding_window_pattern` has them, or a period."""
    key, attention = "attention.sliding_window_pattern", TRAITS[keys.arch].attention
    value = keys.get(key, attention.window_period)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
        if len(value) != n_layer:  # some files leave out MTP blocks
            keys.check_length(key, value)
        return tuple(value[:n].astype(bool).tolist())
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise keys.error(key, f"is neither a period nor a flag for each of {n_layer} layers")
    return tuple(value == 0 or (layer + (not attention.full_first)) % value != 0 for layer in range(n_layer))


def _rope_scaling(keys: Keys, n_ctx_train: int) -> RopeScaling:
    # llama.cpp's default: linear, which a factor of 1 makes nothing
    kind = keys.get("rope.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in list(RopeScalingType):
        raise keys.error("rope.scaling.type", f"is {kind!r}; supported are {', '.join(RopeScalingType)}")
    multiplier = keys.at_least_0("rope.scaling.yarn_log_multiplier")
    if TRAITS[keys.arch].rope.yarn_scales_scores:
        multiplier *= 10  # such files have a tenth of it
    elif not TRAITS[keys.arch].attention.temperature:
        multiplier = 0.0
    return RopeScaling(
        RopeScalingType(kind),
        keys.factor("rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"),
        keys.count("rope.scaling.original_context_length", n_ctx_train),
        keys.positive("rope.scaling.attn_factor", 1.0),
        keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        multiplier,
    )
