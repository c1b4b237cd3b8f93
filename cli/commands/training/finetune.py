"""`logitless finetune`: train a model further on a text or JSONL rows: all weights or a LoRA adapter."""

from __future__ import annotations

import fnmatch
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.setup import training_run
from logitless.cli.setup.model import model_path
from logitless.cli.setup.training_files import newest
from logitless.cli.setup.unused_flags import check_only_write, check_used

if TYPE_CHECKING:
    from logitless.graph.execution.session import Session
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.hparams.hparams import Hparams
    from logitless.training.adapters.options import LoraOptions
    from logitless.training.checkpoint import Checkpoint
    from logitless.training.parallel.coordinator import OpenTransport
    from logitless.training.trainable import Trainable


def run(options: SimpleNamespace, transport: OpenTransport | None = None) -> int:
    """`transport`: to the processes of --workers, which are not of this machine."""
    from logitless.training.errors import TrainingError
    from logitless.training.trainable import FULL, LORA

    path = model_path(options, "finetune")
    if bool(options.lora_out) == bool(options.output):
        raise UsageError("finetune: give --lora-out FILE for an adapter, or -o FILE for the whole model")
    kind = LORA if options.lora_out else FULL
    only_write = options.only_write_lora or options.n == "0"
    if only_write and kind == LORA:
        check_only_write(options)
    check_used(options, full=kind == FULL)
    checkpoint = checkpoint_of(options)
    lora = None
    output = options.lora_out or options.output
    if kind == LORA:
        lora = checkpoint.lora if checkpoint is not None and checkpoint.lora is not None else adapter_options(options)
        if only_write:
            return _only_write(options, path, checkpoint)
    elif only_write:
        raise UsageError("finetune: --only-write-lora needs --lora-out FILE")

    make = partial(trainable, lora=lora, options=options)
    try:
        if options.method == "reinforcement":
            from logitless.cli.setup import reinforcement_run

            if options.workers > 1:
                raise UsageError("finetune: --workers is of other methods: reinforcement samples and learns in one")
            return reinforcement_run.run(options, path, lora, output, checkpoint)
        return training_run.run(options, path, make, output, checkpoint, transport)
    except TrainingError as error:
        raise CliError(flagged(error)) from None


def trainable(
    session: Session, gguf: GGUFFile, h: Hparams, lora: LoraOptions | None, options: SimpleNamespace
) -> Trainable:
    from logitless.models.model import define_model
    from logitless.training.adapters.lora import lora as define_lora
    from logitless.training.trainable import full

    model = define_model(session, gguf, h, options.ctx_size)
    if lora is not None:
        found = define_lora(session, model, lora, gguf=gguf)
        _check_ranks(options, lora, [n.removesuffix(".lora_a") for n in found.names if n.endswith(".lora_a")])
        return found
    return full(session, model, gguf, h, getattr(options, "train_tensors", None) or ["*"])


def checkpoint_of(options: SimpleNamespace) -> Checkpoint | None:
    """The checkpoint to go on from; a file that is not there yet begins a run that will write it."""
    path = newest(options.checkpoint_in, options)
    if path is None or not path.exists():
        return None
    from logitless.training.checkpoint import read_checkpoint

    return read_checkpoint(path)


def adapter_options(o: SimpleNamespace) -> LoraOptions:
    from logitless.training.adapters.options import RANKS, lora_options
    from logitless.training.errors import TrainingError

    ranks = {kind: rank for kind in RANKS if (rank := getattr(o, f"rank_{kind}")) is not None}
    try:
        return lora_options(vars(o), max(0, o.seed), ranks)
    except TrainingError as error:
        raise UsageError(flagged(error)) from None


def flagged(error: Exception) -> str:
    """An error's message; a hyperparameter's name at its beginning becomes its flag."""
    from logitless.training.adapters.options import HYPERPARAMETERS

    name, colon, problem = str(error).partition(":")
    return f"--{name.replace('_', '-')}{colon}{problem}" if name in HYPERPARAMETERS else str(error)


def _check_ranks(o: SimpleNamespace, lora: LoraOptions, weights: list[str]) -> None:
    """UsageError: a rank is given for a tensor that the adapter does not have, or the adapter of the
    checkpoint has another one."""
    from logitless.training.adapters.options import HYPERPARAMETERS, RANKS

    for kind, pattern in RANKS.items():
        flag, rank = f"--rank-{kind.replace('_', '-')}", getattr(o, f"rank_{kind}")
        own = lora.rank_of(pattern.replace("*", "0"))
        if rank is not None and rank != own:
            raise UsageError(f"{flag} {rank}: the adapter of --checkpoint-in has rank {own} there")
        if rank and not fnmatch.filter(weights, pattern):
            tied = "; its output is its embedding, see --rank-tok-embd" if kind == "out" else ""
            raise UsageError(f"{flag} {rank}: the model has no tensor '{pattern}'{tied}")
    given = {dest for dest, _ in o.given}
    if "lora_r" in given and o.lora_r != lora.rank:
        raise UsageError(f"--lora-r {o.lora_r}: the adapter of --checkpoint-in has rank {lora.rank}")
    if "lora_alpha" in given and np.float32(o.lora_alpha) != np.float32(lora.alpha):
        raise UsageError(f"--lora-alpha {o.lora_alpha:g}: the adapter of --checkpoint-in has alpha {lora.alpha:g}")
    for dest, of in HYPERPARAMETERS.items():
        value = getattr(lora, of)
        value = list(value) if isinstance(value, tuple) else value
        if dest not in ("lora_r", "lora_alpha") and dest in given and getattr(o, dest) != value:
            flag = f"--{dest.replace('_', '-')}"
            raise UsageError(f"{flag}: the adapter of --checkpoint-in has {json.dumps(value)} there")


def _only_write(o: SimpleNamespace, path: Path, checkpoint: Checkpoint | None) -> int:
    """The adapter of a checkpoint, without training."""
    from logitless.models.adapters.lora import write_adapter
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.model import hparams_of
    from logitless.training.adapters.options import adapter_of

    if checkpoint is None or checkpoint.lora is None:
        raise UsageError("finetune: --only-write-lora needs --checkpoint-in FILE, a LoRA checkpoint")
    training_run.check_outputs(o, o.lora_out)
    values = checkpoint.tensors
    weights = [name.removesuffix(".lora_a") for name in values if name.endswith(".lora_a")]
    _check_ranks(o, checkpoint.lora, weights)
    if checkpoint.lora.dora:
        raise UsageError("finetune: --only-write-lora knows no DoRA adapter, whose factors need the model on a device")
    adapter = adapter_of(checkpoint.lora, values)
    with GGUFFile.open(path) as gguf:
        write_adapter(o.lora_out, adapter, gguf, hparams_of(gguf), Path(o.lora_out).stem)
    return 0
