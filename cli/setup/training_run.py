"""Training run of `finetune` and `train`: devices, run, saves, progress and summary."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.outputs import check_output
from logitless.cli.progress import COMPILING, show_compiling
from logitless.cli.setup.model import choose_device
from logitless.cli.setup.training_files import TrainingFiles, named, newest
from logitless.cli.status_line import StatusLine, columns

if TYPE_CHECKING:
    from logitless.graph.execution.session import Session
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.hparams.hparams import Hparams
    from logitless.models.tokenizer import Tokenizer
    from logitless.training.checkpoint import Checkpoint
    from logitless.training.data.arrangement import Arrangement
    from logitless.training.data.load import DataOptions, Reader
    from logitless.training.data.run_media import RunMedia
    from logitless.training.methods.objective import Objective
    from logitless.training.parallel.coordinator import DataParallel, OpenTransport
    from logitless.training.reporting.trackers import Trackers
    from logitless.training.trainable import Trainable
    from logitless.training.trainer import Settings, Trainer

MakeTrainable = Callable[["Session", "GGUFFile", "Hparams"], "Trainable"]
MOST_HALVINGS = 64  # of -lr-half without -lr-halvings
ADAM_ITER = 256  # steps of a run without --adam-iter and --epochs


def settings(o: SimpleNamespace) -> Settings:
    from logitless.training.adapters.neftune import Neftune
    from logitless.training.methods.registry import SUPERVISED, learning_rate
    from logitless.training.schedule import OptimizerSettings, Schedule
    from logitless.training.trainer import Settings

    old = o.learning_rate is None  # llama-finetune's flags choose its schedule, the older trainer's flags theirs
    lr_min, decay_epochs = o.learning_rate_min, o.decay_epochs
    if o.learning_rate_half is not None:
        if old:
            raise UsageError("-lr-half halves the rate of -lr, which is not given")
        if lr_min > 0 or decay_epochs > 0:
            raise UsageError("-lr-half and -lr-min with -decay-epochs are two ways to halve the rate: give one of them")
        halvings = o.learning_rate_halvings or MOST_HALVINGS
        lr_min, decay_epochs = o.learning_rate * 0.5**halvings, o.learning_rate_half * halvings
    elif o.learning_rate_halvings:
        raise UsageError("-lr-halvings limits -lr-half, which is not given")
    peak = learning_rate(getattr(o, "method", SUPERVISED))
    schedule = Schedule(
        alpha=(peak if o.adam_alpha is None else o.adam_alpha) if old else o.learning_rate,
        kind="cosine" if old else "halving" if lr_min > 0 else "constant",
        warmup=(o.warmup or 0) if old else 0,  # the default follows the steps, see make_trainer
        cos_decay_steps=o.cos_decay_steps,
        cos_decay_min=o.cos_decay_min,
        cos_decay_restart=o.cos_decay_restart,
        enable_restart=o.enable_restart,
        min_alpha=o.adam_min_alpha,
        lr_min=lr_min,
        decay_epochs=decay_epochs,
    )
    decay = o.adam_decay if o.optimizer == "adamw" else 0.0
    optimizer = OptimizerSettings(
        kind=o.optimizer,
        beta1=o.adam_beta1,
        beta2=o.adam_beta2,
        eps=o.adam_eps,
        decay=decay if o.weight_decay is None else o.weight_decay,
        decay_min_ndim=o.adam_decay_min_ndim,
        gclip=o.adam_gclip,
        lora_plus_ratio=getattr(o, "lora_plus_ratio", 1.0),
    )
    return Settings(
        n_ctx=o.ctx_size,
        n_batch=o.batch_size,
        grad_acc=o.grad_acc,
        n_epochs=max(0, o.epochs),
        max_steps=o.adam_iter or (ADAM_ITER if o.epochs <= 0 else 0),
        save_every=o.save_every,
        checkpointing=o.use_checkpointing,
        validate_every=o.validate_every,
        schedule=schedule,
        optimizer=optimizer,
        noise=Neftune(o.neftune_noise_alpha, max(0, o.seed)),
    )


def set_context(o: SimpleNamespace, h: Hparams, reader: Reader) -> None:
    """Set `ctx_size` by the data and the model where no flag does. CliError: it is more than the model's."""
    from logitless.training.data.arrangement import context_for
    from logitless.training.data.load import LEAST_CONTEXT
    from logitless.training.errors import TrainingError

    if o.ctx_size is not None and o.ctx_size > h.n_ctx_train:
        raise CliError(f"--ctx-size {o.ctx_size}: is more than the model's {h.n_ctx_train}")
    if o.ctx_size is None:
        try:
            o.ctx_size = (
                context_for(o.file, o.file, reader, h.n_ctx_train) if o.file else min(LEAST_CONTEXT, h.n_ctx_train)
            )
        except TrainingError as error:
            raise CliError(str(error)) from None


