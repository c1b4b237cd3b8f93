"""LoRA adapters of the options: read, checked against the model, registered with the scheduler."""

from __future__ import annotations

from functools import partial

from logitless.engine.adapters import Adapters
from logitless.engine.loading.options import ModelOptions, OptionError
from logitless.engine.runner.model_runner import ModelRunner
from logitless.engine.scheduler.scheduler import Scheduler
from logitless.models.adapters.lora import Adapter, read_adapter
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams

MAX_SCALE = 1e4
ScaledAdapters = list[tuple[str, float, Adapter]]  # (path, scale, weights)


def read_adapters(options: ModelOptions, base: GGUFFile, hparams: Hparams) -> ScaledAdapters:
    """The adapters of `lora` and `lora_scaled`. ModelFileError: one does not fit the model."""
    named = [(path, 1.0) for path in options.lora] + [scaled("--lora-scaled", text) for text in options.lora_scaled]
    return [(path, scale, read_adapter(path, base, hparams)) for path, scale in named]


def control_vectors(options: ModelOptions) -> tuple[tuple[str, float], ...]:
    """The files of `control_vector` and `control_vector_scaled`, with their scales."""
    if options.control_vector_layer_range and not (options.control_vector or options.control_vector_scaled):
        raise OptionError("--control-vector-layer-range is of --control-vector, which is not given")
    plain = ((path, 1.0) for path in options.control_vector)
    return (*plain, *(scaled("--control-vector-scaled", text) for text in options.control_vector_scaled))


def scaled(flag: str, text: str) -> tuple[str, float]:
    """`FILE:SCALE` as its parts."""
    path, _, number = text.rpartition(":")
    try:
        scale = float(number)
    except ValueError:
        scale = float("nan")
    if not path or not abs(scale) <= MAX_SCALE:
        raise OptionError(f"{flag}: {text!r} is not a file and a scale, such as adapter.gguf:0.5")
    return path, scale


def register_adapters(
    engine: ModelRunner, scheduler: Scheduler, adapters: ScaledAdapters, *, apply: bool = True
) -> Adapters:
    """The registry of adapters and finetunes, which the scheduler asks for every request."""
    slots = scheduler.slots
    registry = Adapters(
        engine.adapters, engine.weight_sets, lambda: scheduler.choices, lambda: [slot.choice for slot in slots]
    )
    for path, scale, adapter in adapters:
        source = partial(_identity, adapter)
        registry.add(path, source, scale=scale if apply else 0.0, metadata=dict(adapter.metadata))
    scheduler.resolve_lora = registry.resolve
    return registry


def _identity(adapter: Adapter) -> Adapter:
    return adapter
