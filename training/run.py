"""Training run: the one assembly of a configuration, data and a model.

The command line, `logitless.Trainer` and jobs share it. `plan_run` and `plan_examples` make a
`RunPlan` of a configuration and data; `FineTuning` opens a model file beside them. A job makes the
plan's trainer on the server's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace

from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.models import tokenizer
from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.template import ChatTemplate, from_metadata, of_file
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.media.params import params_for
from logitless.models.media.projector_choice import fitting_projector
from logitless.models.model import define_model, hparams_of
from logitless.models.tokenizer import Tokenizer
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions, lora_options
from logitless.training.checkpoint import read_checkpoint, save_checkpoint
from logitless.training.config import TrainingConfig, changed, check, unused
from logitless.training.data.arrangement import Data, arranged, context_for, rows_in
from logitless.training.data.dataset_rows import DatasetRow
from logitless.training.data.load import Reader
from logitless.training.data.media import NO_PROJECTOR, MediaReader, folder_of
from logitless.training.data.run_media import RunMedia, projector_media
from logitless.training.data.sampler import ExampleSampler, Sampler, split
from logitless.training.data.tokenize_rows import I32
from logitless.training.errors import TrainingError
from logitless.training.methods.grpo import GRPO
from logitless.training.methods.objective import Objective
from logitless.training.methods.registry import hyperparameters, learning_rate, objective
from logitless.training.parallel.coordinator import DataParallel, OpenTransport
from logitless.training.parallel.worker import Recipe
from logitless.training.save import save_result
from logitless.training.schedule import Stopping, default_warmup
from logitless.training.step import GradientHook
from logitless.training.trainable import FULL, Trainable, full
from logitless.training.trainer import Control, Event, Finished, Trainer, n_steps_of

MakeTrainable = Callable[..., Trainable]  # as trainable_of
OpenMedia = Callable[[GGUFFile, Hparams, Tokenizer], RunMedia]


def objective_of(config: TrainingConfig) -> Objective | None:
    """The training method; None: supervised learning. TrainingError: it does not learn from data."""
    return objective(config.method, {name: getattr(config, name) for name in hyperparameters(config.method)})


def lora_of(config: TrainingConfig) -> LoraOptions:
    """The adapter's options. TrainingError: they do not fit together."""
    values = {name: getattr(config, name) for name in type(config).__struct_fields__ if name.startswith("lora_")}
    return lora_options(values, config.seed, config.lora_ranks)


def settings_of(config: TrainingConfig) -> TrainingConfig:
    """The configuration with a number for each that has none; a run's data say the rest: `RunPlan`.

    TrainingError names a field outside its limits."""
    rate = learning_rate(config.method) if config.learning_rate is None else config.learning_rate
    decay = 0.1 if config.optimizer == "adamw" else 0.0
    settings = replace(
        config,
        ctx_size=128 if config.ctx_size is None else config.ctx_size,
        learning_rate=rate * config.learning_rate_multiplier,
        learning_rate_multiplier=1.0,
        warmup=config.warmup or 0,
        weight_decay=decay if config.weight_decay is None else config.weight_decay,
    )
    check(settings)
    return settings


@dataclass(frozen=True)
class RunPlan:
    """Everything of a run but its model: settings, tokenized data and their order, training method.

    `choices`: a line about what was chosen from the data; `warnings`: what is not learned as it stands."""

    config: TrainingConfig
    settings: TrainingConfig  # with what was chosen
    order: Sampler | ExampleSampler
    validation: I32
    objective: Objective | None = None
    media: RunMedia | None = None
    choices: str = ""
    warnings: tuple[str, ...] = ()
    grpo: GRPO | None = None  # of reinforcement

    @classmethod
    def of(
        cls,
        config: TrainingConfig,
        settings: TrainingConfig,
        order: Sampler | ExampleSampler,
        validation: I32,
        **more: Any,
    ) -> RunPlan:
        """The plan, with a schedule as long as its run."""
        n_steps = n_steps_of(order, settings, more.get("grpo"))
        if config.warmup is None:
            settings = replace(settings, warmup=default_warmup(n_steps))
        if not config.cos_decay_steps:
            settings = replace(settings, cos_decay_steps=max(1, n_steps))
        return cls(config, settings, order, validation, **more)

    @property
    def n_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return n_steps_of(self.order, self.settings, self.grpo)

    @property
    def stopping(self) -> Stopping:
        """The rules that end the run early."""
        c = self.config
        return Stopping(
            c.opt_past, c.opt_delta, c.opt_max_no_improvement, c.adam_epsf, patience=c.early_stopping_patience
        )

    def trainer(self, trainable: Trainable, **hooks: Any) -> Trainer:
        """The trainer of these parameters. `hooks`: as of Trainer."""
        return Trainer(
            trainable,
            self.settings,
            self.order,
            self.validation,
            objective=self.objective,
            media=self.media,
            stopping=self.stopping,
            **hooks,
        )


def data_name(data: Data | None) -> str:
    """Name of the data in messages: its file's, else "rows"."""
    return str(data) if isinstance(data, str | Path) else "rows"


