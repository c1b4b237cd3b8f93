"""Training run of `finetune` and `train`: devices, run, saves, progress and summary."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from logitless.backends import self_test
from logitless.backends.cores import cores
from logitless.backends.registry import open_backends
from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.flags.options_training import HYPERPARAMETERS
from logitless.cli.outputs import check_output, checked_type
from logitless.cli.progress import COMPILING, StatusLine, columns
from logitless.cli.setup.model import model_options, open_session
from logitless.cli.setup.training_files import TrainingFiles, named, newest
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.tokenizer import Tokenizer
from logitless.training import config
from logitless.training.adapters.options import RANKS, LoraOptions
from logitless.training.checkpoint import Checkpoint, save_checkpoint
from logitless.training.config import TrainingConfig
from logitless.training.data.media import NO_PROJECTOR
from logitless.training.data.run_media import RunMedia, projector_media
from logitless.training.errors import TrainingDiverged, TrainingError
from logitless.training.parallel.coordinator import OpenTransport
from logitless.training.parallel.processes import Processes
from logitless.training.reporting.plot import plot, refusal
from logitless.training.reporting.progress import Reporter, clock, uncertain
from logitless.training.reporting.trackers import Integration, RunInfo, Trackers, configuration
from logitless.training.run import FineTuning, MakeTrainable
from logitless.training.save import save_result
from logitless.training.trainer import Finished, LogMessage, Save, Trainer, Validated

MOST_HALVINGS = 64  # of -lr-half without -lr-halvings
ADAM_ITER = 256  # steps of a run without --adam-iter and --epochs


def config_of(o: SimpleNamespace, *, full: bool) -> TrainingConfig:
    """The configuration of the flags. UsageError: they do not fit together."""
    values = {name: getattr(o, flag.dest) for name, flag in HYPERPARAMETERS.items() if hasattr(o, flag.dest)}
    decay = o.adam_decay if o.optimizer == "adamw" else 0.0
    ranks = {kind: rank for kind in RANKS if (rank := getattr(o, f"rank_{kind}", None)) is not None}
    start = o.sample_start
    if start is not None and o.escape:
        start = start.encode("latin-1", "backslashreplace").decode("unicode_escape")
    values |= {
        "full": full,
        "seed": max(0, o.seed),
        "epochs": max(0, o.epochs),
        "iterations": o.adam_iter or (ADAM_ITER if o.epochs <= 0 else 0),
        "weight_decay": decay if o.weight_decay is None else o.weight_decay,
        "sample_start": start,
        "lora_ranks": ranks,
        "train_tensors": getattr(o, "train_tensors", None) or ["*"],
        "report_name": o.report_name or "",
        "mmproj": getattr(o, "mmproj", None),
        **_schedule(o),
    }
    try:
        return config.config_of(values)
    except TrainingError as error:
        raise UsageError(flagged(error)) from None


def _schedule(o: SimpleNamespace) -> dict[str, Any]:
    """Course of the learning rate: llama-finetune's flags choose its own, the older trainer's flags theirs."""
    if o.learning_rate is None:
        if o.learning_rate_half is not None:
            raise UsageError("-lr-half halves the rate of -lr, which is not given")
        if o.learning_rate_halvings:
            raise UsageError("-lr-halvings limits -lr-half, which is not given")
        return {"schedule": "cosine", "learning_rate": o.adam_alpha, "warmup": o.warmup}
    lr_min, decay_epochs = o.learning_rate_min, o.decay_epochs
    if o.learning_rate_half is not None:
        if lr_min > 0 or decay_epochs > 0:
            raise UsageError("-lr-half and -lr-min with -decay-epochs are two ways to halve the rate: give one of them")
        halvings = o.learning_rate_halvings or MOST_HALVINGS
        lr_min, decay_epochs = o.learning_rate * 0.5**halvings, o.learning_rate_half * halvings
    elif o.learning_rate_halvings:
        raise UsageError("-lr-halvings limits -lr-half, which is not given")
    kind = "halving" if lr_min > 0 else "constant"
    return {"schedule": kind, "warmup": 0, "learning_rate_min": lr_min, "decay_epochs": decay_epochs}


def flagged(error: Exception) -> str:
    """An error's message; the name of a hyperparameter at its beginning becomes its flag."""
    name = re.match(r"\w*", str(error))
    assert name is not None
    flag = HYPERPARAMETERS.get(name[0])
    return str(error) if flag is None else flag.long + str(error)[name.end() :]


