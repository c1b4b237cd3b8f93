"""Families of Hugging Face's models, and the moves of their tensors.

Names of tensors are those of the gguf package's map. A row: the architecture of config.json, that of GGUF, what the
keys of all models lack, and what differs in the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from logitless.models.huggingface import moves as m
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.families import keys
from logitless.models.huggingface.families.family import Family, Rules, Splits, Targets
from logitless.models.huggingface.moves import Move, Shape


def _of_experts(shape: Shape, c: Config) -> Shape:
    """Rows of all experts below each other: of nomic's settings, or DBRX's."""
    n = max(1, c.count("num_experts", default=c.part("ffn_config").count("moe_num_experts", default=0)))
    return n, shape[0] // n, shape[1]


_LLAMA: Rules = (("attn_q.(weight|bias)", m.PAIRS_OF_QUERIES), ("attn_k.(weight|bias)", m.PAIRS_OF_KEYS))


def _queries_keys_values(part: Callable[[int], Move]) -> tuple[tuple[str, Move], ...]:
    """Three tensors of one, whose queries and keys have pairs in turn."""
    return (
        ("attn_q.weight", m.then(part(0), m.PAIRS_OF_QUERIES)),
        ("attn_k.weight", m.then(part(1), m.PAIRS_OF_KEYS)),
        ("attn_v.weight", part(2)),
    )


_GEMMA: Rules = (("norm.weight", m.PLUS_ONE), ("nextn.[eh]norm.weight", m.PLUS_ONE))
_STATES: Rules = (("conv1d.weight", m.TAPS), ("shortconv.conv.weight", m.TAPS))
_NAMES = ("gate", "up")
_PARTS = (*_NAMES, "down")
_MAMBA: Rules = (("ssm_a", m.MINUS_EXP), *_STATES)


def _halves(kind: str = "", end: str = "weight", *, in_turn: bool = False, axis: int = -2) -> Targets:
    """Gate and up of one tensor."""
    return tuple((f"ffn_{name}{kind}.{end}", m.half(i, in_turn=in_turn, axis=axis)) for i, name in enumerate(_NAMES))


_GRANITE: Splits = (
    *(
        (f"{module}.input_linear.weight$", _halves(f"_{end}"))
        for module, end in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp"))
    ),
    ("block_sparse_moe.output_linear.weight$", "ffn_down_exps.weight"),
    ("shared_mlp.output_linear.weight$", "ffn_down_shexp.weight"),
)


def _experts(module: str) -> Splits:
    """Experts of a module whose name the gguf package has not."""
    return tuple((rf"{module}\.experts\.{name}_proj\.weight$", f"ffn_{name}_exps.weight") for name in _PARTS)


_HALVES: Splits = (  # experts of which gate and up are one tensor, one above the other
    ("experts.gate_up_proj$", _halves("_exps")),
    ("experts.down_proj$", "ffn_down_exps.weight"),
)


def _fused_experts(*, in_turn: bool) -> Splits:
    """Experts (n, inputs, outputs), of which gate and up are one tensor."""
    rows = [m.half(i, in_turn=in_turn) for i in range(2)]
    return (
        (
            "experts.gate_up_proj$",
            tuple(
                (f"ffn_{name}_exps.weight", m.then(m.TRANSPOSED, move)) for name, move in zip(_NAMES, rows, strict=True)
            ),
        ),
        ("experts.down_proj$", (("ffn_down_exps.weight", m.TRANSPOSED),)),
    )


_GPT_OSS: Splits = (
    *_fused_experts(in_turn=True),
    ("experts.gate_up_proj_mxfp4$", _halves("_exps", in_turn=True)),
    ("experts.down_proj_mxfp4$", "ffn_down_exps.weight"),
    ("experts.gate_up_proj_bias$", _halves("_exps", "bias", in_turn=True, axis=-1)),
    ("experts.down_proj_bias$", "ffn_down_exps.bias"),
    ("self_attn.sinks$", "attn_sinks.weight"),
)
_LATENT: Splits = (("kv_b_proj.weight$", (("attn_k_b.weight", m.LATENT_KEYS), ("attn_v_b.weight", m.LATENT_VALUES))),)
_QWEN3_NEXT: Splits = (
    ("in_proj_qkvz.weight$", (("attn_qkv.weight", m.LINEAR_QKV), ("attn_gate.weight", m.LINEAR_GATES))),
    ("linear_attn.norm.weight$", "ssm_norm.weight"),
)
_MAMBA2: Rules = (
    ("ssm_a", m.then(m.MINUS_EXP, m.COLUMN)),
    ("ssm_d", m.COLUMN),
    ("ssm_norm.weight", m.GROUPS),
    *_STATES,
)
_GRANITE_DENSE: Splits = (
    ("shared_mlp.input_linear.weight$", _halves()),
    ("shared_mlp.output_linear.weight$", "ffn_down.weight"),
)
_CUT = Move(
    lambda array, c: array[keys.behind_padding(c) :], lambda shape, c: (shape[0] - keys.behind_padding(c), *shape[1:])
)
_QKV, _NORMS, _ALL = "attn_[qkv]", "(attn|ffn|output)_norm(_2)?", "(attn|ffn)_.*|output_norm"  # weights with a bias
_UNUSED_HEADS = r"position_ids$|(^|\.)pooler\.|^(cls|lm_head|decoder|head)\."


_EXPERTS = m.reshaped(_of_experts)
_BERT = Family("bert", keys.encoder, unused=_UNUSED_HEADS, biases=_ALL)
_ROBERTA = replace(_BERT, keys=keys.roberta, moves=(("position_embd.weight", _CUT),))
_CLASSIFIER: Splits = ((r"^classifier\.(weight|bias)$", r"cls.output.\1"),)
_OUTPUT = ("cls.output.weight", "cls.output.bias")
_NEMOTRON_H: Splits = ((r"mixer\.experts\.(up|down)_proj\.weight$", r"ffn_\1_exps.weight"),)
_LFM2_MOE: Splits = (
    *(
        (rf"feed_forward\.experts\.{part}\.weight$", f"ffn_{name}_exps.weight")
        for part, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
    ("feed_forward.expert_bias$", "exp_probs_b.bias"),
)
_QWEN35 = Family(
    "qwen35",
    keys.qwen35,
    (
        *_GEMMA,
        ("attn_qkv.weight", m.tiled("linear_value_head_dim", behind_keys=True)),
        ("attn_gate.weight", m.tiled("linear_value_head_dim")),
        ("(ssm_alpha|ssm_beta).weight", m.tiled()),
        ("ssm_dt.bias", m.tiled()),
        ("ssm_a", m.then(m.MINUS_EXP, m.tiled())),
        ("ssm_conv1d.weight", m.then(m.TAPS, m.tiled("linear_value_head_dim", behind_keys=True))),
        ("ssm_out.weight", m.tiled("linear_value_head_dim", axis=1)),
    ),
    (("linear_attn.norm.weight$", "ssm_norm.weight"), *_HALVES),
    mtp=True,
)
_PADDED = Move(
    lambda array, c: np.pad(array, ((0, keys.behind_rows(c)), (0, 0))),
    lambda s, c: (s[0] + keys.behind_rows(c), *s[1:]),
)
_GEMMA3N = Family(
    "gemma3n",
    keys.gemma3n,
    (("per_layer_token_embd.weight", _PADDED),),
    (
        ("altup_projections.weight$", "altup_proj.weight"),
        ("altup_unembed_projections.weight$", "altup_unembd_proj.weight"),
        ("altup.correct_output_scale$", "altup_correct_scale.weight"),
    ),
)
_GEMMA4: Splits = (
    ("layer_scalar$", "layer_output_scale.weight"),
    ("router.scale$", "ffn_gate_inp.scale"),
    ("router.per_expert_scale$", "ffn_down_exps.scale"),
    ("experts.gate_up_proj$", "ffn_gate_up_exps.weight"),
    ("experts.down_proj$", "ffn_down_exps.weight"),
)
_FALCON_H1: Rules = (
    ("token_embd.weight", m.times("embedding_multiplier")),
    ("^output.weight", m.times("lm_head_multiplier")),
    ("attn_q.weight", m.times("attention_in_multiplier")),
    ("attn_k.weight", m.times("attention_in_multiplier", "key_multiplier")),
    ("attn_v.weight", m.times("attention_in_multiplier")),
    ("attn_output.weight", m.times("attention_out_multiplier")),
    ("ssm_in.weight", m.MAMBA_IN),
    ("ssm_out.weight", m.times("ssm_out_multiplier")),
    ("ffn_gate.weight", m.GATE_FACTOR),
    ("ffn_down.weight", m.DOWN_FACTOR),
    ("ssm_a", m.then(m.MINUS_EXP, m.COLUMN)),
    ("ssm_d", m.COLUMN),
    *_STATES,
)


_EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
_DEEPSEEK4 = Family(
    "deepseek4",
    keys.deepseek4,
    splits=(
        (r"^(?:model\.)?embed\.weight$", "token_embd.weight"),
        (r"hc_head(?:\.hc)?_(base|fn|scale)$", r"output_hc_\1.weight"),
        (r"\.(hc_(?:attn|ffn)_(?:base|fn|scale))$", r"\1.weight"),
        (r"\.((?:attn|ffn)_norm\.weight)$", r"\1"),
        (r"\.(attn|indexer)\.compressor\.w?(ape|norm|gate|kv)(?:\.weight)?$", r"\1_compressor_\2.weight"),
        (r"\.indexer\.wq_b\.weight$", "indexer.attn_q_b.weight"),
        (r"\.indexer\.weights_proj\.weight$", "indexer.proj.weight"),
        (r"\.attn\.wq_([ab])\.weight$", r"attn_q_\1.weight"),
        (r"\.attn\.wo_([ab])\.weight$", r"attn_output_\1.weight"),
        (r"\.attn\.wkv\.weight$", "attn_kv.weight"),
        (r"\.attn\.q_norm\.weight$", "attn_q_a_norm.weight"),
        (r"\.attn\.(?:kv_)?norm\.weight$", "attn_kv_a_norm.weight"),
        (r"\.attn\.attn_sink$", "attn_sinks.weight"),
        (r"\.ffn\.gate\.weight$", "ffn_gate_inp.weight"),
        (r"\.ffn\.gate\.tid2eid$", "ffn_gate_tid2eid.weight"),
        (r"\.ffn\.gate\.bias$", "exp_probs_b.bias"),
        *((rf"\.ffn\.experts\.{w}\.weight$", f"ffn_{name}_exps.weight") for w, name in _EXPERT_PARTS.items()),
        *((rf"\.shared_experts\.{w}\.weight$", f"ffn_{name}_shexp.weight") for w, name in _EXPERT_PARTS.items()),
    ),
    names="deepseek2",
)


def _lerps(names: str, pattern: str) -> tuple[tuple[str, str], ...]:
    """RWKV's shares of the token before in so many inputs, of which GGUF has one tensor."""
    return tuple((pattern.format(name), rf".lerp.{i}.weight") for i, name in enumerate(names))