def data_options(o: SimpleNamespace) -> DataOptions:
    from logitless.training.data.load import DataOptions
    from logitless.training.data.packing import SampleOptions

    start = o.sample_start
    if start is not None and o.escape:
        start = start.encode("latin-1", "backslashreplace").decode("unicode_escape")
    return DataOptions(
        n_ctx=o.ctx_size,
        stride=o.stride,
        pack=o.pack,
        sample_start=start,
        include_sample_start=o.include_sample_start,
        overlapping_samples=o.overlapping_samples,
        samples=SampleOptions(
            fill_with_next=o.fill_with_next_samples,
            separate_with_eos=o.separate_with_eos,
            separate_with_bos=o.separate_with_bos,
            random_offsets=o.sample_random_offsets,
        ),
    )


@contextmanager
def open_session(o: SimpleNamespace, *, trains: bool = True) -> Iterator[Session]:
    """A session on the devices of --device; kernels of training are compiled meanwhile, if it `trains`."""
    from logitless.backends.registry import open_backends
    from logitless.graph.execution.session import Session

    show_compiling()
    choose_device(o)
    session = Session(open_backends(o.device.split(","), max(o.threads, 0)))
    for backend in session.backends if trains else ():
        backend.prefetch_training(())
    try:
        yield session
    finally:
        COMPILING.end()
        session.close()