def run(
    o: SimpleNamespace,
    model: Path,
    config: TrainingConfig,
    make: MakeTrainable,
    output: str,
    resumed: Checkpoint | None = None,
    adapter: LoraOptions | None = None,
    transport: OpenTransport | None = None,
) -> int:
    """Train, and write `output` (with ITERATION and LATEST replaced) at every save and at the end.

    `make`: see FineTuning; `transport`: to processes elsewhere. TrainingError: the data or the settings."""
    check_start(o, output)
    check_workers(o)
    began = time.monotonic()
    with ExitStack() as stack:
        session = stack.enter_context(open_session(o))
        media = partial(open_media, o, Path(output).parent)
        run = stack.enter_context(
            FineTuning(session, model, o.file, config, make=make, adapter=adapter, open_media=media)
        )
        for line in run.warnings:
            flag = " (--ctx-size)" if "longer than the context" in line else ""
            print(f"logitless: warning: {o.file}: {line}{flag}", file=sys.stderr)
        if len(session.backends) > 1:
            self_test.self_test_session(session, run.trainer.steps.everything())
        if resumed is not None:
            resume(o, run.trainer, resumed)
        if o.workers > 1:
            backends = partial(open_backends, o.device.split(","), max(o.threads, 0))
            run.share(o.workers, backends, transport or Processes)
        fit(o, run.trainer, run.gguf, run.hparams, output, began)
    return 0


def check_start(o: SimpleNamespace, output: str) -> None:
    """CliError: there are no data, or a file cannot be written."""
    if not o.file:
        raise UsageError("--file FILE is required: the text or the rows (.jsonl, …) to learn from")
    if o.plot and (reason := refusal(o.plot)):
        raise UsageError(f"--plot: {reason}")
    check_outputs(o, output)