_FUSED: Splits = ((r"\.lerp(?:\.weight)?$", (("time_mix_lerp_fused.weight", m.LERPS),)),)
_RWKV6 = Family(
    "rwkv6",
    keys.rwkv6,
    (("time_mix_(decay_)?w[12].weight", m.TRANSPOSED), ("(decay|lerp_[xkr]).weight", m.VECTOR)),
    _FUSED,
    (*_lerps("wkvrg", r"(?<=attention|self_attn)\.time_maa_{}$"), (r"(\.time_\w+)$", r"\1.weight")),
    biases=rf"{_NORMS}|token_embd_norm|time_mix_ln",
)
_RWKV7 = Family(
    "rwkv7",
    keys.rwkv7,
    (("(k_k|k_a|lerp_k).weight", m.VECTOR), ("r_k.weight", m.HEADS)),
    (
        *_FUSED,
        # of low rank: as fla's layers have them, or transposed; llama.cpp wants those of values in the first layer, too
        *(
            split
            for end, matrix in ((r"\.weight", None), ("", m.TRANSPOSED))
            for n, move in (("0", m.VECTOR), ("[12]", matrix))
            for split in (
                (rf"\.0\.attention\.a({n}){end}$", tuple((rf"time_mix_{x}\1.weight", move) for x in "av")),
                (rf"\.attention\.([wavg]{n}){end}$", ((r"time_mix_\1.weight", move),)),
            )
        ),
    ),
    (
        (r"\.(attn|self_attn\.time_mixer)\.", ".attention."),
        (r"\.ffn\.", ".feed_forward."),
        (r"\.attn_norm\.", ".ln1."),
        (r"\.ffn_norm\.", ".ln2."),
        (r"\.g_norm\.", ".ln_x."),
        (r"_lora\.lora\.0\.", "1."),
        (r"_lora\.lora\.2\.bias$", "0.weight"),
        (r"_lora\.lora\.2\.", "2."),
        (r"(?<=\.attention)\.x_x$", ".lerp"),
        *_lerps("rwkvag", r"(?<=\.attention)\.x_{}$"),
        (r"(\.[xkr]_[ka])$", r"\1.weight"),
    ),
    r"layers\.0\.attention\.v[012](\.weight)?$",
    biases=_RWKV6.biases,
)