def run(
    o: SimpleNamespace,
    model: Path,
    make: MakeTrainable,
    output: str,
    resumed: Checkpoint | None,
    transport: OpenTransport | None = None,
) -> int:
    """Train, and write `output` (with ITERATION and LATEST replaced) at every save and at the end.

    `make` is a function of a module, for --workers; `transport`: to processes elsewhere."""
    from logitless.backends import self_test
    from logitless.engine.loading.open_model import generating_hparams
    from logitless.models.gguf.file import GGUFFile
    from logitless.training.reporting.plot import refusal

    if not o.file:
        raise UsageError("--file FILE is required: the text or the .jsonl file to learn from")
    if o.plot and (reason := refusal(o.plot)):
        raise UsageError(f"--plot: {reason}")
    check_outputs(o, output)
    check_workers(o)
    began = time.monotonic()
    with GGUFFile.open(model) as gguf, ExitStack() as stack:
        h = generating_hparams(gguf, model)
        reader = reader_of(o, gguf, model, Path(output).parent)
        set_context(o, h, reader)
        session = stack.enter_context(open_session(o))
        trainer_settings, data = prepare(o, reader)
        for line in data.losses:
            flag = " (--ctx-size)" if "longer than the context" in line else ""
            print(f"logitless: warning: {o.file}: {line}{flag}", file=sys.stderr)
        media = None if reader.media is None else reader.media.media
        trainer = make_trainer(o, make(session, gguf, h), trainer_settings, data, reader.objective, media)
        if len(session.backends) > 1:
            self_test.self_test_session(session, trainer.steps.everything())
        if resumed is not None:
            resume(o, trainer, resumed)
        if o.workers > 1:
            workers = open_workers(o, model, make, trainer, transport)
            trainer.steps.workers = stack.enter_context(workers)
        fit(o, trainer, gguf, h, output, began)
    return 0


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
    from logitless.backends.host import cores

    if o.workers > o.grad_acc:
        reason = f"each needs a device run of its own in a step (--grad-acc {o.workers} or more)"
        raise UsageError(f"--workers {o.workers}: {reason}")
    if o.workers > 1 and o.threads <= 0:
        o.threads = max(1, cores() // o.workers)


def open_workers(
    o: SimpleNamespace, model: Path, make: MakeTrainable, trainer: Trainer, transport: OpenTransport | None
) -> DataParallel:
    """The processes of --workers beside this one."""
    from logitless.backends.registry import open_backends
    from logitless.training.parallel.coordinator import DataParallel
    from logitless.training.parallel.processes import Processes
    from logitless.training.parallel.worker import Recipe
    from logitless.training.trainable import FULL

    if trainer.steps.media is not None:
        raise CliError(f"--workers {o.workers}: rows with images are learned by one process")
    recipe = Recipe(
        partial(open_backends, o.device.split(","), max(o.threads, 0)),
        model.absolute(),
        make,
        trainer.settings,
        sharded=trainer.trainable.kind == FULL,
    )
    return DataParallel((transport or Processes)(), recipe, o.workers)


def checked_type(name: str) -> str:
    """The preset of --output-type. UsageError: it is not written here."""
    from logitless.models.quantization.presets import PresetError, preset

    try:
        return preset(name)
    except PresetError as error:
        raise UsageError(f"--output-type: {error}") from None


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


def reader_of(o: SimpleNamespace, gguf: GGUFFile, path: Path, folder: Path | None = None) -> Reader:
    """Vocabulary, chat template, training method and images of a run; `folder`: of temporary files."""
    from logitless.models import tokenizer
    from logitless.models.chat.template import of_file
    from logitless.training.data.load import Reader
    from logitless.training.data.media import MediaReader, folder_of

    vocabulary = tokenizer.from_metadata(gguf.metadata, path=path)
    media = MediaReader(partial(_open_media, o, gguf, vocabulary, folder), folder=folder_of(o.file))
    return Reader(vocabulary, of_file(gguf.metadata, vocabulary), objective_of(o), media)


def _open_media(o: SimpleNamespace, gguf: GGUFFile, vocabulary: Tokenizer, folder: Path | None) -> RunMedia:
    """Images by the projector of --mmproj, or the only one beside the model. TrainingError: there is none."""
    from logitless.cli.setup.model import model_options
    from logitless.engine.loading.open_model import projector_file
    from logitless.models.model import hparams_of
    from logitless.training.data.media import NO_PROJECTOR
    from logitless.training.data.run_media import projector_media
    from logitless.training.errors import TrainingError

    h = hparams_of(gguf)
    projector = projector_file(model_options(o), gguf, h) if hasattr(o, "mmproj") else ""  # train has none
    if not projector:
        raise TrainingError(NO_PROJECTOR)
    tokens = o.image_min_tokens, o.image_max_tokens
    return projector_media(gguf, h, vocabulary, projector, tokens=tokens, folder=folder)


def objective_of(o: SimpleNamespace) -> Objective | None:
    """The method of --method with its flags. UsageError: a flag is of another method."""
    from logitless.training.errors import TrainingError
    from logitless.training.methods.registry import OBJECTIVES, SUPERVISED, hyperparameters, objective

    names = {name for method in OBJECTIVES for name in hyperparameters(method)}
    given = {name: getattr(o, name, None) for name in names}
    try:
        return objective(getattr(o, "method", SUPERVISED), given)
    except TrainingError as error:
        raise UsageError(f"--{str(error).replace('_', '-', 1)}") from None


def prepare(o: SimpleNamespace, reader: Reader) -> tuple[Settings, Arrangement]:
    """(settings, data). CliError: one of them is wrong."""
    from logitless.training.data.arrangement import arranged
    from logitless.training.errors import TrainingError

    try:
        asked = settings(o)
        data = arranged(
            o.file,
            o.file,
            reader,
            data_options(o),
            n_batch=asked.n_batch,
            grad_acc=asked.grad_acc,
            validation=o.val_split,
            seed=max(0, o.seed),
            shuffle=o.shuffle,
        )
    except TrainingError as error:
        raise CliError(str(error)) from None
    return asked.laid_out(data, 0 if reader.objective is None else asked.n_logical), data


def make_trainer(
    o: SimpleNamespace,
    trainable: Trainable,
    run_settings: Settings,
    data: Arrangement,
    objective: Objective | None = None,
    media: RunMedia | None = None,
) -> Trainer:
    from logitless.training.schedule import Stopping, default_warmup
    from logitless.training.trainer import Trainer, n_steps_of

    if o.warmup is None and o.learning_rate is None:
        warmup = default_warmup(n_steps_of(data.order, run_settings))
        run_settings = replace(run_settings, schedule=replace(run_settings.schedule, warmup=warmup))
    stopping = Stopping(o.opt_past, o.opt_delta, o.opt_max_no_improvement, o.adam_epsf)
    return Trainer(
        trainable, run_settings, data.order, data.validation, objective=objective, media=media, stopping=stopping
    )


def fit(o: SimpleNamespace, trainer: Trainer, gguf: GGUFFile, h: Hparams, output: str, began: float) -> None:
    """Run a trainer to its end, with its progress, saves and summary."""
    from logitless.training.checkpoint import save_checkpoint
    from logitless.training.errors import TrainingDiverged
    from logitless.training.reporting.plot import plot
    from logitless.training.reporting.progress import Reporter, clock, uncertain
    from logitless.training.save import save_result
    from logitless.training.trainer import Finished, Save, Told, Validated

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
        f"bytes; {_counted(trainer, o)} to train on, "
        f"{len(trainer.validation_indices)} to validate, {trainer.n_steps} steps on {devices}",
        file=sys.stderr,
    )
    warmup = trainer.settings.schedule.warmup
    if trainer.settings.schedule.kind != "halving" and warmup >= trainer.n_steps:
        reached = f"the {trainer.n_steps} steps of the run never reach the learning rate"
        print(f"logitless: warning: --warmup {warmup}: {reached}", file=sys.stderr)
    epochs, n = trainer.settings.n_epochs, trainer.settings.n_logical
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
                elif isinstance(event, Told):
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


def trackers_of(o: SimpleNamespace, trainer: Trainer, output: str, told: Callable[[str], None]) -> Trackers:
    """The trackers of --report-to."""
    from logitless.training.reporting.trackers import Integration, RunInfo, Trackers, configuration

    integrations = [Integration(kind, o.report_project) for kind in dict.fromkeys(o.report_to)]
    config = {"model": Path(getattr(o, "model", None) or output).name, **configuration(trainer)}
    name = o.report_name or Path(output).stem
    return Trackers(integrations, RunInfo(Path(o.report_dir), "", name, config, trainer.counters.iterations), told)


def _counted(trainer: Trainer, o: SimpleNamespace) -> str:
    """Number and kind of the samples that a run learns from."""
    if trainer.method == "supervised":
        return f"{len(trainer.order)} samples of {o.ctx_size} tokens"
    return f"{trainer.method} of {len(trainer.order)} examples"
