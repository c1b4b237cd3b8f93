"""Keywords of LLM and AsyncLLM, for type checkers and editors.

They are the fields of ModelOptions (engine/loading/options.py), which documents and checks them,
and the keywords of downloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

Value = int | float | bool | str


class Options(TypedDict, total=False):
    """Model options by their flags' names."""

    hf_repo: str | None  # USER/REPO:QUANT of Hugging Face's hub
    hf_file: str | None
    hf_token: str | None
    hf_repo_draft: str | None
    model_url: str | None
    mmproj_url: str | None
    offline: bool
    ctx_size: int
    parallel: int
    kv_unified: bool | None
    kv_unified_per_slot: int
    fit: bool | str
    fit_ctx: int
    fit_target: int | str | Sequence[int]
    cont_batching: bool
    warmup: bool
    batch_size: int
    ubatch_size: int
    cache_type_k: str
    cache_type_v: str
    cache_ram: int | None
    ctx_checkpoints: int
    swa_full: bool
    cache_idle_slots: bool
    context_shift: bool
    cache_reuse: int
    sleep_idle_seconds: int
    kv_events_endpoint: str
    kv_events_replay_endpoint: str
    kv_events_topic: str
    queue_requests: int
    queue_tokens: int
    slot_prompt_similarity: float
    chat_template: str | None
    chat_template_file: Path | str | None
    embedding: bool
    pooling: str | None
    rerank: bool
    mmproj: str | None
    mmproj_auto: bool
    mmproj_offload: bool
    mmproj_device: str | None
    image_min_tokens: int
    image_max_tokens: int
    device: str | Sequence[str]
    threads: int
    threads_batch: int | None
    rpc: str | Sequence[str]
    gpu_layers: int | str
    split_mode: str | None
    tensor_split: str | Sequence[float] | None
    main_gpu: int
    kv_offload: bool
    override_tensor: str | Mapping[str, str] | Sequence[tuple[str, str]]
    cpu_moe: bool
    n_cpu_moe: int
    n_cpu_ffn: int
    override_kv: str | Mapping[str, Value] | Sequence[tuple[str, Value]]
    rope_scaling: str | None
    rope_scale: float
    rope_freq_scale: float
    rope_freq_base: float
    yarn_orig_ctx: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    lora: Path | str | Sequence[str | Path]
    lora_scaled: str | Sequence[str | tuple[str | Path, float]]
    lora_init_without_apply: bool
    control_vector: Path | str | Sequence[str | Path]
    control_vector_scaled: str | Sequence[str | tuple[str | Path, float]]
    control_vector_layer_range: str | tuple[int, int] | None
    spec_type: str
    spec_default: bool
    model_draft: Path | str | None
    device_draft: str | Sequence[str] | None
    spec_draft_n_max: int
    spec_draft_adapt: bool
    spec_draft_n_min: int
    spec_draft_p_min: float
    cache_type_k_draft: str
    cache_type_v_draft: str
    gpu_layers_draft: int | str
    override_tensor_draft: str | Mapping[str, str] | Sequence[tuple[str, str]]
    cpu_moe_draft: bool
    n_cpu_moe_draft: int
    spec_ngram_simple_size_n: int
    spec_ngram_simple_size_m: int
    spec_ngram_simple_min_hits: int
    spec_ngram_map_k_size_n: int
    spec_ngram_map_k_size_m: int
    spec_ngram_map_k_min_hits: int
    spec_ngram_map_k4v_size_n: int
    spec_ngram_map_k4v_size_m: int
    spec_ngram_map_k4v_min_hits: int
    spec_ngram_mod_n_match: int
    spec_ngram_mod_n_min: int
    spec_ngram_mod_n_max: int