def resume(o: SimpleNamespace, trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Go on from a checkpoint, and tell it; where the order of the samples begins anew, also why."""
    note = ""
    if not checkpoint.restore(trainer, force_reshuffle=o.force_reshuffle):
        before, seed = checkpoint.state["order"]["seed"], trainer.order.seed
        reason = "the samples differ from the checkpoint's"
        if o.force_reshuffle:
            reason = "--force-reshuffle is given"
        elif before not in (-1, seed):
            reason = f"--seed {seed} is not the checkpoint's {before}, so other samples validate"
        note = f"; {reason}: their order begins anew"
    print(f"logitless: going on after iteration {trainer.counters.iterations}{note}", file=sys.stderr)


def check_workers(o: SimpleNamespace) -> None:
    """Set the threads of each process. UsageError: some of --workers would have no work."""
    if o.workers > o.grad_acc:
        reason = f"each needs a device run of its own in a step (--grad-acc {o.workers} or more)"
        raise UsageError(f"--workers {o.workers}: {reason}")
    if o.workers > 1 and o.threads <= 0:
        o.threads = max(1, cores() // o.workers)


def check_outputs(o: SimpleNamespace, output: str) -> None:
    """CliError: an output cannot be written, or would replace an input or another output, or has an unknown type."""
    checked_type(o.output_type)
    read = {"-m": getattr(o, "model", None), "--vocab-model": getattr(o, "vocab_model", None), "--file": o.file}
    others = [*read.items(), ("--checkpoint-in", newest(o.checkpoint_in, o))]
    # of the names with a step's number those count that a file which is read has
    numbers = [0, *map(int, re.findall(r"\d+", " ".join(Path(path).name for _, path in others if path)))]

    def names(pattern: str) -> list[Path]:
        return list(dict.fromkeys(path for n in numbers for path in named(pattern, n, o)))

    result = "--lora-out" if getattr(o, "lora_out", None) else "-o"
    plotted = [Path(o.plot)] if o.plot else []  # has no number
    for flag, paths in ((result, names(output)), ("--plot", plotted), ("--checkpoint-out", names(o.checkpoint_out))):
        if flag == "--checkpoint-out":  # the next one may replace the one that the run goes on from
            others = [other for other in others if other[0] != "--checkpoint-in"]
        for path in paths:
            check_output(path, flag, others)
        others += [(flag, path) for path in paths]


def open_media(o: SimpleNamespace, folder: Path | None, gguf: GGUFFile, h: Hparams, vocabulary: Tokenizer) -> RunMedia:
    """Images by the projector of --mmproj, or the only one beside the model; `folder`: of temporary files.

    TrainingError: there is none."""
    from logitless.engine.loading.open_model import projector_file

    projector = projector_file(model_options(o), gguf, h) if hasattr(o, "mmproj") else ""  # train has none
    if not projector:
        raise TrainingError(NO_PROJECTOR)
    tokens = o.image_min_tokens, o.image_max_tokens
    return projector_media(gguf, h, vocabulary, projector, tokens=tokens, folder=folder)


def fit(o: SimpleNamespace, trainer: Trainer, gguf: GGUFFile, h: Hparams, output: str, began: float) -> None:
    """Run a trainer to its end, with its progress, saves and summary."""
    terminal, status = sys.stderr.isatty(), StatusLine()

    def show(text: str, final: bool) -> None:
        COMPILING.end()
        if not terminal:
            print(text, file=sys.stderr, flush=True)
        elif final:
            status.end(text)
        else:
            status.show(text)

    COMPILING.end()
    t = trainer.trainable
    bytes_of_optimizer = trainer.steps.optimizer_nbytes
    devices = ", then ".join(b.name for b in t.session.backends)
    print(
        f"logitless: {t.kind}: {t.n_params} parameters in {len(t.params)} tensors, optimizer {bytes_of_optimizer} "
        f"bytes; {_counted(trainer)} to train on, "
        f"{len(trainer.validation_indices)} to validate, {trainer.n_steps} steps on {devices}",
        file=sys.stderr,
    )
    warmup = trainer.settings.warmup or 0
    if trainer.settings.schedule != "halving" and warmup >= trainer.n_steps:
        reached = f"the {trainer.n_steps} steps of the run never reach the learning rate"
        print(f"logitless: warning: --warmup {warmup}: {reached}", file=sys.stderr)
    epochs, n = trainer.settings.epochs, trainer.settings.n_logical
    if trainer.n_steps < epochs and n > len(trainer.order):
        few = f"a step takes {n} samples, more than there are: {epochs:g} epochs are {trainer.n_steps} steps"
        print(f"logitless: warning: --batch-size: {few}", file=sys.stderr)
    reporter = Reporter(show, terminal=terminal, columns=lambda: columns() - 1)
    trackers = trackers_of(o, trainer, output, lambda line: show(f"logitless: warning: {line}", True))
    last_validation, reason = None, ""
    files = TrainingFiles(
        o,
        output,
        trainer.stopping,
        lambda path: save_result(path, t, gguf, h, o.output_type),
        lambda path: save_checkpoint(path, trainer, h.arch),
    )
    try:
        with trackers:
            for event in trainer.work():
                reporter(event)
                trackers(event)
                at = time.monotonic()
                if isinstance(event, Validated):
                    last_validation = event.result
                    files.validated(event.iteration)
                    reporter.outside(time.monotonic() - at)
                elif isinstance(event, Save):
                    files.save(event.iteration)
                    reporter.outside(time.monotonic() - at)
                elif isinstance(event, LogMessage):
                    show(f"logitless: {event.message}", True)
                elif isinstance(event, Finished):
                    reason = event.reason
    except TrainingDiverged as error:
        status.end()
        raise CliError(f"{error}; {files.last_good}") from None
    c = trainer.counters
    print(f"logitless: {reason}: {c.iterations} steps, {c.samples} samples, {c.tokens} tokens", file=sys.stderr)
    if reporter.losses:
        rewards = reporter.curves.get("mean reward")
        name, points = ("mean reward", rewards) if rewards else ("training loss", reporter.losses)
        line = f"logitless: {name} {points[0][1]:.4f} → {points[-1][1]:.4f}"
        if last_validation is not None and trainer.method == "reinforcement":
            line += f", validation mean reward {last_validation.metrics.get('mean_reward', float('nan')):.4f}"
        elif last_validation is not None:
            loss = uncertain(last_validation.loss, last_validation.loss_uncertainty, 4)
            line += f", validation loss {loss}, accuracy {100 * last_validation.accuracy:.1f} %"
        print(line, file=sys.stderr)
    if best := files.best(c.iterations):
        measure = "highest validation mean reward" if trainer.method == "reinforcement" else "lowest validation loss"
        print(f"logitless: {best} is of step {trainer.stopping.best_step}, which has the {measure}", file=sys.stderr)
    print(f"logitless: total training time {clock(time.monotonic() - began)}", file=sys.stderr)
    if o.plot:
        plot(o.plot, reporter.curves, "loss" if trainer.method == "supervised" else trainer.method)


def trackers_of(o: SimpleNamespace, trainer: Trainer, output: str, warn: Callable[[str], None]) -> Trackers:
    """The trackers of --report-to."""
    integrations = [Integration(kind, o.report_project) for kind in dict.fromkeys(o.report_to)]
    config = {"model": Path(getattr(o, "model", None) or output).name, **configuration(trainer)}
    name = o.report_name or Path(output).stem
    return Trackers(integrations, RunInfo(Path(o.report_dir), "", name, config, trainer.counters.iterations), warn)


def _counted(trainer: Trainer) -> str:
    """Number and kind of the samples that a run learns from."""
    if trainer.method == "supervised":
        return f"{len(trainer.order)} samples of {trainer.settings.n_ctx} tokens"
    return f"{trainer.method} of {len(trainer.order)} examples"
