"""`logitless train`: train a new model from scratch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from logitless.cli.commands.training import finetune
from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.setup import training_run
from logitless.cli.setup.unused_flags import check_used
from logitless.models.synthetic.model import SHAPES, ModelShape
from logitless.training.errors import TrainingError
from logitless.training.scratch import new_model


def run(options: SimpleNamespace) -> int:
    if not options.output:
        raise UsageError("train: -o FILE is required")
    check_used(options, full=True, command="train")
    checkpoint = finetune.checkpoint_of(options)
    with tempfile.TemporaryDirectory(prefix="logitless-") as folder:
        start = Path(folder) / "start.gguf"  # initial weights, and the metadata of the result
        try:
            start_model(start, options)
            config = training_run.config_of(options, full=True)
            make = partial(finetune.trainable, options=options)
            return training_run.run(options, start, config, make, options.output, checkpoint)
        except TrainingError as error:
            raise CliError(training_run.flagged(error)) from None


def start_model(path: Path, o: SimpleNamespace) -> None:
    """Write the initial model."""
    name = o.name or Path(o.output or "plan").stem
    new_model(path, o.vocab_model, shape_of(o), max(0, o.seed), name, o.chat_template)


def shape_of(o: SimpleNamespace) -> ModelShape:
    """A shape by name, with single sizes replaced."""
    names = {name.lower(): name for name in SHAPES}
    if o.shape.lower() not in names:
        raise UsageError(f"--shape: {o.shape!r} is not one of {', '.join(SHAPES)}")
    shape = SHAPES[names[o.shape.lower()]]
    sizes = {"n_embd": o.embd, "n_layer": o.layer, "n_head": o.head, "n_head_kv": o.head_kv or o.head, "n_ff": o.ff}
    return replace(shape, n_ctx=o.ctx_size, **{name: n for name, n in sizes.items() if n})
