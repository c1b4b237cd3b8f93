"""Trainer: fine-tuning of a model file in this process, with callbacks and access to gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from logitless.backends.host import cores
from logitless.backends.registry import open_backends
from logitless.engine.loading.open_model import demo_model
from logitless.engine.loading.options import OPTIONS
from logitless.errors import OptionError, TrainingError, public_errors
from logitless.graph.execution.session import Session
from logitless.models.adapters.peft import write_peft
from logitless.training.adapters.neftune import Neftune
from logitless.training.adapters.options import lora_options
from logitless.training.finetune import FineTuning
from logitless.training.methods.registry import METHODS, SUPERVISED, objective
from logitless.training.methods.registry import learning_rate as rate_of
from logitless.training.parallel.processes import Processes
from logitless.training.reporting.trackers import KINDS, Integration, RunInfo, Trackers, configuration
from logitless.training.schedule import OptimizerSettings, Schedule
from logitless.training.step import GradientHook
from logitless.training.trainer import Control, Event, Finished, Save, Settings, Step, Validated

log = logging.getLogger("logitless.trackers")
__all__ = ["Control", "Event", "Finished", "Save", "Step", "Trainer", "Validated"]


class Trainer:
    """Fine-tunes a GGUF model: a LoRA adapter, or all weights.

    `data`: a text file, a file of rows (.jsonl, .json, .csv, .parquet), a data set
    `hf:OWNER/NAME`, or rows: `{"messages": […]}`, `{"prompt": …, "completion": …}` or `{"text": …}`;
    of preferences `{"prompt": …, "chosen": …, "rejected": …}`.

    >>> from logitless import Trainer
    >>> rows = [{"prompt": "Who is there?", "completion": " Nay, answer me."}] * 8
    >>> losses = []
    >>> with Trainer(None, rows, ctx_size=32, batch_size=4, iterations=2, callbacks=[losses.append]) as trainer:
    ...     result = trainer.fit()
    ...     trainer.save("adapter.gguf")
    >>> result.reason
    '2 iterations are done'
    """

    def __init__(
        self,
        model: str | Path | None,
        data: str | Path | Iterable[Mapping[str, Any]],
        *,
        method: str = "supervised",
        full: bool = False,
        beta: float | None = None,
        gamma: float | None = None,
        callbacks: Sequence[Callable[[Event], None]] = (),
        before_step: Callable[[Control], None] | None = None,
        on_gradients: GradientHook | None = None,
        device: str = "auto",
        threads: int = -1,
        ctx_size: int | None = None,
        batch_size: int = 8,
        grad_acc: int = 1,
        epochs: float = 0,
        iterations: int = 256,
        learning_rate: float | None = None,
        warmup: int = 0,
        optimizer: str = "adamw",
        weight_decay: float = 0.0,
        mmproj: str | Path | None = None,
        val_split: float = 0.0,
        validate_every: int = 0,
        save_every: int = 0,
        use_checkpointing: bool = True,
        lora_r: int = 4,
        lora_alpha: float = 0.0,
        lora_target_modules: Sequence[str] = (),
        lora_rslora: bool = False,
        lora_dora: bool = False,
        lora_init: str = "gaussian",
        lora_plus_ratio: float = 1.0,
        neftune_noise_alpha: float = 0.0,
        train_tensors: Sequence[str] = ("*",),
        seed: int = 0,
        workers: int = 1,
        report_to: Sequence[str] = (),
        report_project: str = "logitless",
        report_name: str = "",
        report_dir: str | Path = "runs",
    ) -> None:
        """Open the model (None: the demo) and prepare the data; nothing is trained yet.

        `method`: "supervised", "dpo", "orpo", "kto" or "simpo" (docs/training.md), with `beta` and
        `gamma` where it has them; "lora" and "full" are supervised learning of an adapter and of
        all weights. `full`: train all weights. `ctx_size`: tokens of a sample (None: the longest
        row's, at least 128); `batch_size`: samples of a device run, of which a step takes
        `grad_acc`; of a preference method their product is the examples of a step.
        `learning_rate`: None: 1e-3, of a preference method 1e-4. `epochs` and `iterations` limit the run (0: no
        limit). `callbacks` get each event: Step, Validated, Save, Finished. `before_step` may
        change the learning rate or cancel. `on_gradients` gets a step's gradients as arrays by
        parameter name, before the optimizer uses them, and returns those that it changed: for
        clipping, noise, or an all-reduce between processes. `mmproj`: the projector of rows with
        images (None: the only one beside the model); rows of a file may name image files below its
        folder. `lora_r`, `lora_alpha`, `lora_target_modules`, `lora_rslora`, `lora_dora` and `lora_init`
        shape the adapter, `lora_plus_ratio` is the factor of the rate of B, `neftune_noise_alpha`
        of the noise on embeddings in supervised learning (docs/training.md). `workers`: processes that
        share the `grad_acc` device runs of each step, and end with the bytes of one; `threads` is of
        each. `report_to`: trackers that get the metrics, "wandb", "mlflow" or "tensorboard"; a warning
        tells of one that fails.

        ModelError, TrainingError and OptionError name the fault in one line.
        """
        if method not in ("lora", "full", *METHODS):
            raise OptionError(f"method: {method!r} is not one of lora, full, {', '.join(METHODS)}")
        full, method = full or method == "full", SUPERVISED if method in ("lora", "full") else method
        if optimizer not in ("adamw", "sgd"):
            raise OptionError(f"optimizer: {optimizer!r} is not one of adamw, sgd")
        for name, value in (
            ("warmup", warmup),
            ("validate_every", validate_every),
            ("save_every", save_every),
            ("seed", seed),
        ):
            if value < 0:
                raise OptionError(f"{name}: {value} must not be negative")
        if not 1e-3 <= lora_plus_ratio <= 1e3:
            raise OptionError(f"lora_plus_ratio: {lora_plus_ratio} is not between 0.001 and 1000")
        if not 0 <= neftune_noise_alpha <= 1e3:
            raise OptionError(f"neftune_noise_alpha: {neftune_noise_alpha} is not between 0 and 1000")
        if neftune_noise_alpha and method not in ("lora", "full", SUPERVISED):
            raise OptionError(f"neftune_noise_alpha: is of supervised learning, and the method is {method}")
        if workers < 1:
            raise OptionError(f"workers: {workers} must be at least 1")
        for kind in report_to:
            if kind not in KINDS:
                raise OptionError(f"report_to: {kind!r} is not one of {', '.join(KINDS)}")
        self._integrations = [Integration(kind, report_project) for kind in report_to]
        self._report_name, self._report_dir = report_name, Path(report_dir)
        self._callbacks = tuple(callbacks)
        with public_errors():
            names = OPTIONS["device"].check(device).split(",")
            n_threads = max(0, OPTIONS["threads"].check(threads))
            if workers > 1 and n_threads == 0:
                n_threads = max(1, cores() // workers)
            learner = objective(method, {"beta": beta, "gamma": gamma})
            if learning_rate is None:
                learning_rate = rate_of(method)
            settings = Settings(
                n_ctx=128 if ctx_size is None else ctx_size,
                n_batch=batch_size,
                grad_acc=grad_acc,
                n_epochs=epochs,
                max_steps=iterations,
                save_every=save_every,
                checkpointing=use_checkpointing,
                validate_every=validate_every,
                schedule=Schedule(alpha=learning_rate, warmup=warmup, kind="constant"),
                optimizer=OptimizerSettings(kind=optimizer, decay=weight_decay, lora_plus_ratio=lora_plus_ratio),
                noise=Neftune(neftune_noise_alpha, seed),
            )
            self._session = Session(open_backends(names, n_threads))
            try:
                path = Path(demo_model() if model is None else model)
                adapter = {
                    "lora_r": lora_r,
                    "lora_alpha": lora_alpha,
                    "lora_target_modules": lora_target_modules,
                    "lora_rslora": lora_rslora,
                    "lora_dora": lora_dora,
                    "lora_init": lora_init,
                }
                self._run = FineTuning(
                    self._session,
                    path,
                    data,
                    method=tuple(train_tensors) if full else lora_options(adapter, seed),
                    objective=learner,
                    settings=settings,
                    fit_context=ctx_size is None,
                    projector=mmproj,
                    validation=val_split,
                    seed=seed,
                    before_step=before_step,
                    on_gradients=on_gradients,
                )
            except BaseException:
                self._session.close()
                raise
            for line in self._run.losses:
                logging.getLogger("logitless.training").warning("%s: %s", self._run.name, line)
            if workers > 1:
                try:
                    self._run.share(workers, partial(open_backends, names, n_threads), Processes)
                except BaseException:
                    self.close()
                    raise

    def fit(self) -> Finished:
        """Train to the end; the result has the reason why it ended."""

        trainer = self._run.trainer
        name = self._report_name or Path(self._run.gguf.path).stem
        run = RunInfo(self._report_dir, "", name, configuration(trainer), trainer.counters.iterations)
        with public_errors(), Trackers(self._integrations, run, log.warning) as trackers:

            def tell(event: Event) -> None:
                trackers(event)
                for callback in self._callbacks:
                    callback(event)

            return self._run.fit(tell)

    def save(self, path: str | Path, output_type: str = "f32") -> None:
        """Write the adapter, or the whole model in `output_type`, one of `quantize`'s, as GGUF."""
        with public_errors():
            self._run.save(path, output_type)

    def save_peft(self, folder: str | Path) -> None:
        """Write the adapter as `peft` loads it: adapter_config.json and adapter_model.safetensors."""
        trainable = self._run.trainer.trainable
        if trainable.lora is None:
            raise TrainingError("all weights are trained, and peft's format is of adapters")
        with public_errors():
            write_peft(folder, trainable.adapter(), self._run.gguf, self._run.hparams)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything that the rest of the run depends on."""
        with public_errors():
            self._run.save_checkpoint(path)

    def resume(self, path: str | Path) -> bool:
        """Go on from a checkpoint, to the same bits. False: the data differ, so their order begins anew."""
        with public_errors():
            return self._run.resume(path)

    def close(self) -> None:
        """Give up the run's memory. Closing twice is no error."""
        self._run.close()
        self._session.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
