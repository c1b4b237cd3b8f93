"""Shapes of a synthetic model's tensors: those of the map of tensors, which llama.cpp confirms as it loads the file."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from logitless.models.gguf.file import TensorInfo
from logitless.models.hparams.hparams import Hparams, read_hparams
from logitless.models.weights.tensor_map import mtp_tensors, tensor_map

Shape = tuple[int, ...]
FLAT = ("ssm_a", "ssm_d", "ssm_dt.bias")  # ends of tensor names without .weight
# RWKV's matrices of low rank, by the keys of their ranks
RANKS = {
    "time_mix_w1": "attention.decay_lora_rank",
    "time_mix_a1": "attention.iclr_lora_rank",
    "time_mix_v1": "attention.value_residual_mix_lora_rank",
    "time_mix_g1": "attention.gate_lora_rank",
    "time_mix_decay_w1": "time_decay_extra_dim",
}
FUSED_FFN = ("phi3", "glm4", "chatglm", "modern-bert")  # whose gates are rows of ffn_up where Q, K and V are fused
BALANCED = (  # the choice of experts has a bias
    *("ernie4_5-moe", "dots1", "glm4moe", "minimax-m2", "bailingmoe2", "lfm2moe", "nemotron_h_moe"),
    *("exaone-moe", "afmoe", "hy_v3"),
)
OPTIONAL = {  # by tensor, the architectures whose specs all have it
    "ffn_gate_inp_shexp": ("qwen2moe", "qwen35moe", "qwen3next"),
    "scale": ("gemma4",),
    "dense_2": ("gemma-embedding",),
    "dense_3": ("gemma-embedding",),
}
BARE_NORMS = ("post_attention_norm", "post_ffw_norm", "ssm_b_norm", "ssm_c_norm", "ssm_dt_norm")


def key_name(arch: str, key: str) -> str:
    return key if key.startswith(("xielu.", "tokenizer.")) else f"{arch}.{key}"


def tensor_shapes(s: Any, keys: dict[str, Any]) -> dict[str, Shape]:
    """Shapes of the file's tensors, without .weight: the required ones, and the optional ones that the spec names."""
    values = {key_name(s.arch, name): np.array(v) if isinstance(v, list) else v for name, v in keys.items()}
    metadata = {name: value for name, value in values.items() if value is not None}
    h = read_hparams({"general.architecture": s.arch} | metadata, s.n_vocab, "a spec")
    if h.experts and h.architecture.moe.in_any_layer:
        mimo = s.arch == "mimo2"  # whose MTP blocks are dense there
        with_router = tuple(i % 3 > 0 and not (mimo and i >= h.n_layer) for i in range(h.n_layer + s.n_mtp))
        h = replace(h, experts=replace(h.experts, in_layers=with_router))
    present = _present(s, keys, h)
    out: dict[str, Shape] = {}
    for name, part in chain(tensor_map(h, present), mtp_tensors(h, present) if s.n_mtp else ()):
        source = part.source.removesuffix(".weight")
        if not name.endswith((".weight", ".scale", *FLAT)) or not (part.required or _is_named(s, keys, source)):
            continue
        rows = max(part.start + part.n_rows, out.get(source, (0,))[0] if not part.n_experts else 0)
        shape = (part.n_experts, rows, *part.shape[1:]) if part.n_experts else (rows, *part.shape[1:])
        if "vectors" in s.traits and source.endswith("ffn_gate_inp_shexp"):
            shape = part.shape[1:]
        if part.stacked:
            shape = ((part.start + part.shape[0]) // part.shape[1], part.shape[1], part.shape[1])
        out[source] = part.in_file or shape
    out |= _unmapped(s, h, out)
    blocks = tuple(f"blk.{h.n_layer + i}." for i in range(s.n_mtp))  # last, so that layers are as without them
    return dict(sorted(out.items(), key=lambda item: item[0].startswith(blocks)))


def _present(s: Any, keys: dict[str, Any], h: Hparams) -> dict[str, TensorInfo]:
    """Tensors by which the map of tensors knows a file's form."""
    shapes: dict[str, Shape] = {}
    for i in range(h.n_layer + s.n_mtp):
        size = h.sizes(i)
        fused_ffn = "fused ffn" in s.traits or (s.fused and s.arch in FUSED_FFN)
        layer = {
            **{name: (1, 1) for name in ("ssm_g", "ffn_routed_down", "attn_norm_2") if name in s.traits},
            **dict.fromkeys(("ssm_f_b", "ssm_g_b"), (1, 1) if "low rank" in s.traits else ()),
            "attn_qkv": (1, h.n_embd) if s.fused else (),
            "attn_kv_b": (1, 1) if h.mla and "attention.key_length_mla" not in keys else (),
            "laurel_l": (64, h.n_embd) if h.architecture.altup else (),
            "ffn_gate_up_exps": (1, 1) if "fused experts" in s.traits else (),
            "ffn_up": (2 * size.n_ff, h.n_embd) if fused_ffn else (1,) if "beside" in s.traits else (),
            "attn_gate": (size.n_head, h.n_embd) if "head gates" in s.traits else (),
            **{name: (keys[of], 1) for name, of in RANKS.items() if keys.get(of)},
            **({"time_mix_w1": (5 * n, 1)} if (n := keys.get("time_mix_extra_dim")) else {}),
            "ffn_up_shexp": (2 * h.experts.n_ff_shared, h.n_embd) if h.experts and "fused shared" in s.traits else (),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items() if shape}
        if "bare norms" in s.traits:
            shapes |= {f"blk.{i}.{name}": (h.n_embd,) for name in BARE_NORMS}
    rows = {
        "token_types": 2 * ("token_types" in s.traits),
        "output": keys.get("embedding_length_out", 0),
        "cls.output": 2 * ("ranks" in s.traits and s.arch != "modern-bert"),
        "dense_2": keys.get("dense_2_feat_out", 0),
        "dense_3": h.n_embd * ("dense_2_feat_out" in keys),
    }
    shapes |= {f"{name}.weight": (n, h.n_embd) for name, n in rows.items() if n}
    return {name: TensorInfo("", shape, "f32", 0, 0) for name, shape in shapes.items()}


def _is_named(s: Any, keys: dict[str, Any], source: str) -> bool:
    """True for an optional tensor that this model has."""
    owner, _, short = source.rpartition(".")
    if owner.endswith("cls") or short == "cls":
        return "ranks" in s.traits and (s.arch == "modern-bert" or source == "cls.output")
    if short == "shared_head_norm":
        return "no norm behind" not in s.traits
    if s.arch == "deci" and short in ("attn_norm", "attn_output"):  # one matrix in the place of attention
        return bool(keys["attention.head_count"][int(owner.split(".")[1])])
    if s.arch == "gemma4" and short == "attn_v":
        far = not keys["attention.sliding_window_pattern"][int(owner.split(".")[1])]
        return not (far and "keys as values" in s.traits)
    return short in s.traits or (short == "output" and s.untied) or s.arch in OPTIONAL.get(short, ())


def _unmapped(s: Any, h: Hparams, mapped: dict[str, Shape]) -> dict[str, Shape]:
    """Tensors of the file that no graph reads, and biases on the choice of experts."""
    out: dict[str, Shape] = {}
    if "time_mix_v0" in s.traits:
        out |= {f"blk.0.time_mix_v{i}": mapped[f"blk.0.time_mix_a{i}"] for i in range(3)}
    if s.arch == "kimi-k3":
        out["blk.0.attn_res_score"] = (h.n_embd,)
    for i in range(h.n_layer + s.n_mtp):
        if h.indexer and i >= h.n_layer and not h.indexes(i):  # which MTP blocks have without a use
            of_layer = (name for name in mapped if name.startswith(f"blk.{h.indexer.layers.index(True)}.indexer"))
            out |= {name.replace(name.split(".")[1], str(i), 1): mapped[name] for name in of_layer}
        if i > h.n_layer:  # the second MTP block and those behind it
            first = f"blk.{h.n_layer}."
            out |= {name.replace(first, f"blk.{i}."): shape for name, shape in mapped.items() if first in name}
        if "unused" in s.traits and not h.has_own_kv(i):
            kv, d = h.sizes(i).n_head_kv * h.sizes(i).head_dim, h.sizes(i).head_dim
            out |= {f"blk.{i}.attn_{name}": (kv, h.n_embd) for name in ("k", "v")} | {f"blk.{i}.attn_k_norm": (d,)}
        routed = (e := h.experts_of(i)) is not None and i >= e.n_hashed
        balanced = "balanced" in s.traits or s.arch in BALANCED
        if balanced and routed and not ("one unbalanced" in s.traits and i == h.n_layer - 1):
            out[f"blk.{i}.exp_probs_b"] = (s.n_expert,)
    return out