def plan_run(config: TrainingConfig, data: Data | None, reader: Reader, n_ctx_train: int) -> RunPlan:
    """The plan of a run whose steps take batch_size · grad_acc windows (with a method other than
    supervised learning so many examples). None: a plan without data, for its memory.

    TrainingError names the field, or the line of the data."""
    n_ctx = config.ctx_size
    if n_ctx is not None and n_ctx > n_ctx_train:
        raise TrainingError(f"ctx_size {n_ctx}: is more than the model's {n_ctx_train}")
    name = data_name(data)
    if n_ctx is None:
        n_ctx = min(128, n_ctx_train) if data is None else context_for(data, name, reader, n_ctx_train)
    settings = replace(settings_of(config), ctx_size=n_ctx)
    if data is None:
        return RunPlan(config, settings, order=None, validation=np.zeros(0, np.int32))  # type: ignore[arg-type]
    layout = arranged(data, name, reader, settings)
    settings = replace(
        settings,
        ctx_size=layout.n_ctx,
        batch_size=layout.n_batch,
        grad_acc=layout.grad_acc,
        batch_examples=0 if reader.objective is None else settings.n_logical,
    )
    return RunPlan.of(
        config,
        settings,
        layout.order,
        layout.validation,
        objective=reader.objective,
        media=None if reader.media is None else reader.media.media,
        warnings=layout.losses,
    )


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read again, and their name in messages."""

    name: str
    records: Callable[[], Iterator[DatasetRow]]


def held_out(n: int, fraction: float, seed: int, name: str, example: str = "example") -> tuple[I32, I32]:
    """(examples to train on, examples that validate) of n; with a fraction at least one validates."""
    if not fraction:
        return np.arange(n, dtype=np.int32), np.zeros(0, np.int32)
    if n < 2:
        raise TrainingError(f"{name}: a validation_split of one {example} leaves none to train on")
    return split(n, max(fraction, 1 / n), seed)


def plan_examples(
    config: TrainingConfig,
    rows: RowSource,
    validation_rows: RowSource | None,
    reader: Reader,
    choose: Callable[[I32, int], TrainingConfig],
) -> RunPlan:
    """The plan of a run whose steps take batch_examples examples, in windows that hold them alone.

    `choose`: the configuration by the lengths of the training examples and of the longest row.
    TrainingError names the line at fault."""
    sources = [rows] if validation_rows is None else [rows, validation_rows]
    lengths = [reader.lengths(source.records(), source.name) for source in sources]
    n = len(sizes := lengths[0].sizes)
    if not n:
        raise TrainingError(f"{rows.name}: has no token to learn")
    training, validation = held_out(n, config.val_split, config.seed, rows.name)
    config = choose(sizes[training], max(each.longest for each in lengths))
    assert config.ctx_size is not None
    datasets: list[Any] = [reader.by_example(source.records(), source.name, config.ctx_size) for source in sources]
    warnings = [f"{source.name}: {line}" for source, d in zip(sources, datasets, strict=True) for line in d.losses]
    dataset = datasets[0]
    if validation_rows is not None:
        dataset = dataset.joined(datasets[1])
        validation = np.arange(n, len(dataset), dtype=np.int32)
    dataset, n_batch, n_runs = dataset.lay(training, config.batch_examples)
    settings = replace(settings_of(config), ctx_size=dataset.n_tokens, batch_size=n_batch, grad_acc=n_runs)
    media = None if reader.media is None else reader.media.media
    return RunPlan.of(
        config,
        settings,
        ExampleSampler(dataset, training, rows.name, config.seed),
        validation,
        objective=reader.objective,
        media=media,
        warnings=tuple(warnings),
    )


def template_of(source: str, words: Tokenizer, template: ChatTemplate | None) -> ChatTemplate | None:
    """The chat template of a run's rows: `source` ("": the model's). TrainingError: it is not usable."""
    if not source:
        return template
    try:
        return from_metadata({}, words, source)
    except ChatTemplateError as error:
        raise TrainingError(f"chat_template: {' '.join(str(error).split())}") from None


def reader_of(
    config: TrainingConfig, data: Data | None, gguf: GGUFFile, h: Hparams, open_media: OpenMedia | None = None
) -> Reader:
    """Reader of a run's data: vocabulary, chat template, training method, and images (`open_media`:
    by whom; None: by the projector of `mmproj`, or the one beside the model)."""
    words = tokenizer.from_metadata(gguf.metadata, path=gguf.path)
    if config.mmproj:
        with GGUFFile.open(config.mmproj) as projector:  # even if no row, or only a late one, has an image
            params_for(gguf, h, projector)
    template = template_of(config.chat_template, words, of_file(gguf.metadata, words))
    opened = partial(open_media or partial(_media, config.mmproj), gguf, h, words)
    folder = None if data is None else folder_of(data)
    return Reader(words, template, objective_of(config), MediaReader(opened, folder=folder))


def _media(projector: str | None, gguf: GGUFFile, h: Hparams, words: Tokenizer) -> RunMedia:
    path = projector or fitting_projector(gguf.path, gguf, h)
    if path is None:
        raise TrainingError(NO_PROJECTOR)
    return projector_media(gguf, h, words, path)


def trainable_of(
    session: Session,
    gguf: GGUFFile,
    h: Hparams,
    *,
    n_ctx: int,
    adapter: LoraOptions | None,
    patterns: Sequence[str] = ("*",),
) -> Trainable:
    """The trained parameters of a model file: an adapter, or the weights that patterns name."""
    base = define_model(session, gguf, h, n_ctx)
    return full(session, base, gguf, h, patterns) if adapter is None else lora(session, base, adapter, gguf=gguf)


class FineTuning:
    """Fine-tunes one GGUF model on a session of devices.

        with FineTuning(session, "model.gguf", "rows.jsonl", TrainingConfig(iterations=100)) as run:
            run.fit(lambda event: print(event))
            run.save("adapter.gguf")

    `trainer` is the run itself (logitless.training.trainer.Trainer): its state, its counters, its
    steps. The session is the caller's, to close after the run; it holds this model alone."""

    def __init__(  # noqa: PLR0913  (keywords of the Python API)
        self,
        session: Session,
        model: str | Path,
        data: Data,
        config: TrainingConfig | None = None,
        *,
        make: MakeTrainable = trainable_of,
        adapter: LoraOptions | None = None,
        open_media: OpenMedia | None = None,
        before_step: Callable[[Control], None] | None = None,
        on_gradients: GradientHook | None = None,
    ) -> None:
        """Open the model and prepare the data; nothing is trained yet.

        `data`: a text file, a file of rows, a data set `hf:OWNER/NAME`, or rows as objects, in a
        format of `training.data.formats`. `adapter`: its options (None: those of `config`). `make`
        (`trainable_of`'s arguments): the trained parameters; a function of a module, for other
        processes. `open_media`: see reader_of. `before_step` and `on_gradients`: see Trainer.

        ModelFileError and TrainingError name the fault in one line; OSError: a file cannot be
        read."""
        config = config or TrainingConfig()
        for name, reason in unused(asdict(config), changed(config)):
            raise TrainingError(f"{name}: {reason}")
        self.gguf = GGUFFile.open(model)
        try:
            self.hparams = h = hparams_of(self.gguf)
            if h.untrainable:
                raise ModelFileError(self.gguf.path, f"{h.arch!r} {h.untrainable} and cannot be fine-tuned")
            if not isinstance(data, str | Path):
                data = rows_in(data)
            self.name = data_name(data)
            reader = reader_of(config, data, self.gguf, h, open_media)
            self.tokenizer = reader.tokenizer
            self.plan = plan_run(config, data, reader, h.n_ctx_whole)
            if not config.full and adapter is None:
                adapter = lora_of(config)
            self._make = partial(make, n_ctx=self.plan.settings.n_ctx, adapter=adapter, patterns=config.train_tensors)
            trainable = self._make(session, self.gguf, h)
            self.trainer = self.plan.trainer(trainable, before_step=before_step, on_gradients=on_gradients)
        except BaseException:
            self.gguf.close()
            raise

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines about rows that are not learned as they are."""
        return self.plan.warnings

    def share(self, n: int, backends: Callable[[], Sequence[Backend]], transport: OpenTransport) -> None:
        """Share the micro-batches of each step with n − 1 other processes. `backends`: a function of
        a module that opens theirs. TrainingError: some would have no work."""
        settings = self.trainer.settings
        if n > settings.grad_acc:
            reason = f"each needs a device run of its own in a step (--grad-acc {n} or more)"
            raise TrainingError(f"workers {n}: {reason}")
        if self.trainer.steps.media is not None:
            raise TrainingError(f"workers {n}: rows with images are learned by one process")
        sharded = self.trainer.trainable.kind == FULL
        recipe = Recipe(backends, self.gguf.path.absolute(), self._make, settings, sharded)
        self._workers = DataParallel(transport(), recipe, n)
        self.trainer.steps.workers = self._workers

    def fit(self, on_event: Callable[[Event], None] | None = None) -> Finished:
        """Train to the end; `on_event` gets each event (Step, Validated, Save, …). The result has the reason."""
        return self.trainer.fit(on_event)

    def save(self, path: str | Path, dtype: str = "f32") -> None:
        """Write the adapter, or the whole model with its trained matrices in `dtype`, as a GGUF
        file. TrainingDiverged: the model is not sound."""
        self.trainer.check()
        save_result(path, self.trainer.trainable, self.gguf, self.hparams, dtype)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything that the rest of the run depends on. TrainingDiverged: the model is not sound."""
        self.trainer.check()
        save_checkpoint(path, self.trainer, self.hparams.arch)

    def resume(self, path: str | Path) -> bool:
        """Go on from a checkpoint. False: its data are not these, whose order begins anew."""
        return read_checkpoint(path).restore(self.trainer)

    _workers: DataParallel | None = None

    def close(self) -> None:
        """Close the model's file, and end the processes that share the work. Nothing can be run or saved afterwards."""
        if self._workers is not None:
            self._workers.close()
        self.gguf.close()

    def __enter__(self) -> FineTuning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
