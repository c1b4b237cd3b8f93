"""Keywords of LLM and AsyncLLM, for type checkers and editors, and the model's file that they name.

They are the fields of ModelOptions (engine/loading/options.py), which documents and checks them,
and the keywords of downloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

from logitless.engine.loading.open_model import demo_model
from logitless.engine.loading.options import OPTIONS, ModelOptions, OptionError

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
    cache_disk: Path | str | None
    cache_disk_size: int | None
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
    moe_cache_mib: int
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
    spec_learn: bool
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


def find_model(model: str | Path | None, options: dict[str, Any]) -> tuple[Path, ModelOptions]:
    """The model's file (a path, a repository of Hugging Face's hub, a URL, or the demo that is shipped), downloaded
    where need be, and its checked options. OptionError names one."""
    known = (*OPTIONS, *_SOURCES)
    for name in options:
        if name not in known:
            raise OptionError(f"--{name.replace('_', '-')}: there is no such option")
    source = {name: options.pop(name, default) for name, default in _SOURCES.items()}
    checked = ModelOptions(**options)
    if not any(source[name] for name in ("hf_repo", "hf_file", "model_url", "hf_repo_draft")):
        return (demo_model() if model is None else Path(model)), checked
    return _download(model, source, checked)


_SOURCES: dict[str, Any] = {
    "hf_repo": None,
    "hf_file": None,
    "hf_token": None,
    "hf_repo_draft": None,
    "model_url": None,
    "mmproj_url": None,
    "offline": False,
}


def _download(model: str | Path | None, source: dict[str, Any], checked: ModelOptions) -> tuple[Path, ModelOptions]:
    from dataclasses import replace

    from logitless.cli.flags.model_options import Repo, url
    from logitless.cli.hub import model_source
    from logitless.cli.setup.model import find_draft_model, find_projector

    for name, parse in (
        ("hf_repo", Repo.parse),
        ("hf_repo_draft", Repo.parse),
        ("model_url", url),
        ("mmproj_url", url),
    ):
        if source[name] is not None:
            try:
                source[name] = parse(source[name])
            except ValueError as error:
                raise OptionError(f"--{name.replace('_', '-')}: {source[name]!r} {error}") from None
    names = SimpleNamespace(
        **source,
        model=model and str(model),
        spec_type=checked.spec_type,
        model_draft=checked.model_draft,
        mmproj=checked.mmproj,
        mmproj_auto=checked.mmproj_auto,
    )
    path = model_source.find(names) or demo_model()
    find_draft_model(names, path)
    find_projector(names, path)
    return path, replace(checked, model_draft=names.model_draft, mmproj=names.mmproj, mmproj_auto=names.mmproj_auto)
