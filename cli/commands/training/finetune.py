"""`logitless finetune`: train a model further on a text or JSONL rows: all weights or a LoRA adapter."""

from __future__ import annotations

import fnmatch
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.setup import training_run
from logitless.cli.setup.model import model_path
from logitless.cli.setup.training_files import newest
from logitless.cli.setup.unused_flags import check_only_write, check_used
from logitless.graph.execution.session import Session
from logitless.models.adapters.lora import write_adapter
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import hparams_of
from logitless.training.adapters import options as adapters
from logitless.training.adapters.options import HYPERPARAMETERS, RANKS, LoraOptions
from logitless.training.checkpoint import Checkpoint, read_checkpoint
from logitless.training.config import REINFORCEMENT, TrainingConfig
from logitless.training.errors import TrainingError
from logitless.training.parallel.coordinator import OpenTransport
from logitless.training.run import lora_of, trainable_of
from logitless.training.trainable import FULL, LORA, Trainable


def run(options: SimpleNamespace, transport: OpenTransport | None = None) -> int:
    """`transport`: to the processes of --workers, which are not of this machine."""
    path = model_path(options, "finetune")
    if bool(options.lora_out) == bool(options.output):
        raise UsageError("finetune: give --lora-out FILE for an adapter, or -o FILE for the whole model")
    kind = LORA if options.lora_out else FULL
    only_write = options.only_write_lora or options.n == "0"
    if only_write and kind == LORA:
        check_only_write(options)
    check_used(options, full=kind == FULL)
    checkpoint = checkpoint_of(options)
    output = options.lora_out or options.output
    if only_write:
        if kind == FULL:
            raise UsageError("finetune: --only-write-lora needs --lora-out FILE")
        return _only_write(options, path, checkpoint)
    config = training_run.config_of(options, full=kind == FULL)
    adapter = None
    if kind == LORA:
        adapter = checkpoint.lora if checkpoint is not None and checkpoint.lora is not None else adapter_of(config)
    make = partial(trainable, options=options)
    try:
        if options.method == REINFORCEMENT:
            from logitless.cli.setup import reinforcement_run  # with the engine

            if options.workers > 1:
                raise UsageError("finetune: --workers is of other methods: reinforcement samples and learns in one")
            return reinforcement_run.run(options, path, config, adapter, output, checkpoint)
        return training_run.run(options, path, config, make, output, checkpoint, adapter, transport)
    except TrainingError as error:
        raise CliError(training_run.flagged(error)) from None


def trainable(
    session: Session, gguf: GGUFFile, h: Hparams, *, adapter: LoraOptions | None, options: SimpleNamespace, **more: Any
) -> Trainable:
    """As trainable_of; the ranks of the flags are checked."""
    result = trainable_of(session, gguf, h, adapter=adapter, **more)
    if adapter is not None:
        weights = [n.removesuffix(".lora_a") for n in result.names if n.endswith(".lora_a")]
        _check_ranks(options, adapter, weights)
    return result


def checkpoint_of(options: SimpleNamespace) -> Checkpoint | None:
    """The checkpoint to go on from; a file that is not there yet begins a run that will write it."""
    path = newest(options.checkpoint_in, options)
    if path is None or not path.exists():
        return None
    return read_checkpoint(path)


def adapter_of(config: TrainingConfig) -> LoraOptions:
    """The options of the adapter. UsageError: they do not fit together."""
    try:
        return lora_of(config)
    except TrainingError as error:
        raise UsageError(training_run.flagged(error)) from None


def _check_ranks(o: SimpleNamespace, lora: LoraOptions, weights: list[str]) -> None:
    """UsageError: a rank is given for a tensor that the adapter does not have, or the adapter of the
    checkpoint has another one."""
    for kind, pattern in RANKS.items():
        flag, rank = f"--rank-{kind.replace('_', '-')}", getattr(o, f"rank_{kind}")
        own = lora.rank_of(pattern.replace("*", "0"))
        if rank is not None and rank != own:
            raise UsageError(f"{flag} {rank}: the adapter of --checkpoint-in has rank {own} there")
        if rank and not fnmatch.filter(weights, pattern):
            tied = "; its output is its embedding, see --rank-tok-embd" if kind == "out" else ""
            raise UsageError(f"{flag} {rank}: the model has no tensor '{pattern}'{tied}")
    fields = {dest for dest, _ in o.given}
    if "lora_r" in fields and o.lora_r != lora.rank:
        raise UsageError(f"--lora-r {o.lora_r}: the adapter of --checkpoint-in has rank {lora.rank}")
    if "lora_alpha" in fields and np.float32(o.lora_alpha) != np.float32(lora.alpha):
        raise UsageError(f"--lora-alpha {o.lora_alpha:g}: the adapter of --checkpoint-in has alpha {lora.alpha:g}")
    for dest, of in HYPERPARAMETERS.items():
        value = getattr(lora, of)
        value = list(value) if isinstance(value, tuple) else value
        if dest not in ("lora_r", "lora_alpha") and dest in fields and getattr(o, dest) != value:
            flag = f"--{dest.replace('_', '-')}"
            raise UsageError(f"{flag}: the adapter of --checkpoint-in has {json.dumps(value)} there")


def _only_write(o: SimpleNamespace, path: Path, checkpoint: Checkpoint | None) -> int:
    """The adapter of a checkpoint, without training."""
    if checkpoint is None or checkpoint.lora is None:
        raise UsageError("finetune: --only-write-lora needs --checkpoint-in FILE, a LoRA checkpoint")
    training_run.check_outputs(o, o.lora_out)
    values = checkpoint.tensors
    weights = [name.removesuffix(".lora_a") for name in values if name.endswith(".lora_a")]
    _check_ranks(o, checkpoint.lora, weights)
    if checkpoint.lora.dora:
        raise UsageError("finetune: --only-write-lora knows no DoRA adapter, whose factors need the model on a device")
    adapter = adapters.adapter_of(checkpoint.lora, values)
    with GGUFFile.open(path) as gguf:
        write_adapter(o.lora_out, adapter, gguf, hparams_of(gguf), Path(o.lora_out).stem)
    return 0
