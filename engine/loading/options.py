"""Model options: how a model is opened (context size, slots, KV cache, devices, adapters, drafts).

`ModelOptions` is the one declaration of each: its type, default and check, its documentation, and
the flag and environment variable by which the command line sets it. Names are llama-server's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from logitless.engine.loading.values import (
    addresses,
    choice,
    device_list,
    devices_or_auto,
    file_name,
    file_names,
    folder_name,
    layer_range,
    layers,
    mebibytes,
    metadata_rules,
    number,
    on_or_off,
    one_device,
    proportions,
    split_mode,
    tensor_rules,
    text,
    whole,
    zmq_endpoint,
)
from logitless.engine.speculation.settings import KINDS
from logitless.graph.dtype import KV_TYPES


class OptionError(ValueError):
    """An option has a value that nobody can use. The line names it as the command line does: `--ctx-size`."""


class OptionConflict(OptionError):
    """An option's value does not fit the model, the machine, or another option."""


@dataclass(frozen=True)
class Option:
    """Declaration of one option; `kind` checks its text, an option without `kind` is a switch."""

    names: str  # "-m --model": the first long name gives the attribute, `model`
    help: str = ""
    kind: Callable[[str], Any] | None = None
    default: Any = None
    metavar: str = "N"
    env: str = ""  # the variable, or several, of which the first that is set counts
    off: str = ""  # the names that turn a switch off, "--no-slots"
    many: bool = False  # may be given again; the value is a list
    then_number: bool = False  # a value NAME:X may be two words, NAME X
    common: bool = False  # on the first page of a long help

    @property
    def long(self) -> str:
        names = self.names.split()
        return next((name for name in names if name.startswith("--")), names[0])

    def check(self, value: Any) -> Any:
        """The value in its own type, from that type or from the flag's text. OptionError: it has neither."""
        if value is None or value is self.default:
            return self.default
        try:
            if self.kind is None:
                if not isinstance(value, bool):
                    raise ValueError("is not True or False")
                return value
            if self.many:
                return tuple(item for piece in _items(value) for item in self._item(piece))
            if isinstance(value, list | tuple):
                value = ",".join(map(str, value))
            elif isinstance(value, bool) and isinstance(self.default, bool):
                return value
            elif isinstance(value, bool) or not isinstance(value, str | int | float | Path):
                raise ValueError("is not text or a number")
            return self.kind(str(value))
        except ValueError as error:
            raise OptionError(f"{self.long}: {value!r} {error}") from None

    def _item(self, value: Any) -> Sequence[Any]:
        if isinstance(value, Path):
            return (str(value),)
        if isinstance(value, tuple) and self.then_number:
            value = ":".join(map(str, value))
        if not isinstance(value, str):
            if isinstance(value, tuple) and len(value) == 2 and self.kind in (tensor_rules, metadata_rules):
                return (value,)
            raise ValueError("is not text")
        assert self.kind is not None
        parsed = self.kind(value)
        return parsed if isinstance(parsed, list) else (parsed,)


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return value if isinstance(value, list | tuple) else (value,)


def _option(
    names: str, default: Any, help: str, kind: Callable[[str], Any] | None = None, metavar: str = "N", **more: Any
) -> Any:
    option = Option(names, help, kind, () if more.get("many") else default, metavar, **more)
    return field(default=option.default, metadata={"option": option})


def _layers_option(names: str, help: str, env: str, **more: Any) -> Any:
    return _option(names, "auto", help, layers, env=env, **more)


def _kv_type(names: str, values: str, env: str) -> Any:
    return _option(names, "f16", values, choice(*KV_TYPES), "TYPE", env=env)


def _key_length(kind: str) -> Any:
    return _option(f"--spec-{kind}-size-n", 12, f"{kind}: tokens of the n-gram to look up", whole(1, 1024))


def _draft_length(kind: str) -> Any:
    return _option(f"--spec-{kind}-size-m", 48, f"{kind}: most tokens to draft", whole(1, 1024))


