"""Fine-tuning of a model file, headless: data, method, callbacks, result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from logitless.graph.backend import Backend
from logitless.graph.execution.session import Session
from logitless.models import tokenizer
from logitless.models.chat.template import of_file
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.media.projector_choice import fitting_projector
from logitless.models.model import define_model, hparams_of
from logitless.training.adapters.lora import lora
from logitless.training.adapters.options import LoraOptions
from logitless.training.checkpoint import read_checkpoint, save_checkpoint
from logitless.training.data.arrangement import Data, arranged, context_for
from logitless.training.data.load import DataOptions, Reader
from logitless.training.data.media import NO_PROJECTOR, MediaReader, folder_of
from logitless.training.data.run_media import RunMedia, projector_media
from logitless.training.errors import TrainingError
from logitless.training.methods.objective import Objective
from logitless.training.parallel.coordinator import DataParallel, OpenTransport
from logitless.training.parallel.worker import Recipe
from logitless.training.save import save_result
from logitless.training.schedule import Stopping
from logitless.training.step import GradientHook
from logitless.training.trainable import FULL, Trainable, full
from logitless.training.trainer import Control, Event, Finished, Settings, Trainer


def trainable_of(
    session: Session, gguf: GGUFFile, h: Hparams, n_ctx: int, method: LoraOptions | Sequence[str]
) -> Trainable:
    """The trained parameters of a model file: an adapter, or the weights that patterns name."""
    base = define_model(session, gguf, h, n_ctx)
    if isinstance(method, LoraOptions):
        return lora(session, base, method, gguf=gguf)
    return full(session, base, gguf, h, method)


class FineTuning:
    """Fine-tunes one GGUF model on a session of devices.

        with FineTuning(session, "model.gguf", "rows.jsonl", settings=Settings(max_steps=100)) as
        run:
            run.fit(lambda event: print(event))
            run.save("adapter.gguf")

    `trainer` is the run itself (logitless.training.trainer.Trainer): its state, its counters, its
    steps. The session is the caller's, to close after the run; it holds this model alone."""

    def __init__(
        self,
        session: Session,
        model: str | Path,
        data: Data,
        *,
        method: LoraOptions | Sequence[str] | None = None,
        objective: Objective | None = None,
        settings: Settings | None = None,
        fit_context: bool = False,
        data_options: DataOptions | None = None,
        projector: str | Path | None = None,
        validation: float = 0.0,
        seed: int = 0,
        stopping: Stopping | None = None,
        before_step: Callable[[Control], None] | None = None,
        on_gradients: GradientHook | None = None,
    ) -> None:
        """Open the model and prepare the data; nothing is trained yet.

        `data`: a text file, a file of rows, a data set `hf:OWNER/NAME`, or rows as objects, in a
        format of `training.data.formats`. `method`: LoRA with these options (None: the default
        ones), or patterns of the weights to train in full, `["*"]` for all. `objective`: the
        training method (training.methods.registry); None: supervised learning. `data_options` says
        how data become samples; their length is `settings.n_ctx`, or with `fit_context` the longest
        row's. With an objective a step takes n_batch · grad_acc examples, in windows as long as
        these need. `projector`: the file of the encoder of images, for rows that have some (None:
        the one beside the model that belongs to it); those of a file may name image files below its
        folder. `validation`: the share of samples that are not learned but measured.
        `before_step` and `on_gradients`: see Trainer.

        ModelFileError and TrainingError name the fault in one line; OSError: a file cannot be
        read."""
        settings = settings or Settings()
        self.gguf = GGUFFile.open(model)
        try:
            self.hparams = h = hparams_of(self.gguf)
            if not h.causal:
                raise ModelFileError(self.gguf.path, f"{h.arch!r} makes vectors of texts and cannot be fine-tuned")
            self.tokenizer = tokenizer.from_metadata(self.gguf.metadata, path=self.gguf.path)
            template = of_file(self.gguf.metadata, self.tokenizer)
            media = MediaReader(partial(self._media, projector), folder=folder_of(data))
            reader = Reader(self.tokenizer, template, objective, media)
            if not isinstance(data, str | Path):
                data = list(data)
            self.name = name = str(data) if isinstance(data, str | Path) else "rows"
            if fit_context:
                settings = replace(settings, n_ctx=context_for(data, name, reader, h.n_ctx_train))
            if settings.n_ctx > h.n_ctx_train:
                raise TrainingError(f"n_ctx {settings.n_ctx} is more than the model's {h.n_ctx_train} (--ctx-size)")
            found = arranged(
                data,
                name,
                reader,
                replace(data_options or DataOptions(), n_ctx=settings.n_ctx),
                n_batch=settings.n_batch,
                grad_acc=settings.grad_acc,
                validation=validation,
                seed=seed,
            )
            self.losses = found.losses  # lines about rows that are not learned as they are
            settings = settings.laid_out(found, 0 if objective is None else settings.n_logical)
            self._trainable = partial(
                trainable_of, n_ctx=settings.n_ctx, method=LoraOptions(seed=seed) if method is None else method
            )
            self.trainer = Trainer(
                self._trainable(session, self.gguf, h),
                settings,
                found.order,
                found.validation,
                objective=objective,
                media=media.media,
                stopping=stopping,
                before_step=before_step,
                on_gradients=on_gradients,
            )
        except BaseException:
            self.gguf.close()
            raise

    def _media(self, projector: str | Path | None) -> RunMedia:
        projector = projector or fitting_projector(self.gguf.path, self.gguf, self.hparams)
        if projector is None:
            raise TrainingError(NO_PROJECTOR)
        return projector_media(self.gguf, self.hparams, self.tokenizer, projector)

    def share(self, n: int, backends: Callable[[], Sequence[Backend]], transport: OpenTransport) -> None:
        """Share the micro-batches of each step with n − 1 other processes. `backends`: a function of
        a module that opens theirs. TrainingError: some would have no work."""
        settings = self.trainer.settings
        if n > settings.grad_acc:
            raise TrainingError(f"workers: {n} need at least as many micro-batches in a step (grad_acc)")
        if self.trainer.steps.media is not None:
            raise TrainingError("workers: rows with images are learned by one process")
        sharded = self.trainer.trainable.kind == FULL
        recipe = Recipe(backends, self.gguf.path.absolute(), self._trainable, settings, sharded)
        self._workers = DataParallel(transport(), recipe, n)
        self.trainer.steps.workers = self._workers

    def fit(self, on_event: Callable[[Event], None] | None = None) -> Finished:
        """Train to the end; `on_event` gets each event (Step, Validated, Save, …). The result has
        the reason."""
        return self.trainer.fit(on_event)

    def save(self, path: str | Path, dtype: str = "f32") -> None:
        """Write the adapter, or the whole model with its trained matrices in `dtype`, as a GGUF
        file."""
        save_result(path, self.trainer.trainable, self.gguf, self.hparams, dtype)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything that the rest of the run depends on."""
        save_checkpoint(path, self.trainer, self.hparams.arch)

    def resume(self, path: str | Path) -> bool:
        """Go on from a checkpoint. False: its data are not these, whose order begins anew."""
        return read_checkpoint(path).restore(self.trainer)

    _workers: DataParallel | None = None

    def close(self) -> None:
        """Close the model's file, and end the processes that share the work. Nothing can be run or
        saved afterwards."""
        if self._workers is not None:
            self._workers.close()
        self.gguf.close()

    def __enter__(self) -> FineTuning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
