"""The adapters that the command line names."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import UsageError
from logitless.server.protocol.lora import MAX_SCALE

if TYPE_CHECKING:
    from logitless.engine.adapters import Adapters
    from logitless.engine.runner.model_runner import Engine
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.models.adapters.lora import Adapter
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.hparams.hparams import Hparams

Given = list[tuple[str, float, "Adapter"]]


def given(options: SimpleNamespace, base: GGUFFile, hparams: Hparams) -> Given:
    """(path, scale, adapter) of --lora and --lora-scaled; a file's faults are told before the port is taken."""
    named = [(path, 1.0) for path in options.lora] + [scaled(text) for text in options.lora_scaled]
    if not named:
        return []
    from logitless.models.adapters.lora import read_adapter

    return [(path, scale, read_adapter(path, base, hparams)) for path, scale in named]


def scaled(text: str) -> tuple[str, float]:
    path, _, number = text.rpartition(":")
    try:
        scale = float(number)
    except ValueError:
        scale = float("nan")
    if not path or not abs(scale) <= MAX_SCALE:
        raise UsageError(f"--lora-scaled: {text!r} is not a file and a scale, such as adapter.gguf:0.5")
    return path, scale


def connect(engine: Engine, scheduler: Scheduler, adapters: Given, *, apply: bool = True) -> Adapters:
    """The registry of a server's adapters and finetunes, which the scheduler asks for every request."""
    from logitless.engine.adapters import Adapters

    slots = scheduler.slots
    known = Adapters(
        engine.adapters, engine.weight_sets, lambda: scheduler.choices, lambda: [slot.choice for slot in slots]
    )
    for path, scale, adapter in adapters:
        known.add(path, partial(_same, adapter), scale=scale if apply else 0.0, metadata=dict(adapter.metadata))
    scheduler.resolve_lora = known.resolve
    return known


def _same(adapter: Adapter) -> Adapter:
    return adapter