def _min_hits(kind: str) -> Any:
    return _option(f"--spec-{kind}-min-hits", 1, f"{kind}: fewest occurrences of the n-gram", whole(1, 65535))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of one model, checked. A value may also be the text that the flag takes
    ("vulkan:0,cpu").

    OptionError names the option whose value is wrong."""

    # fmt: off
    # Context and batches
    ctx_size: int = _option(
        "-c --ctx-size", 0, "tokens of the KV cache; each slot has an equal part of it, or all have the whole "
        "(--kv-unified); 0: as many as the model was trained for, in each part", whole(0, 2**30),
        env="LLAMA_ARG_CTX_SIZE", common=True)
    parallel: int = _option(
        "-np --parallel", -1, "slots: sequences that run at once; -1: automatic, 4 with --kv-unified",
        whole(1, 256, or_minus_one="automatic"), env="LLAMA_ARG_N_PARALLEL", common=True)
    kv_unified: bool | None = _option(
        "-kvu --kv-unified", None, "share --ctx-size between the slots, so that one sequence may use all of it; off: "
        "each slot has an equal part (by default: on where --parallel is automatic)", env="LLAMA_ARG_KV_UNIFIED",
        off="-no-kvu --no-kv-unified")
    kv_unified_per_slot: int = _option(
        "--kv-unified-per-slot", 0, "most tokens of one slot; without --ctx-size the cache has room for as many in "
        "each; 0: all of its part", whole(0, 2**30), env="LLAMA_ARG_KV_UNIFIED_PER_SLOT")
    fit: bool = _option(
        "-fit --fit", True, "off: without --ctx-size the context of the training, whatever the memory is", on_or_off,
        "on|off", env="LLAMA_ARG_FIT")
    fit_ctx: int = _option(
        "-fitc --fit-ctx", 4096, "least tokens of a context that is fitted to the memory", whole(1, 2**30),
        env="LLAMA_ARG_FIT_CTX")
    fit_target: tuple[int, ...] = _option(
        "-fitt --fit-target", (), "MiB of each device that stay free, one number for all or one each; the last one is "
        "the host's, too (by default a tenth of its memory)", mebibytes, "MIB,...", env="LLAMA_ARG_FIT_TARGET")
    cont_batching: bool = _option(
        "-cb --cont-batching", True, "requests join those that run; off: they wait until those have ended",
        env="LLAMA_ARG_CONT_BATCHING", off="-nocb --no-cont-batching")
    warmup: bool = _option(
        "--warmup", True, "make the plans of usual steps before a request needs them; off: the first requests wait for "
        "them", off="--no-warmup")
    batch_size: int = _option(
        "-b --batch-size", 2048, "most prompt tokens that are scheduled at once", whole(1, 2**20),
        env="LLAMA_ARG_BATCH")
    ubatch_size: int = _option(
        "-ub --ubatch-size", 512, "most tokens of one step", whole(1, 2**16), env="LLAMA_ARG_UBATCH")
    cache_type_k: str = _kv_type(
        "-ctk --cache-type-k", f"number type of cached keys: {', '.join(KV_TYPES)}", "LLAMA_ARG_CACHE_TYPE_K")
    cache_type_v: str = _kv_type(
        "-ctv --cache-type-v", f"number type of cached values: {', '.join(KV_TYPES)}", "LLAMA_ARG_CACHE_TYPE_V")

    # Cache
    cache_ram: int | None = _option(
        "-cram --cache-ram", None, "MiB of host memory for prompts that the KV cache has no room for; 0: none, -1: no "
        "limit (by default 8192, but at most a quarter of the machine's memory)",
        whole(0, 2**30, or_minus_one="no limit"), env="LLAMA_ARG_CACHE_RAM")
    cache_disk: str | None = _option(
        "--cache-disk", None, "folder for prompts that host memory has no room for, found again after a restart; text "
        "can be recovered from its files, which only this user can read", folder_name, "FOLDER")
    cache_disk_size: int | None = _option(
        "--cache-disk-size", None, "MiB of all files there, of which those used longest ago go (by default 16384)",
        whole(1, 2**30))
    ctx_checkpoints: int = _option(
        "-ctxcp --ctx-checkpoints --swa-checkpoints", 2, "places from which a cached prompt can be continued: "
        "recurrent states for each slot (Qwen 3.5, LFM 2), or sliding windows in all (Gemma 3, gpt-oss)",
        whole(0, 4096), env="LLAMA_ARG_CTX_CHECKPOINTS")
    swa_full: bool = _option(
        "--swa-full", False, "keep the whole context in layers with a sliding window too: prompts can be continued "
        "from any place, for more memory", env="LLAMA_ARG_SWA_FULL")
    cache_idle_slots: bool = _option(
        "--cache-idle-slots", True, "keep prompts of idle slots in host memory too; off: only prompts of preempted "
        "requests", env="LLAMA_ARG_CACHE_IDLE_SLOTS", off="--no-cache-idle-slots")
    context_shift: bool = _option(
        "--context-shift", False, "when a sequence fills its context, drop tokens in the middle and go on; off: it "
        "ends there", env="LLAMA_ARG_CONTEXT_SHIFT", off="--no-context-shift")
    cache_reuse: int = _option(
        "--cache-reuse", 0, "move runs of N or more cached tokens that a prompt has at another position, instead of "
        "computing them: faster, and not quite the text that the prompt gets alone; 0: never", whole(0),
        env="LLAMA_ARG_CACHE_REUSE")
    sleep_idle_seconds: int = _option(
        "--sleep-idle-seconds", -1, "seconds without work after which the model leaves memory; the next request loads "
        "it again; -1: never", whole(1, or_minus_one="never"), env="LLAMA_ARG_SLEEP_IDLE_SECONDS")

    kv_events_endpoint: str = _option(
        "--kv-events-endpoint", "", "publish which KV blocks are cached, as vLLM does: tcp://*:PORT listens, "
        "tcp://HOST:PORT connects (ZMQ; extra kv-events); subscribers read the tokens of all prompts", zmq_endpoint,
        "ADDRESS")
    kv_events_replay_endpoint: str = _option(
        "--kv-events-replay-endpoint", "", "repeat past batches of KV events here to subscribers that have missed some",
        zmq_endpoint, "ADDRESS")
    kv_events_topic: str = _option(
        "--kv-events-topic", "", "topic of KV events (default: kv@IP:PORT@MODEL, where IP is $POD_IP or this "
        "machine's)", text, "TOPIC")

    # Requests
    queue_requests: int = _option(
        "--queue-requests", -1, "requests that may wait for a slot; more are refused with 429 or 503 and Retry-After; "
        "-1: any number", whole(0, or_minus_one="any number"), env="LLAMA_ARG_QUEUE_REQUESTS")
    queue_tokens: int = _option(
        "--queue-tokens", -1, "prompt tokens that may wait for a slot; -1: any number",
        whole(0, or_minus_one="any number"), env="LLAMA_ARG_QUEUE_TOKENS")
    slot_prompt_similarity: float = _option(
        "-sps --slot-prompt-similarity", 0.1, "prefer a slot that has this part of the prompt", number(0, 1), "X")
    chat_template: str | None = _option(
        "--chat-template", None, "a Jinja template to use instead of the model's", text, "TEMPLATE",
        env="LLAMA_ARG_CHAT_TEMPLATE", common=True)
    chat_template_file: str | None = _option(
        "--chat-template-file", None, "a file with a Jinja template to use instead of the model's", file_name, "FILE",
        env="LLAMA_ARG_CHAT_TEMPLATE_FILE")
    embedding: bool = _option(
        "--embedding --embeddings", False, "prepare embeddings at start; they work without it, the first one may be "
        "slow", env="LLAMA_ARG_EMBEDDINGS", common=True)
    pooling: str | None = _option(
        "--pooling", None, "how a text's token embeddings become one: none, mean, cls, last, rank (default: as the "
        "model says)", choice("none", "mean", "cls", "last", "rank"), "TYPE", env="LLAMA_ARG_POOLING")
    rerank: bool = _option(
        "--rerank --reranking", False, "rerank documents: pooling is rank", env="LLAMA_ARG_RERANKING")

    # Images
    mmproj: str | None = _option(
        "-mm --mmproj", None, "the projector of a model that reads images or sounds; by default one beside the model "
        "that belongs to it", file_name, "FILE", env="LLAMA_ARG_MMPROJ")
    mmproj_auto: bool = _option(
        "--mmproj-auto", True, "use the projector of the hub's repository, or the one beside the model that belongs to "
        "it", env="LLAMA_ARG_MMPROJ_AUTO", off="--no-mmproj --no-mmproj-auto")
    mmproj_offload: bool = _option(
        "--mmproj-offload", True, "run the vision encoder on the first device beside the CPU",
        env="LLAMA_ARG_MMPROJ_OFFLOAD", off="--no-mmproj-offload")
    mmproj_device: str | None = _option(
        "-mmdev --mmproj-device", None, "the device of --device that runs the encoders of images and sounds; none: the "
        "CPU (default: the first one)", one_device, "NAME", env="MTMD_BACKEND_DEVICE")
    image_min_tokens: int = _option(
        "--image-min-tokens", 0, "least tokens of an image, where the projector takes images of any size; 0: the "
        "projector's", whole(0, 2**16), env="LLAMA_ARG_IMAGE_MIN_TOKENS")
    image_max_tokens: int = _option(
        "--image-max-tokens", 0, "most tokens of an image, where the projector takes images of any size; 0: the "
        "projector's", whole(0, 2**16), env="LLAMA_ARG_IMAGE_MAX_TOKENS")

    # Devices
    device: str = _option(
        "--device -dev", "auto", "devices in order of preference, see `logitless devices`; auto: a GPU that is right "
        "and faster than the CPU, else the CPU; none: the CPU", devices_or_auto, "NAME,...", env="LLAMA_ARG_DEVICE",
        common=True)
    threads: int = _option(
        "-t --threads", -1, "CPU threads; 0 and -1: one for each core, as far as the container's quota allows",
        whole(0, 256, or_minus_one="all cores"), env="LLAMA_ARG_THREADS", common=True)
    threads_batch: int | None = _option(
        "-tb --threads-batch", None, "llama-server's threads for prefill; one pool runs all work here, so the larger "
        "of -t and -tb counts", whole(0, 256, or_minus_one="all cores"), env="LLAMA_ARG_THREADS_BATCH")
    rpc: Sequence[str] = _option(
        "--rpc", (), "devices of other machines that run `logitless rpc-server`; they come after --device's own, "
        "before the CPU", addresses, "HOST:PORT,...", env="LLAMA_ARG_RPC", many=True)
    gpu_layers: int | str = _layers_option(
        "-ngl --gpu-layers --n-gpu-layers", "layers on the devices of --device, counted from the output, which is one; "
        "the rest is on the CPU; auto: as many as fit into their memory; all", "LLAMA_ARG_N_GPU_LAYERS", common=True)
    split_mode: str | None = _option(
        "-sm --split-mode", None, "none: the model is on one device; layer: its layers are divided between all of "
        "--device; row: the rows of each weight are; tensor: heads of the KV cache, too; without it the first has as "
        "many layers as fit, then the second", split_mode, "MODE", env="LLAMA_ARG_SPLIT_MODE")
    tensor_split: Sequence[float] | None = _option(
        "-ts --tensor-split", None, "divide the layers between the devices in this proportion, such as 3,1 (by "
        "default: their memory's)", proportions, "LIST", env="LLAMA_ARG_TENSOR_SPLIT")
    main_gpu: int = _option(
        "-mg --main-gpu", 0, "index of the first of --device, from 0; with --split-mode layer it changes nothing",
        whole(0, 255), env="LLAMA_ARG_MAIN_GPU")
    kv_offload: bool = _option(
        "-kvo --kv-offload", True, "the KV cache of a layer is on the layer's device, always; off is for the CPU "
        "alone, where it is so", env="LLAMA_ARG_KV_OFFLOAD", off="-nkvo --no-kv-offload")
    override_tensor: Sequence[tuple[str, str]] = _option(
        "-ot --override-tensor", (), "put weights whose names match a pattern on its device, and run their ops there; "
        "may be given again", tensor_rules, "PATTERN=DEVICE,...", env="LLAMA_ARG_OVERRIDE_TENSOR", many=True)
    cpu_moe: bool = _option(
        "-cmoe --cpu-moe", False, "keep expert weights on the CPU: most of a mixture of experts, of which each token "
        "reads little", env="LLAMA_ARG_CPU_MOE")
    n_cpu_moe: int = _option(
        "-ncmoe --n-cpu-moe", 0, "keep the expert weights of the first N layers on the CPU", whole(0),
        env="LLAMA_ARG_N_CPU_MOE")
    moe_cache_mib: int = _option(
        "--moe-cache-mib", 0, "memory of the devices, in MiB, for the experts that steps use most, where experts "
        "are on the CPU (--cpu-moe); a step uploads what else it needs, and the CPU computes no expert; alone: for all "
        "experts of a model that does not fit into the devices; with those of an MTP block, not of a draft model, nor "
        "beside --rpc", whole(0), env="LLAMA_ARG_MOE_CACHE_MIB")
    n_cpu_ffn: int = _option(
        "-ncffn --n-cpu-ffn", 0, "keep the weights of dense feed-forward blocks of the first N layers on the CPU",
        whole(0), env="LLAMA_ARG_N_CPU_FFN")

    # In the place of the file's metadata
    override_kv: Sequence[tuple[str, int | float | bool | str]] = _option(
        "--override-kv", (), "values of the file's keys: KEY=TYPE:VALUE,... with a TYPE of int, float, bool or str; "
        "may be given again", metadata_rules, "RULES", many=True)
    rope_scaling: str | None = _option(
        "--rope-scaling", None, "RoPE scaling beyond the training context: none, linear or yarn",
        choice("none", "linear", "yarn"), "TYPE", env="LLAMA_ARG_ROPE_SCALING_TYPE")
    rope_scale: float = _option(
        "--rope-scale", 0.0, "RoPE scaling factor of the context", number(0), env="LLAMA_ARG_ROPE_SCALE")
    rope_freq_scale: float = _option(
        "--rope-freq-scale", 0.0, "RoPE frequency scale, 1/N of --rope-scale", number(0),
        env="LLAMA_ARG_ROPE_FREQ_SCALE")
    rope_freq_base: float = _option(
        "--rope-freq-base", 0.0, "RoPE base frequency", number(0), env="LLAMA_ARG_ROPE_FREQ_BASE")
    yarn_orig_ctx: int = _option(
        "--yarn-orig-ctx", 0, "YaRN: training context of the model, in tokens", whole(0), env="LLAMA_ARG_YARN_ORIG_CTX")
    yarn_beta_fast: float = _option(
        "--yarn-beta-fast", -1.0, "YaRN: turns in the training context above which a dimension stays as it is; -1: as "
        "the model says", number(-1), env="LLAMA_ARG_YARN_BETA_FAST")
    yarn_beta_slow: float = _option(
        "--yarn-beta-slow", -1.0, "YaRN: turns in the training context below which a dimension is stretched; -1: as "
        "the model says", number(-1), env="LLAMA_ARG_YARN_BETA_SLOW")

    # Adapters
    lora: Sequence[str] = _option(
        "--lora", (), "a LoRA adapter, a GGUF file or a folder of peft; may be given again, or several separated by "
        "commas", file_names, "FILE", many=True, common=True)
    lora_scaled: Sequence[str] = _option(
        "--lora-scaled", (), "a LoRA adapter and its scale, or FILE SCALE; may be given again, or several separated by "
        "commas", file_names, "FILE:SCALE", many=True, then_number=True)
    lora_init_without_apply: bool = _option(
        "--lora-init-without-apply", False, "requests without a lora field get no adapter; POST /lora-adapters changes "
        "that")

    # Control vectors
    control_vector: Sequence[str] = _option(
        "--control-vector", (), "a control vector, which is added to the residual stream layer by layer; may be given "
        "again, or several separated by commas", file_names, "FILE", many=True)
    control_vector_scaled: Sequence[str] = _option(
        "--control-vector-scaled", (), "a control vector and its scale, or FILE SCALE; may be given again, or several "
        "separated by commas", file_names, "FILE:SCALE", many=True, then_number=True)
    control_vector_layer_range: tuple[int, int] | None = _option(
        "--control-vector-layer-range", None, "the first and the last layer that get the control vectors", layer_range,
        "START END", then_number=True)

    # Speculative decoding
    spec_type: str = _option(
        "--spec-type", "none", f"drafters, separated by commas: none, {', '.join(KINDS)}", text, "KINDS",
        env="LLAMA_ARG_SPEC_TYPE", common=True)
    spec_learn: bool = _option(
        "--spec-learn", False, "draft by a small head that learns from the texts of requests while the model serves; "
        "what it has learnt stays in the cache folder", env="LOGITLESS_SPEC_LEARN")
    spec_default: bool = _option("--spec-default", False, "the same as --spec-type ngram-mod")
    model_draft: str | None = _option(
        "-md --model-draft --spec-draft-model", None, "a draft model with the same vocabulary, for draft-simple; the "
        "MTP head of draft-mtp; or a drafter made for the model, which says its kind itself", file_name, "FILE",
        env="LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_MODEL_DRAFT", common=True)
    device_draft: str | None = _option(
        "-devd --device-draft --spec-draft-device", None, "devices of the draft model (default: the model's)",
        device_list, "NAME,...")
    spec_draft_n_max: int = _option(
        "--spec-draft-n-max --draft --draft-n --draft-max", 3, "most tokens of a draft by a model, MTP head or drafter",
        whole(0, 1024), env="LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX")
    spec_draft_adapt: bool = _option(
        "--spec-draft-adapt", True, "adapt the length of such drafts to the acceptance rate; off: always draft the "
        "most", off="--no-spec-draft-adapt")
    spec_draft_n_min: int = _option(
        "--spec-draft-n-min --draft-min --draft-n-min", 0, "shorter drafts are not verified", whole(0, 1024),
        env="LLAMA_ARG_SPEC_DRAFT_N_MIN LLAMA_ARG_DRAFT_MIN")
    spec_draft_p_min: float = _option(
        "--spec-draft-p-min --draft-p-min", 0.0, "end such drafts at a token with less probability", number(0, 1), "X",
        env="LLAMA_ARG_SPEC_DRAFT_P_MIN LLAMA_ARG_DRAFT_P_MIN")
    cache_type_k_draft: str = _kv_type(
        "-ctkd --cache-type-k-draft --spec-draft-type-k", "number type of the draft model's cached keys",
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K LLAMA_ARG_CACHE_TYPE_K_DRAFT")
    cache_type_v_draft: str = _kv_type(
        "-ctvd --cache-type-v-draft --spec-draft-type-v", "number type of the draft model's cached values",
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V LLAMA_ARG_CACHE_TYPE_V_DRAFT")
    gpu_layers_draft: int | str = _layers_option(
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", "layers of the draft model on its devices: a "
        "number, auto or all", "LLAMA_ARG_N_GPU_LAYERS_DRAFT")
    override_tensor_draft: Sequence[tuple[str, str]] = _option(
        "-otd --override-tensor-draft --spec-draft-override-tensor", (), "--override-tensor of the draft model",
        tensor_rules, "PATTERN=DEVICE,...", many=True)
    cpu_moe_draft: bool = _option(
        "-cmoed --cpu-moe-draft --spec-draft-cpu-moe", False, "--cpu-moe of the draft model",
        env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE")
    n_cpu_moe_draft: int = _option(
        "-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe", 0, "--n-cpu-moe of the draft model",
        whole(0), env="LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE")
    spec_ngram_simple_size_n: int = _key_length("ngram-simple")
    spec_ngram_simple_size_m: int = _draft_length("ngram-simple")
    spec_ngram_simple_min_hits: int = _min_hits("ngram-simple")
    spec_ngram_map_k_size_n: int = _key_length("ngram-map-k")
    spec_ngram_map_k_size_m: int = _draft_length("ngram-map-k")
    spec_ngram_map_k_min_hits: int = _min_hits("ngram-map-k")
    spec_ngram_map_k4v_size_n: int = _key_length("ngram-map-k4v")
    spec_ngram_map_k4v_size_m: int = _draft_length("ngram-map-k4v")
    spec_ngram_map_k4v_min_hits: int = _min_hits("ngram-map-k4v")
    spec_ngram_mod_n_match: int = _option(
        "--spec-ngram-mod-n-match", 24, "ngram-mod: tokens of the n-gram to look up", whole(1, 1024))
    spec_ngram_mod_n_min: int = _option(
        "--spec-ngram-mod-n-min", 48, "ngram-mod: shorter drafts are not verified", whole(0, 1024))
    spec_ngram_mod_n_max: int = _option("--spec-ngram-mod-n-max", 64, "ngram-mod: most tokens to draft", whole(1, 1024))
    # fmt: on

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.check(getattr(self, name)))

    @property
    def n_slots(self) -> int:
        return 4 if self.parallel == -1 else self.parallel

    @property
    def unified(self) -> bool:
        """True if one sequence may use the whole KV cache; else each slot has an equal part."""
        return self.parallel == -1 if self.kv_unified is None else self.kv_unified

    @property
    def n_threads(self) -> int:
        """CPU threads: the larger of `threads` and `threads_batch`; 0: one for each core."""
        n_threads = [n for n in (self.threads, self.threads_batch) if n is not None]
        return 0 if {-1, 0} & {*n_threads} else max(n_threads)

    @property
    def moves_flag(self) -> str:
        """The flag that moves cached tokens to other positions; "": none does."""
        if self.context_shift:
            return "--context-shift"
        return "--cache-reuse" if self.cache_reuse else ""


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(ModelOptions)}


def text_file(path: str) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionConflict(f"{path}: byte {error.start} is not UTF-8") from None
