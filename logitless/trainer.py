"""Trainer: fine-tuning of a model file in this process, with callbacks and access to gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from logitless.backends.cores import cores
from logitless.backends.registry import open_backends
from logitless.engine.loading.open_model import demo_model
from logitless.engine.loading.options import OPTIONS
from logitless.errors import OptionError, TrainingError, public_errors
from logitless.graph.execution.session import Session
from logitless.models.adapters.peft import write_peft
from logitless.training import errors
from logitless.training.config import METHODS, SUPERVISED, TrainingConfig, changed, config_of
from logitless.training.parallel.processes import Processes
from logitless.training.reporting.trackers import Integration, RunInfo, Trackers, configuration
from logitless.training.run import FineTuning
from logitless.training.step import GradientHook
from logitless.training.trainer import Control, Event, Finished, Save, Step, Validated

log = logging.getLogger("logitless.trackers")
__all__ = ["Control", "Event", "Finished", "Save", "Step", "Trainer", "TrainingConfig", "Validated"]


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
    '2 iterations are done'"""

    def __init__(
        self,
        model: str | Path | None,
        data: str | Path | Iterable[Mapping[str, Any]],
        config: TrainingConfig | None = None,
        *,
        callbacks: Sequence[Callable[[Event], None]] | None = None,
        before_step: Callable[[Control], None] | None = None,
        on_gradients: GradientHook | None = None,
        device: str = "auto",
        threads: int = -1,
        **fields: Any,
    ) -> None:
        """Open the model (None: the demo) and prepare the data; nothing is trained yet.

        `config`: the hyperparameters; `fields`: some of them by name, which come first
        (docs/training.md lists them all: `Trainer(model, rows, lora_r=8, epochs=2)`). The methods
        "lora" and "full" are supervised learning of an adapter and of all weights. `callbacks` get
        each event: Step, Validated, Save, Finished. `before_step` may change the learning rate or
        cancel. `on_gradients` gets a step's gradients as arrays by parameter name, before the
        optimizer uses them, and returns those that it changed: for clipping, noise, or an
        all-reduce between processes. Rows of a file may name image files below its folder.
        `threads` is of each of the `workers`.

        ModelError, TrainingError and OptionError name the fault in one line."""
        if not isinstance(callbacks, Sequence | None) or not all(map(callable, callbacks or ())):
            raise OptionError(f"callbacks: expected a list of functions, got {callbacks!r:.60}")
        self._callbacks = tuple(callbacks or ())
        self.config = config = _config(config, fields)
        self._integrations = [Integration(kind, config.report_project) for kind in config.report_to]
        with public_errors():
            names = OPTIONS["device"].check(device).split(",")
            n_threads = max(0, OPTIONS["threads"].check(threads))
            if config.workers > 1 and n_threads == 0:
                n_threads = max(1, cores() // config.workers)
            self._session = Session(open_backends(names, n_threads))
            try:
                path = Path(demo_model() if model is None else model)
                hooks: Any = {"before_step": before_step, "on_gradients": on_gradients}
                self._run = FineTuning(self._session, path, data, config, **hooks)
            except BaseException:
                self._session.close()
                raise
            for line in self._run.warnings:
                logging.getLogger("logitless.training").warning("%s: %s", self._run.name, line)
            if config.workers > 1:
                try:
                    self._run.share(config.workers, partial(open_backends, names, n_threads), Processes)
                except BaseException:
                    self.close()
                    raise

    def fit(self) -> Finished:
        """Train to the end; the result has the reason why it ended."""

        trainer, config = self._run.trainer, self.config
        name = config.report_name or Path(self._run.gguf.path).stem
        run = RunInfo(Path(config.report_dir), "", name, configuration(trainer), trainer.counters.iterations)
        with public_errors(), Trackers(self._integrations, run, log.warning) as trackers:

            def call_back(event: Event) -> None:
                trackers(event)
                for callback in self._callbacks:
                    callback(event)

            return self._run.fit(call_back)

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
            self._run.trainer.check()
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


def _config(config: TrainingConfig | None, fields: Mapping[str, Any]) -> TrainingConfig:
    """The configuration with these fields. OptionError names the one that is wrong."""
    if config is not None and not isinstance(config, TrainingConfig):
        raise OptionError(f"config: expected a TrainingConfig, got {type(config).__name__}")
    values = {**({} if config is None else {name: getattr(config, name) for name in changed(config)}), **fields}
    method = values.get("method", SUPERVISED)
    if not isinstance(method, str) or method not in ("lora", "full", *METHODS):
        raise OptionError(f"method: {method!r} is not one of lora, full, {', '.join(METHODS)}")
    if method in ("lora", "full"):
        values |= {"method": SUPERVISED, "full": method == "full" or values.get("full", False)}
    try:
        return config_of(values)
    except errors.TrainingError as error:
        raise OptionError(str(error)) from None
