"""Tensors of synthetic Gemma 3n and Gemma 4 models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.helpers.reference_model import Spec

ARCHITECTURES = ("gemma3n", "gemma4")
N_STREAMS = 4


def is_far(s: Spec, layer: int) -> bool:
    pattern = s.keys.get("attention.sliding_window_pattern")
    return not pattern[layer] if pattern else layer % 5 == 4


def of_layer(s: Spec, key: str, default: int, layer: int) -> int:
    value = s.keys.get(key, default)
    return int(value[layer] if isinstance(value, list) else value)


def head_dim(s: Spec, layer: int) -> int:
    return int(s.d if is_far(s, layer) else s.keys.get("attention.key_length_swa", s.d))


def n_layer_kv(s: Spec) -> int:
    return s.n_layer - int(s.keys.get("attention.shared_kv_layers", 0))


def shapes(s: Spec) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors.

    `traits`: "keys as values" in full-attention layers, "unused" keys and values, "scaled" layers,
    "fused" experts.
    """
    n, out = s.n_embd, {"token_embd": (s.n_vocab, s.n_embd), "output_norm": (s.n_embd,)}
    p = s.keys.get("embedding_length_per_layer_input", 0)
    if p:
        out |= {"per_layer_token_embd": (s.n_vocab, p * s.n_layer), "per_layer_model_proj": (p * s.n_layer, n)}
        out |= {"per_layer_proj_norm": (p,)}
    if s.arch == "gemma3n":
        out |= {"altup_proj": (N_STREAMS - 1, n, n), "altup_unembd_proj": (N_STREAMS - 1, n, n)}
    for i in range(s.n_layer):
        d, ff = head_dim(s, i), of_layer(s, "feed_forward_length", s.n_ff, i)
        q, kv = s.n_head * d, of_layer(s, "attention.head_count_kv", s.n_head_kv, i) * d
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        layer: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (n,))
        layer |= {"attn_q": (q, n), "attn_q_norm": (d,), "attn_output": (n, q)}
        if i < n_layer_kv(s) or "unused" in s.traits:
            layer |= {"attn_k": (kv, n), "attn_k_norm": (d,)}
            if not (is_far(s, i) and "keys as values" in s.traits):
                layer |= {"attn_v": (kv, n)}
        layer |= {"ffn_gate": (ff, n), "ffn_up": (ff, n), "ffn_down": (n, ff)}
        if p:
            layer |= {"inp_gate": (p, n), "proj": (n, p), "post_norm": (n,)}
        if s.arch == "gemma3n":
            layer |= dict.fromkeys(("altup_router_norm", "altup_correct_scale", "laurel_post_norm"), (n,))
            layer |= {"altup_router": (N_STREAMS, n), "altup_predict_coef": (N_STREAMS**2, N_STREAMS)}
            layer |= {"altup_correct_coef": (N_STREAMS,) * 2, "laurel_l": (64, n), "laurel_r": (n, 64)}
        if "scaled" in s.traits and i < s.n_layer - 1:  # in the last layer the next norm cancels it
            layer |= {"layer_output_scale": (1,)}
        if s.n_expert:
            e, width = s.n_expert, s.keys["expert_feed_forward_length"]
            layer |= {"ffn_gate_inp": (e, n), "ffn_gate_inp.scale": (n,), "ffn_down_exps.scale": (e,)}
            layer |= dict.fromkeys(("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), (n,))
            if "fused" in s.traits:
                layer |= {"ffn_gate_up_exps": (e, 2 * width, n)}
            else:
                layer |= {"ffn_gate_exps": (e, width, n), "ffn_up_exps": (e, width, n)}
            layer |= {"ffn_down_exps": (e, n, width)}
        out |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return out
