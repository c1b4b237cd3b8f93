"""Experiment trackers: TensorBoard's files, wandb and mlflow by fakes, and those that fail."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from logitless.training.reporting import trackers
from logitless.training.reporting.results import Result
from logitless.training.reporting.trackers import MLFLOW, TENSORBOARD, WANDB, Integration, RunInfo, Trackers
from logitless.training.trainer import Settled, Step, Validated


def step(n: int, loss: float) -> Step:
    return Step(n, 2, 0, n, 8, loss, 0.5, 2.0, 1e-3, 1.0, 64, Result(), {"mean_token_accuracy": 0.5})


def feed(integration: Integration, run: RunInfo) -> list[str]:
    """Lines that a run of two steps and a validation tells."""
    told: list[str] = []
    results = Trackers([integration], run, told.append)
    result = Result()
    result.add(2.5, 4, 1)
    for event in (step(1, 3.0), Settled(), step(2, float("nan")), Validated(2, 0, result)):
        results(event)
    results.finish(succeeded=True, seconds=30)
    return told


def test_tensorboard_reads_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    run = RunInfo(tmp_path, "job-1", config={"lora_r": 8})
    assert feed(Integration(TENSORBOARD), run) == []
    assert feed(Integration(TENSORBOARD), RunInfo(tmp_path, "job-1", first=1)) == []  # goes on
    results: list[list[tuple[int, str, float]]] = []
    purged = []
    for path in sorted((tmp_path / "tensorboard" / "job-1").iterdir()):
        raw, at, values = path.read_bytes(), 0, []
        while at < len(raw):
            (size,) = struct.unpack_from("<Q", raw, at)
            event = Event.FromString(raw[at + 12 : at + 12 + size])
            purged += [event.step] if event.session_log.status == event.session_log.START else []
            values += [(event.step, v.tag, v.simple_value) for v in event.summary.value if v.HasField("simple_value")]
            at += 16 + size
        results.append(values)
    assert [v for v in results[0] if v[1] in ("train_loss", "full_valid_loss")] == [
        (1, "train_loss", 3.0),
        (2, "full_valid_loss", 2.5),  # a loss that is no number is left out
    ]
    assert (len(results), purged) == (2, [2])  # what the first file has from step 2 on is left out
    assert {tag for _, tag, _ in results[0]} >= {"train_mean_token_accuracy", "gradient_norm", "learning_rate"}


class FakeWandb(ModuleType):
    """The part of wandb that is used."""

    def __init__(self, *, mode: str = "online", keyed: bool = True) -> None:
        super().__init__("wandb")
        self.logged: list[tuple[dict[str, float], int]] = []
        self.asked: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.Settings = dict
        self.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode))
        self.login = lambda prompt: keyed and not prompt

    def init(self, **asked: Any) -> Any:
        self.asked = asked
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.mark.parametrize(("mode", "keyed"), [("online", True), ("offline", False)])
def test_wandb_gets_a_run_and_its_steps(
    mode: str, keyed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb(mode=mode, keyed=keyed)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    integration = Integration(WANDB, "p", "", "team", ("a", "b"))
    assert feed(integration, RunInfo(tmp_path / "w", "job-1", "ft:m", {"lora_r": 8})) == []
    names = ("project", "name", "entity", "tags", "id", "resume", "config", "dir")
    assert [fake.asked[n] for n in names] == [
        *("p", "ft:m", "team", ("a", "b"), "job-1", "allow", {"lora_r": 8}, str(tmp_path / "w"))
    ]
    assert [(n, v.get("train_loss")) for v, n in fake.logged] == [(1, 3.0), (2, None), (2, None)]
    assert fake.exit_code == 0


def test_wandb_without_a_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb(keyed=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (line,) = feed(Integration(WANDB), RunInfo(tmp_path))
    assert line == ("wandb: the run goes on without it: there is no API key: set WANDB_API_KEY, or WANDB_MODE=offline")
    assert not fake.asked


class FakeClient:
    """MLflow's client with one experiment."""

    runs: dict[str, Any]

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        self.experiment = name
        return "7"

    def search_runs(self, ids: list[str], query: str, max_results: int) -> list[Any]:
        self.query = query
        return []

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.run = (experiment, run_name, tags)
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_param(self, run: str, name: str, value: str) -> None:
        self.param = (run, name, value)

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        self.batches.append({name: (value, at) for name, value, _, at in metrics})

    def set_terminated(self, run: str, status: str) -> None:
        self.status = (run, status)


def test_mlflow_gets_a_run_and_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    fake, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    fake.MlflowClient, entities.Metric = lambda: client, lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    integration = Integration(MLFLOW, "e", "n", tags=("a",))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (line,) = feed(integration, RunInfo(tmp_path, "job-1"))
    assert "set MLFLOW_TRACKING_URI" in line
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert feed(integration, RunInfo(tmp_path, "job-1", config={"lora_r": 8})) == []
    assert client.run == ("7", "n", {"logitless.run": "job-1", "logitless.tags": "a"})
    assert (client.experiment, client.param) == ("e", ("r", "lora_r", "8"))
    assert client.query == "tags.`logitless.run` = 'job-1'"
    assert [batch.get("train_loss") for batch in client.batches] == [(3.0, 1), None, None]
    assert client.status == ("r", "FINISHED")


@pytest.mark.parametrize("kind", trackers.KINDS)
def test_a_missing_package_is_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, trackers.EXTRAS[kind], None)
    (line,) = feed(Integration(kind), RunInfo(tmp_path))
    assert line == f"{kind}: is not there, and the run goes on without it: pip install 'logitless[{kind}]'"


def opens(monkeypatch: pytest.MonkeyPatch, open_one: Callable[..., Any]) -> None:
    monkeypatch.setitem(trackers._OPEN, WANDB, open_one)


def test_a_tracker_that_fails_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> Any:
        raise OSError("no route\nto host")

    opens(monkeypatch, unreachable)
    assert feed(Integration(WANDB), RunInfo(tmp_path)) == ["wandb: the run goes on without it: no route to host"]


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def hangs(*_: Any) -> Any:
        goes_on.wait(60)
        raise OSError("at last")

    opens(monkeypatch, hangs)
    monkeypatch.setattr(trackers, "LAST_SECONDS", 0.0)
    told: list[str] = []
    with Trackers([Integration(WANDB)], RunInfo(tmp_path), told.append) as results:
        results(step(1, 3.0))
    assert told == ["wandb: not all was sent within 0 seconds"]
    goes_on.set()
    results._threads[0].thread.join(60)
    assert told[1:] == ["wandb: the run goes on without it: at last"]
