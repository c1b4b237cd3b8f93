"""Experiment trackers: a run's metrics to Weights & Biases, MLflow, or TensorBoard's event files.

Each tracker has a thread of its own, which its package, its network and its disk may hold up; a run
goes on without one that fails. Addresses and keys are those of the process's environment, as the
packages read them (WANDB_MODE, WANDB_API_KEY, WANDB_BASE_URL; MLFLOW_TRACKING_URI)."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import asdict

from logitless.training.config import unused

if TYPE_CHECKING:
    from logitless.training.trainer import Event, Trainer

WANDB, MLFLOW, TENSORBOARD = "wandb", "mlflow", "tensorboard"
KINDS = (WANDB, MLFLOW, TENSORBOARD)
EXTRAS = {WANDB: "wandb", MLFLOW: "mlflow", TENSORBOARD: "tensorboardX"}  # extra → package that it imports
INIT_SECONDS = 60.0  # that wandb waits for its server
LAST_SECONDS = 90.0  # that a run of the command line waits for what is not sent yet
Values = Mapping[str, float]


@dataclass(frozen=True)
class Integration:
    """A tracker of a run. `project`: of mlflow the experiment; `name`: of the run there."""

    kind: str  # one of KINDS
    project: str = "logitless"
    name: str = ""
    entity: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunInfo:
    """A run, to its trackers. `id`: by which a resumed run is found again; "": none is. `folder`:
    of files, a subfolder for each tracker. `first`: optimizer steps that are done."""

    folder: Path
    id: str = ""
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0


class Tracker(Protocol):
    def log(self, step: int, values: Values) -> None: ...
    def finish(self, *, succeeded: bool) -> None: ...


def measured(event: Event) -> tuple[int, dict[str, float]] | None:
    """Optimizer step and metrics of an event, by the names of a job's events; None: it has none."""
    from logitless.training.trainer import Step, Validated

    if isinstance(event, Step):
        own = {f"train_{name}": value for name, value in event.metrics.items()}
        more = {"gradient_norm": event.norm, "learning_rate": event.rate}
        return event.iteration, {"train_loss": event.loss, **own, **more}
    if isinstance(event, Validated):
        own = {f"full_valid_{name}": value for name, value in event.result.metrics.items()}
        return event.iteration, {"full_valid_loss": event.result.loss, **own}
    return None


def configuration(trainer: Trainer) -> dict[str, Any]:
    """Hyperparameters of a run that have an effect, by name."""
    trainable = trainer.trainable
    adapter = dict(trainable.lora.changes()) if trainable.lora is not None else {}
    about = {"method": trainer.method, "kind": trainable.kind, "n_params": trainable.n_params, **adapter}
    values = asdict(trainer.settings)
    idle = {name for name, _ in unused(values, values)}
    return {name: value for name, value in values.items() if name not in idle} | about


class _Wandb:
    def __init__(self, of: Integration, run: RunInfo) -> None:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key: set WANDB_API_KEY, or WANDB_MODE=offline")
        run.folder.mkdir(parents=True, exist_ok=True)
        private = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats", "x_disable_machine_info")
        quiet = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=INIT_SECONDS,
            x_save_requirements=False,
            **dict.fromkeys(private, True),
        )
        self._run = wandb.init(
            project=of.project,
            name=of.name or run.name or None,
            entity=of.entity or None,
            tags=of.tags,
            config=dict(run.config),
            dir=str(run.folder),
            id=run.id or None,
            resume="allow" if run.id else None,
            reinit="create_new",
            settings=quiet,
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class _Mlflow:
    def __init__(self, of: Integration, run: RunInfo) -> None:
        from mlflow import MlflowClient

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise RuntimeError("set MLFLOW_TRACKING_URI to the address of its server")
        self._client = MlflowClient()
        measures = self._client.get_experiment_by_name(of.project)
        experiment = measures.experiment_id if measures is not None else self._client.create_experiment(of.project)
        mine = f"tags.`logitless.run` = '{run.id}'"
        known = self._client.search_runs([experiment], mine, max_results=1) if run.id else []
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"logitless.run": run.id, "logitless.tags": ",".join(of.tags)}
        self._id = self._client.create_run(
            experiment, run_name=of.name or run.name or None, tags={k: v for k, v in tags.items() if v}
        ).info.run_id
        for name, value in run.config.items():
            self._client.log_param(self._id, name, str(value)[:500])

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, *, succeeded: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")


class _TensorBoard:
    def __init__(self, of: Integration, run: RunInfo) -> None:
        from tensorboardX import SummaryWriter

        folder = run.folder / TENSORBOARD / (run.id or of.name or run.name)
        goes_on = {"purge_step": run.first + 1, "filename_suffix": f".{run.first}"} if run.first else {}
        self._writer = SummaryWriter(str(folder), **goes_on)
        if run.config and not run.first:
            rows = "\n".join(f"| {name} | {value} |" for name, value in run.config.items())
            self._writer.add_text("config", f"| name | value |\n|---|---|\n{rows}", 0)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, *, succeeded: bool) -> None:
        self._writer.close()


_OPEN: dict[str, Callable[[Integration, RunInfo], Tracker]] = {
    WANDB: _Wandb,
    MLFLOW: _Mlflow,
    TENSORBOARD: _TensorBoard,
}


class _Thread:
    """Thread of one tracker: opens it, and gives it what comes."""

    def __init__(self, of: Integration, run: RunInfo, warn: Callable[[str], None]) -> None:
        self.kind = of.kind
        self._of, self._run, self._warn = of, run, warn
        self.queue: SimpleQueue[tuple[int, Values] | bool] = SimpleQueue()  # at last whether the run succeeded
        self.thread = threading.Thread(target=self._work, name=f"tracker {of.kind}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            tracker = _OPEN[self.kind](self._of, self._run)
            while not isinstance(item := self.queue.get(), bool):
                step, values = item
                tracker.log(step, {name: value for name, value in values.items() if math.isfinite(value)})
            tracker.finish(succeeded=item)
        except ImportError as error:
            package = EXTRAS[self.kind]
            missing = (error.name or "").partition(".")[0] == package
            reason = f"pip install 'logitless[{self.kind}]'" if missing else _line(error)
            self._warn(f"{self.kind}: is not there, and the run goes on without it: {reason}")
        except Exception as error:  # of a package that is not ours
            self._warn(f"{self.kind}: the run goes on without it: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class Trackers:
    """The trackers of a run; called with its events. `warn`: gets a line about one that fails, on that one's thread."""

    def __init__(self, integrations: Sequence[Integration], run: RunInfo, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._threads = [_Thread(of, run, warn) for of in integrations]

    def __call__(self, event: Event) -> None:
        measures = measured(event)
        if measures is not None:
            for thread in self._threads:
                thread.queue.put(measures)

    def finish(self, *, succeeded: bool, seconds: float = 0.0) -> None:
        """End of the run; waits so long at most until all is sent."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.queue.put(succeeded)
        for thread in self._threads:
            thread.thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(succeeded=error is None, seconds=LAST_SECONDS if error is None else 2.0)
        for thread in self._threads:
            if thread.thread.is_alive() and error is None:
                self._warn(f"{thread.kind}: not all was sent within {LAST_SECONDS:g} seconds")