_ROWS: dict[str, Family] = {  # by names of architectures
    "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM": Family("llama", moves=_LLAMA),
    "Ministral3ForCausalLM, Mistral3ForConditionalGeneration": Family("mistral3", keys.mistral3, _LLAMA),
    "Llama4ForCausalLM, Llama4ForConditionalGeneration": Family(
        "llama4", keys.llama4, splits=_fused_experts(in_turn=False)
    ),
    "Qwen2ForCausalLM": Family("qwen2", biases=_QKV),
    "Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration": Family("qwen2vl", biases=_QKV),
    "Qwen3VLForConditionalGeneration": Family("qwen3vl", keys.qwen3vl),
    "Qwen3VLMoeForConditionalGeneration": Family("qwen3vlmoe", keys.qwen3vl, splits=_fused_experts(in_turn=False)),
    "Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration": Family("llama", moves=_LLAMA),
    "Qwen2MoeForCausalLM": Family("qwen2moe", biases=_QKV),
    "Qwen3ForCausalLM": Family("qwen3"),
    "Qwen3MoeForCausalLM": Family("qwen3moe"),
    "Qwen3NextForCausalLM": Family(
        "qwen3next", keys.qwen3_next, (*_GEMMA, ("ssm_a", m.MINUS_EXP), *_STATES), _QWEN3_NEXT, mtp=True
    ),
    "GemmaForCausalLM": Family("gemma", moves=_GEMMA),
    "Gemma2ForCausalLM": Family("gemma2", keys.gemma2, _GEMMA),
    "Gemma3ForCausalLM, Gemma3ForConditionalGeneration": Family("gemma3", keys.gemma3, _GEMMA),
    "Phi3ForCausalLM": Family("phi3", keys.phi3),
    "PhiForCausalLM": Family("phi2", biases=rf"{_ALL}|output"),
    "SmolLM3ForCausalLM": Family("smollm3", moves=_LLAMA),
    "Olmo2ForCausalLM, Olmo3ForCausalLM": Family("olmo2", keys.windows),
    "OlmoeForCausalLM": Family("olmoe"),
    "GraniteForCausalLM": Family("granite", keys.scales, _LLAMA),
    "GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM": Family("granitemoe", keys.scales, _LLAMA, _GRANITE),
    "GptOssForCausalLM": Family("gpt-oss", keys.gpt_oss, splits=_GPT_OSS, biases=rf"{_QKV}|attn_output|ffn_.*"),
    **dict.fromkeys(
        (
            *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
            *("KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        ),
        Family("deepseek2", keys.mla, splits=_LATENT, mtp=True),
    ),
    "DeepseekV32ForCausalLM": Family("deepseek32", keys.sparse_mla, splits=_LATENT, names="glm-dsa", mtp=True),
    "GlmMoeDsaForCausalLM": Family("glm-dsa", keys.sparse_mla, splits=_LATENT, mtp=True),
    "Mistral4ForCausalLM, Mistral3ForConditionalGeneration of experts": Family(
        "mistral4", keys.mistral4, splits=(*_LATENT, *_HALVES)
    ),
    "MiMoV2FlashForCausalLM, MiMoV2ForCausalLM": Family(
        "mimo2",
        keys.mimo2,
        splits=(
            (r"attention_sink_bias$", "attn_sinks.weight"),
            (r"final_layernorm\.weight$", "layer_output_norm.weight"),
            (r"self_attn\.qkv_proj\.weight$", "attn_qkv.weight"),
        ),
        mtp=True,
    ),
    "DbrxForCausalLM": Family(
        "dbrx",
        keys.dbrx,
        splits=(
            (r"ffn\.experts\.mlp\.w1$", (("ffn_gate_exps.weight", _EXPERTS),)),
            (r"ffn\.experts\.mlp\.v1$", (("ffn_up_exps.weight", _EXPERTS),)),
            (r"ffn\.experts\.mlp\.w2$", (("ffn_down_exps.weight", m.then(_EXPERTS, m.TRANSPOSED)),)),
        ),
    ),
    "BitnetForCausalLM": Family("bitnet", keys.bitnet),
    "BitNetForCausalLM": Family(
        "bitnet",
        keys.bitnet,
        splits=tuple((rf"{name}_sub_norm\.weight$", f"{name}_sub_norm.weight") for name in ("attn", "ffn")),
    ),
    "QWenLMHeadModel": Family("qwen", biases="attn_qkv"),
    "DeepseekForCausalLM": Family("deepseek", keys.deepseek, _LLAMA),
    "OpenELMForCausalLM": Family("openelm", keys.openelm, splits=((r"ffn\.proj_1\.weight$", _halves()),)),
    "Glm4ForCausalLM": Family("glm4"),
    "Glm4MoeForCausalLM": Family("glm4moe", keys.sigmoid, mtp=True),
    "Lfm2ForCausalLM": Family("lfm2", keys.lfm2, _STATES),
    "Lfm2MoeForCausalLM": Family("lfm2moe", keys.lfm2_moe, _STATES, _LFM2_MOE),
    "FalconH1ForCausalLM": Family("falcon-h1", keys.mamba2, _FALCON_H1),
    "NemotronHForCausalLM": Family("nemotron_h", keys.nemotron_h, _MAMBA2),
    "NemotronHForCausalLM of experts": Family("nemotron_h_moe", keys.nemotron_h, _MAMBA2, _NEMOTRON_H),
    "Mamba2ForCausalLM": Family("mamba2", keys.mamba2_alone, _MAMBA2),
    "GraniteMoeHybridForCausalLM": Family("granitehybrid", keys.granite_hybrid, (*_LLAMA, *_MAMBA2), _GRANITE_DENSE),
    "GraniteMoeHybridForCausalLM of experts": Family(
        "granitehybrid", keys.granite_hybrid, (*_LLAMA, *_MAMBA2), _GRANITE
    ),
    "Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration": _QWEN35,
    "Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration": replace(_QWEN35, arch="qwen35moe"),
    "Gemma3nForCausalLM, Gemma3nForConditionalGeneration": _GEMMA3N,
    "Gemma4ForCausalLM, Gemma4ForConditionalGeneration": Family("gemma4", keys.gemma4, splits=_GEMMA4),
    "BertModel, BertForMaskedLM, BertForPreTraining": _BERT,
    "BertForSequenceClassification": replace(
        _BERT,
        splits=(*_CLASSIFIER, (r"pooler\.dense\.(weight|bias)$", r"cls.\1")),
        unused="position_ids$",
        required=("cls.weight", "cls.bias", *_OUTPUT),
    ),
    **dict.fromkeys(
        (f"{kind}{end}" for kind in ("Roberta", "XLMRoberta") for end in ("Model", "ForMaskedLM")), _ROBERTA
    ),
    **dict.fromkeys(
        (f"{kind}ForSequenceClassification" for kind in ("Roberta", "XLMRoberta")),
        replace(_ROBERTA, required=("cls.weight", "cls.bias", *_OUTPUT)),
    ),
    "NomicBertModel": Family("nomic-bert", keys.nomic, unused=_UNUSED_HEADS),
    "NomicBertModel of experts": Family(
        "nomic-bert-moe",
        keys.nomic_moe,
        splits=(
            (r"mlp\.experts\.mlp\.w1$", (("ffn_up_exps.weight", _EXPERTS),)),
            (r"mlp\.experts\.mlp\.w2$", (("ffn_down_exps.weight", m.then(_EXPERTS, m.TRANSPOSED)),)),
        ),
        unused=rf"{_UNUSED_HEADS}|mlp\.experts\.bias$",
    ),
    "JinaEmbeddingsV3Model, XLMRobertaModel of adapters": Family(
        "jina-bert-v3", keys.jina3, unused=rf"{_UNUSED_HEADS}|\.lora_[AB]$", biases=_ALL
    ),
    "GPTNeoXForCausalLM": Family(
        "gptneox", keys.gpt, (("attn_qkv.(weight|bias)", m.HEADS_APART),), biases=rf"{_NORMS}|ffn_.*"
    ),
    "BloomForCausalLM, BloomModel": Family(
        "bloom", keys.gpt, (("attn_qkv.(weight|bias)", m.HEADS_APART),), biases=rf"{_ALL}|token_embd_norm"
    ),
    "MptForCausalLM, MPTForCausalLM": Family("mpt", keys.mpt),
    "FalconForCausalLM, RWForCausalLM": Family(
        "falcon", keys.falcon, (("attn_qkv.(weight|bias)", m.FALCON_APART),), biases=_NORMS
    ),
    "GPTBigCodeForCausalLM": Family("starcoder", keys.starcoder, biases=_ALL),
    "GPT2LMHeadModel": Family(
        "gpt2", keys.gpt, (("blk.\\d+.(attn_qkv|attn_output|ffn_up|ffn_down).weight", m.TRANSPOSED),), biases=_ALL
    ),
    "Jais2ForCausalLM": Family("jais2", biases=_NORMS),
    "GlmForCausalLM": Family("chatglm"),
    "MambaForCausalLM, FalconMambaForCausalLM": Family("mamba", keys.mamba, _MAMBA),
    "JambaForCausalLM": Family("jamba", keys.mamba, _MAMBA, _experts("feed_forward")),
    "MellumForCausalLM": Family("mellum", keys.mellum, names="qwen3moe"),
    "HYV3ForCausalLM": Family(
        "hy_v3",
        keys.hy_v3,
        splits=(
            (r"post_attention_layernorm\.weight$", "ffn_norm.weight"),
            (r"mlp\.expert_bias$", "exp_probs_b"),
            (r"mlp\.router\.gate\.weight$", "ffn_gate_inp.weight"),
            *((rf"shared_mlp\.{name}_proj\.weight$", f"ffn_{name}_shexp.weight") for name in _PARTS),
        ),
        names="glm4moe",
    ),
    "AfmoeForCausalLM": Family("afmoe", keys.afmoe, splits=((r"mlp\.expert_bias$", "exp_probs_b.bias"),)),
    "BaichuanForCausalLM, BaiChuanForCausalLM": Family(
        "baichuan", splits=((r"W_pack\.weight$", _queries_keys_values(m.third)),)
    ),
    "InternLM2ForCausalLM": Family(
        "internlm2", splits=((r"attention\.wqkv\.weight$", _queries_keys_values(m.part_of_groups)),)
    ),
    "XverseForCausalLM": Family("xverse", moves=_LLAMA),
    "OrionForCausalLM": Family("orion", biases=_NORMS),
    "MiniCPMForCausalLM": Family("minicpm", keys.minicpm, _LLAMA),
    "PhimoeForCausalLM, PhiMoEForCausalLM": Family("phimoe", keys.phi3, biases=_NORMS),
    **dict.fromkeys(
        (f"{kind}ForConditionalGeneration" for kind in ("T5", "MT5", "UMT5")),
        Family("t5", keys.t5_model, unused=r"^(en|de)coder\.embed_tokens\."),
    ),
    "T5EncoderModel": Family("t5encoder", keys.t5, unused=r"^encoder\.embed_tokens\."),
    "EuroBertModel": Family("eurobert", keys.eurobert),
    "JinaBertModel, JinaBertForMaskedLM": Family(
        "jina-bert-v2", keys.encoder, unused=_UNUSED_HEADS, biases=rf"{_QKV}|attn_output|ffn_down"
    ),
    "MiniCPM3ForCausalLM": Family("minicpm3", keys.minicpm3),
    "Gemma3TextModel": Family("gemma-embedding", keys.gemma_embedding, _GEMMA),
    "ApertusForCausalLM": Family(
        "apertus",
        unused=r"act_fn\.",
        numbers=tuple((f"act_fn.{name}", f"xielu.{name}") for name in ("alpha_n", "alpha_p", "beta", "eps")),
    ),
    "ModernBertModel, ModernBertForMaskedLM": Family("modern-bert", keys.modern_bert, unused=_UNUSED_HEADS),
    "ModernBertForSequenceClassification": Family(
        "modern-bert", keys.modern_bert, splits=_CLASSIFIER, required=("cls.weight", "cls.norm.weight", *_OUTPUT)
    ),
    "Ernie4_5_MoeForCausalLM": Family("ernie4_5-moe", keys.ernie_moe, (("exp_probs_b.bias", m.VECTOR),)),
    "HunYuanMoEV1ForCausalLM": Family("hunyuan-moe", keys.hunyuan_moe),
    "MiniMaxM2ForCausalLM": Family("minimax-m2", keys.minimax_m2),
    "Dots1ForCausalLM": Family("dots1", keys.sigmoid),
    "ExaoneMoeForCausalLM": Family("exaone-moe", keys.exaone_moe),
    "CohereForCausalLM": Family("command-r", keys.cohere),
    "OlmoForCausalLM": Family("olmo", keys.layer_norm, _LLAMA),
    "NemotronForCausalLM": Family("nemotron", keys.layer_norm, _GEMMA, biases=_NORMS),
    "SeedOssForCausalLM": Family("seed_oss"),
    "Exaone4ForCausalLM": Family("exaone4", keys.windows),
    "Ernie4_5ForCausalLM": Family("ernie4_5"),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan-dense"),
    "Cohere2ForCausalLM": Family("cohere2", keys.cohere2),
    "Cohere2MoeForCausalLM": Family("cohere2moe", keys.cohere2_moe, names="deepseek", mtp=True),
    "Starcoder2ForCausalLM": Family("starcoder2", biases=_ALL),
    "StableLmForCausalLM": Family("stablelm", biases=_NORMS),
    "ArceeForCausalLM": Family("arcee", moves=_LLAMA),
    "DeepseekV4ForCausalLM": _DEEPSEEK4,
    "JAISLMHeadModel": Family(
        "jais",
        keys.jais,
        (("blk.\\d+.(attn_qkv|attn_output|ffn_gate|ffn_up|ffn_down).weight", m.TRANSPOSED),),
        (
            (
                r"wte\.weight$",
                (
                    ("token_embd.weight", m.times("mup_embeddings_scale", "embeddings_scale")),
                    ("output.weight", m.times("width_scale", "mup_output_alpha", "mup_width_scale")),
                ),
            ),
        ),
        unused=r"^lm_head\.weight$|relative_pe\.slopes$",
        biases=_ALL,
    ),
    "GPTRefactForCausalLM": Family(
        "refact",
        keys.refact,
        splits=(
            (r"attn\.q\.weight$", "attn_q.weight"),
            (r"attn\.kv\.weight$", (("attn_k.weight", m.half(0)), ("attn_v.weight", m.half(1)))),
            (r"gate_up_proj\.weight$", _halves()),
        ),
    ),
    "PlamoForCausalLM": Family(
        "plamo", keys.plamo, (("attn_q.weight", m.SHARED_HEADS), ("attn_output.weight", m.SHARED_COLUMNS))
    ),
    "Rwkv6ForCausalLM": _RWKV6,
    "RWKV7ForCausalLM, Rwkv7ForCausalLM": _RWKV7,
    "RWKV6Qwen2ForCausalLM": replace(
        _RWKV6,
        arch="rwkv6qwen2",
        keys=keys.qrwkv6,
        moves=(
            ("time_mix_w1.weight", m.then(m.TRANSPOSED, m.INPUTS)),
            ("time_mix_w2.weight", m.then(m.TRANSPOSED, m.INPUTS)),
            *_RWKV6.moves,
        ),
        biases="",
    ),
    "RwkvHybridForCausalLM": replace(_RWKV7, arch="arwkv7", keys=keys.arwkv7, biases=""),
}
FAMILIES = {name: family for names, family in _ROWS.items() for name in names.split(", ")}
