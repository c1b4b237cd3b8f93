"""Fine-tuning worker, driven by hand: paused, left inside device runs, and beside requests."""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.errors import DeviceLost
from logitless.cli.commands.benchmark.bench import greedy
from logitless.engine.adapters import Adapters
from logitless.engine.batch import UBatch
from logitless.engine.engine_task import EngineTask
from logitless.engine.errors import InvalidRequest
from logitless.engine.finetuning.tuned_models import find, tuned_models
from logitless.engine.finetuning.worker import FineTuningWorker
from logitless.engine.records.store import Store
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.frontend.fine_tuning import JobModel, new_job
from logitless.graph.execution.session import Session
from logitless.models import tokenizer
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.training import checkpoint, save
from logitless.training.errors import TrainingError
from logitless.training.reporting import trackers
from logitless.training.reporting.trackers import Integration, RunInfo
from logitless.training.schedule import Stopping, rate_at

ROWS = b'{"prompt": "Once", "completion": " upon a time there was a cat."}\n' * 20
HYPERPARAMETERS = {"n_epochs": 1, "batch_size": 2, "context_length": 96, "learning_rate_multiplier": 5.0}


@pytest.fixture(scope="module")
def engine(shared_data: Path) -> Iterator[ModelRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitless.engine.runner.model_runner.open_backends", lambda *_: [CPUBackend(1)])
        engine = ModelRunner(
            shared_data / "models" / "stories260K.gguf", RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=16)
        )
    engine.load()
    yield engine
    engine.close()


class Job:
    """One, and the turns that it gets."""

    def __init__(self, folder: Path, engine: ModelRunner, *, full: bool) -> None:
        self.store, self.ready = Store(folder), threading.Event()
        vocabulary = tokenizer.from_metadata(engine.gguf.metadata)
        self.tuning = FineTuningWorker(
            self.store, engine, vocabulary, None, Adapters(engine.adapters, engine.weight_sets), "m"
        )
        self.tuning.wake = self.ready.set
        file = self.store.add_file(ROWS, "rows.jsonl", "fine-tune")
        body = {"model": "m", "training_file": file["id"], "hyperparameters": {**HYPERPARAMETERS, "full": full}}
        self.id = new_job(body, self.store, JobModel("m", {"m"}, 512))["id"]
        self.store.put("jobs", {**new_job(body, self.store, JobModel("m", {"m"}, 512)), "id": self.id})
        self.tuning.created()

    @property
    def row(self) -> dict[str, Any]:
        row = self.store.get("jobs", self.id)
        assert row is not None
        return row

    @property
    def status(self) -> str:
        return str(self.row["status"])

    def begin(self) -> None:
        while not self.tuning.stats.jobs_running:
            self.turn(0.0)

    def turn(self, seconds: float) -> None:
        if not self.tuning.ready:
            self.ready.clear()
            assert self.tuning.ready or self.ready.wait(600)  # kernels may have to be compiled
        self.tuning.run(seconds)

    def leave(self) -> None:
        """Take turns until it has given up the device."""
        while self.tuning._job is not None:
            self.turn(0.0)

    def finish(self, seconds: float, between: Callable[[int], None] = lambda turn: None) -> None:
        turns = 0
        while self.status != "succeeded":
            assert self.status != "failed"
            self.turn(seconds)
            turns += 1
            between(turns)

    def results(self) -> dict[str, bytes]:
        """The tensors that it has trained and those that it would go on with."""
        result = {}
        for path in (self.store.folder / "checkpoints").iterdir():
            with GGUFFile.open(path) as file:
                result |= {f"{'@' in path.name} {name}": bytes(file.bytes_of(name)) for name in file.tensors}
        return result


def test_a_turn_ends_before_a_part_that_would_not_fit(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part takes a second: of two and a half, the third would end too late, as one that is known to be long."""
    job = Job(tmp_path, engine, full=False)
    job.begin()
    seconds, part = itertools.count(), Mock(return_value=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(job.tuning, "_part", part)
        patch.setattr("logitless.engine.finetuning.worker.time.perf_counter", lambda: float(next(seconds)))
        job.tuning.run(2.5)
        assert part.call_count == 2
        part.side_effect = [0.5, 0.5, 2.0, 0.0]
        job.tuning.run(4.5)
        assert part.call_count == 2 + 3
        part.side_effect = itertools.repeat(0.5)
        job.tuning.run(100.0, waits=lambda: part.call_count == 9)  # a request comes within the fourth
    assert part.call_count == 5 + 4
    job.tuning.close()


def test_an_errand_that_ends_while_it_is_looked_at_is_attended_first(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, engine, full=False)
    job.begin()
    looks, part = itertools.chain([False], itertools.repeat(True)), Mock(return_value=None)
    with monkeypatch.context() as patch:
        patch.setattr(job.tuning, "_part", part)
        patch.setattr(EngineTask, "wants", property(lambda _: next(looks)))
        job.tuning._task = EngineTask(Mock(), Mock())
        job.tuning.run(0.0)
    part.assert_not_called()
    job.tuning._task = None
    job.tuning.close()


def test_slow_work_of_job_is_off_the_engine_thread(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plans are thought out and files read and written beside it. It reads the device, and makes a part at a time."""
    here, seen, compiled = threading.get_ident(), defaultdict(set), Mock(side_effect=CPUBackend.compile, autospec=True)

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen[name].add(threading.get_ident() == here)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    elsewhere = ("measure", "fsync", "read_checkpoint", "save_checkpoint", "save_result", "_finish")
    for owner, name in zip((Session, os, checkpoint, checkpoint, save, FineTuningWorker), elsewhere, strict=True):
        watch(owner, name)
    watch(Session, "read_bytes")
    monkeypatch.setattr(engine.session.backends[0], "compile", partial(compiled, engine.session.backends[0]))
    job = Job(tmp_path, engine, full=False)

    seen.clear()  # it has put its file away
    run, n_made = job.tuning.run, []

    def counted(seconds: float) -> None:
        compiled.reset_mock()
        run(seconds)
        n_made.append(compiled.call_count)

    monkeypatch.setattr(job.tuning, "run", counted)

    def between(turn: int) -> None:
        if turn == 200:
            assert job.tuning.set_status(job.id, ("running",), "paused")
            while job.tuning.stats.jobs_running:
                job.turn(0.0)
            assert job.tuning.set_status(job.id, ("paused",), "queued")

    job.finish(0.0, between)
    assert max(n_made) == 1
    assert not caplog.messages
    assert seen == {**{name: {False} for name in elsewhere}, "read_bytes": {True}}


def test_steps_that_were_not_kept_are_forgotten_at_once(engine: ModelRunner, tmp_path: Path) -> None:
    """Of a server that was killed: those after the checkpoint are done again, and nobody may read them twice."""
    job = Job(tmp_path, engine, full=False)
    job.begin()
    while job.tuning.stats.step < 2:
        job.turn(0.0)
    job.tuning.close()
    kept = checkpoint.steps_behind(job.tuning._checkpoint_path(job.id))
    store = Store(tmp_path)
    store.add_event(job.id, "told before the end", type="metrics", step=kept + 1, data={"step": kept + 1})
    again = FineTuningWorker(store, engine, Mock(), None, Adapters(engine.adapters, engine.weight_sets), "m")
    assert [e["data"]["step"] for _, e in store.events(job.id) if e["type"] == "metrics"] == list(range(1, kept + 1))
    again.close()


def test_a_full_disk_keeps_no_server_from_starting(engine: ModelRunner, tmp_path: Path) -> None:
    job = Job(tmp_path, engine, full=False)
    with mock.patch.object(job.store, "forget_events", side_effect=OSError(errno.ENOSPC, "No space left")) as forget:
        again = FineTuningWorker(job.store, engine, Mock(), None, Adapters(engine.adapters, engine.weight_sets), "m")
    forget.assert_called_once_with(job.id, 0)
    job.tuning.close()
    again.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TrainingError("rows.jsonl:3: no text"), "invalid_training_file"),
        (OSError(errno.EIO, "Input/output error"), "server_error"),  # a full disk is waited for
        (DeviceLost("vulkan:0: gone"), "server_error"),
        (ModelFileError("checkpoint.gguf", "is empty"), "server_error"),
    ],
)
def test_failed_job_has_error_code_of_its_cause(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    monkeypatch.setattr("logitless.training.adapters.lora.lora", Mock(side_effect=error))
    job = Job(tmp_path, engine, full=False)
    while job.status in ("queued", "running"):
        job.turn(0.0)
    row = job.store.get("jobs", job.id)
    assert row is not None
    assert (row["status"], row["error"]["code"], row["error"]["message"]) == ("failed", code, str(error))


def test_a_job_whose_end_cannot_be_kept_is_left_alone(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is broken: requests go on, the job is not tried again at once, and goes on when somebody says so."""
    job = Job(tmp_path, engine, full=False)
    broken = Mock(side_effect=OSError(errno.EIO, "disk I/O error"))
    with monkeypatch.context() as patch:
        for name in ("put", "change", "add_event"):
            patch.setattr(Store, name, broken)
        job.leave()
        job.tuning.created()
        assert not job.tuning.ready
        assert job.tuning.stats.jobs_running == 0
    assert job.tuning.set_status(job.id, ("queued",), "paused")
    assert job.tuning.set_status(job.id, ("paused",), "queued")
    job.begin()
    assert job.status == "running"
    job.tuning.close()


def test_a_store_that_cannot_be_read_ends_no_server(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, engine, full=False)
    job.begin()
    broken = Mock(side_effect=OSError(errno.EIO, "disk I/O error"))
    with monkeypatch.context() as patch:
        for name in ("_run", "change"):
            patch.setattr(Store, name, broken)
        job.leave()
        assert not job.tuning.ready
        assert job.tuning.stats.jobs_running == 0
    assert f"the failure of job {job.id} cannot be stored: [Errno {errno.EIO}] disk I/O error" in caplog.text
    assert "the jobs cannot be read" in caplog.text
    job.tuning.close()


@pytest.mark.parametrize("at", ["begin", "step", "failure"])
def test_a_job_waits_beside_requests_for_whoever_has_the_store(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Another process writes to it, for longer than anybody would wait: the engine's thread has nothing to do."""
    monkeypatch.setattr("logitless.engine.records.store.LOCK_TIMEOUT", -1.0)
    job = Job(tmp_path, engine, full=False)
    if at != "begin":
        job.begin()
    if at == "failure":
        monkeypatch.setattr(job.tuning, "_part", Mock(side_effect=DeviceLost("cpu: gone")))
    other = sqlite3.connect(tmp_path / "logitless.sqlite", isolation_level=None)
    other.execute("begin immediate")
    tried = threading.Event()
    monkeypatch.setattr("logitless.engine.records.store.time.sleep", lambda _: tried.set())
    while not tried.is_set():
        if job.tuning.ready:
            job.turn(0.0)
    assert job.tuning.pending
    with pytest.raises(OSError, match="database is locked"):
        job.tuning.set_status(job.id, ("running", "queued"), "cancelled")
    other.execute("rollback")
    other.close()
    if at == "failure":
        job.leave()
        assert job.status == "failed"
    else:
        job.finish(0.0)
        steps = [e["data"]["step"] for _, e in job.store.events(job.id) if e["type"] == "metrics"]
        assert steps == list(range(1, job.tuning.stats.n_steps + 1))
    job.tuning.close()


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "all weights"])
def test_a_job_that_is_left_at_every_part_ends_with_the_same_bytes(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Requests' steps run in between, and it is paused whatever it is doing. A batch is several device runs: what it
    goes on from must not be the middle of them."""
    monkeypatch.setitem(HYPERPARAMETERS, "batch_size", 8)
    whole = Job(tmp_path / "whole", engine, full=full)
    whole.finish(math.inf)
    job = Job(tmp_path / "parts", engine, full=full)
    batch = UBatch([5] * 3, [0, 1, 2], [0] * 3, [0, 1, 2], [2], [greedy()], [-1], tables={0: [0]})
    expected = engine.step(batch).ids.tolist()

    rest: list[bool] = []

    def between(turn: int) -> None:
        assert engine.step(batch).ids.tolist() == expected
        if turn == (90 if full else 260):
            assert job.tuning.set_status(job.id, ("running",), "paused")
            job.turn(0.0)
            rest.append(job.tuning.ready)  # it goes on, to the end of the step
            while job.tuning.ready:
                job.turn(0.0)
            assert job.tuning.set_status(job.id, ("paused",), "queued")

    job.finish(0.0, between)
    result = job.results()
    assert {"True blk.0.attn_q.weight" + ("" if full else ".lora_b"), "False optimizer.adam.first_moments"} < set(
        result
    )
    assert result == whole.results()
    assert any(rest)


@pytest.mark.parametrize("task", ["_finish", "_keep_failure"])
def test_a_job_that_is_over_does_not_go_on_while_the_server_ends(
    task: str, engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The task that keeps how it ended comes to its end meanwhile."""
    monkeypatch.setitem(HYPERPARAMETERS, "n_epochs", 2)
    job = Job(tmp_path, engine, full=False)
    tuning, real = job.tuning, getattr(job.tuning, task)
    begun, closing = threading.Event(), threading.Event()
    if task == "_keep_failure":
        tuning._publish = Mock(side_effect=OSError("no room"))  # type: ignore[method-assign]

    def late(*args: Any) -> None:
        begun.set()
        closing.wait(20)
        real(*args)

    setattr(tuning, task, late)
    job.begin()
    while not begun.is_set():
        job.turn(0.0)
    caplog.clear()
    part = tuning._part = Mock(side_effect=tuning._part)  # type: ignore[method-assign]
    path = tuning._checkpoint_path(job.id)
    there = path.exists()
    assert tuning._task is not None
    finish = tuning._task.finish
    monkeypatch.setattr(tuning._task, "finish", lambda seconds: closing.set() or finish(seconds))
    tuning.close()
    assert closing.is_set()
    assert (part.call_count, path.exists(), caplog.messages) == (0, there, [])
    assert Store(tmp_path).get("jobs", job.id)["status"] == ("failed" if task == "_keep_failure" else "succeeded")  # type: ignore[index]


def finished(job: Job, **fields: Any) -> str:
    """Another job of the same server, run to its end; its id."""
    training_file = job.store.get("jobs", job.id)["training_file"]  # type: ignore[index]
    body = {"model": "m", "training_file": training_file, **fields}
    row = new_job(body, job.store, JobModel("m", {"m"}, 512))
    job.store.put("jobs", row)
    job.id = row["id"]
    job.tuning.created()
    job.finish(math.inf)
    job.leave()
    return job.id


@pytest.mark.parametrize("lora", [{"lora_dora": True}, {"lora_init": "pissa"}], ids=["DoRA", "PiSSA"])
def test_a_job_leaves_no_variable_of_its_adapter(engine: ModelRunner, tmp_path: Path, lora: dict[str, Any]) -> None:
    """A pause frees them, or the job could not begin again."""
    job = Job(tmp_path, engine, full=False)
    job.finish(math.inf)
    job.leave()
    before = {*engine.session._variables}
    body = {"model": "m", "training_file": job.row["training_file"], "hyperparameters": {**HYPERPARAMETERS, **lora}}
    row = new_job(body, job.store, JobModel("m", {"m"}, 512))
    job.store.put("jobs", row)
    job.id = row["id"]
    job.tuning.created()
    job.begin()
    assert job.tuning.set_status(job.id, ("running",), "paused")
    job.leave()
    assert {*engine.session._variables} <= before
    assert job.tuning.set_status(job.id, ("paused",), "queued")
    job.finish(math.inf)
    job.tuning.close()


def test_a_job_goes_on_without_a_tracker_that_fails(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Recorder:
        def __init__(self, of: Integration, run: RunInfo) -> None:
            seen.append((of.kind, run.id, run.config["n_epochs"], run.folder))

        def log(self, step: int, values: Mapping[str, float]) -> None:
            if "full_valid_loss" in values:
                raise OSError("unreachable")
            seen.append((step, values["train_loss"]))

    monkeypatch.setitem(trackers._OPEN, "tensorboard", Recorder)
    job = Job(tmp_path, engine, full=False)
    job.finish(math.inf)
    job.leave()
    hyperparameters = {**HYPERPARAMETERS, "validation_split": 0.1, "lora": {"init": "pissa", "r": 2}}
    finished(job, integrations=[{"type": "tensorboard"}], hyperparameters=hyperparameters)
    for thread in threading.enumerate():
        if thread.name.startswith("tracker"):
            thread.join(60)
    assert seen[0] == ("tensorboard", job.id, 1, tmp_path / "trackers")
    events = [event for _, event in job.store.events(job.id)]
    losses = [(e["data"]["step"], e["data"]["train_loss"]) for e in events if "train_loss" in e["data"]]
    assert seen[1:] == losses
    assert [e["message"] for e in events if "tensorboard" in e["message"] and e["level"] == "warn"] == [
        "tensorboard: the run goes on without it: unreachable"
    ]
    job.tuning.close()


def test_one_process_of_several_runs_the_jobs_and_all_get_their_models(engine: ModelRunner, tmp_path: Path) -> None:
    first = Store(tmp_path)  # a worker of another process holds the lock
    script = "import sys; from logitless.engine.records.store import Store; turn = Store(sys.argv[1]).turn('m'); "
    script += "print(turn.take(), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        job = Job(tmp_path, engine, full=False)
        job.tuning.follow()
        assert (job.tuning._job, job.status) == (None, "queued")
        other.stdin.close()
    job.tuning.follow()
    job.finish(math.inf)
    job.leave()
    name = job.row["fine_tuned_model"]
    adapters = Adapters(engine.adapters, engine.weight_sets)
    adapters.add("other.gguf", lambda: Mock(), name="style", scale=1.0)
    follower = FineTuningWorker(first, engine, Mock(), None, adapters, "m")
    assert adapters.find(name) is not None
    finished(job, hyperparameters=HYPERPARAMETERS)
    assert adapters.find(job.row["fine_tuned_model"]) is None
    follower.follow()
    assert adapters.find(job.row["fine_tuned_model"]) is not None
    job.tuning.delete_model(find(job.store, name))  # type: ignore[arg-type]
    follower.follow()
    assert adapters.find(name) is None
    assert adapters.find("style") is not None
    job.tuning.close()
    follower.close()


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "all weights"])
def test_a_job_starts_from_a_fine_tuned_model(engine: ModelRunner, tmp_path: Path, full: bool) -> None:
    """Its first loss is the one that the other ended with, and not the base model's."""
    job = Job(tmp_path, engine, full=full)
    job.finish(math.inf)
    job.leave()
    first = job.id
    name = job.store.get("jobs", first)["model_name"]  # type: ignore[index]
    finished(job, model=name, hyperparameters=HYPERPARAMETERS)
    row = job.store.get("jobs", job.id)
    assert row is not None
    assert (row["model"], row["base"], row["hyperparameters"]["full"]) == (name, "m", full)
    losses = [
        [e["data"]["train_loss"] for _, e in job.store.events(id) if "train_loss" in e["data"]]
        for id in (first, job.id)
    ]
    assert losses[1][0] < losses[0][-1] + 0.2 < losses[0][0]
    assert job.tuning.adapters.find(row["model_name"]) is not None
    changed: list[dict[str, Any]] = [{"full": not full}] if full else [{"lora_r": 5}, {"lora": {"rslora": True}}]
    for refused in changed:
        with pytest.raises(InvalidRequest, match="hyperparameters"):
            finished(job, model=name, hyperparameters=refused)
    with pytest.raises(InvalidRequest, match="field 'model'"):
        finished(job, model="ft:m:none:1")
    job.tuning.delete_model(find(job.store, name))  # type: ignore[arg-type]
    again = {"model": row["model_name"], "hyperparameters": HYPERPARAMETERS}
    finished(job, **again)  # which holds all that it needs
    job.tuning.close()


def test_a_deleted_model_is_gone_with_its_files_and_names(engine: ModelRunner, tmp_path: Path) -> None:
    job = Job(tmp_path, engine, full=False)
    job.begin()
    while not list(tuned_models(job.store)):
        job.turn(math.inf)
    running = next(tuned_models(job.store))
    if job.status == "running":
        with pytest.raises(InvalidRequest, match="cancel it first"):
            job.tuning.delete_model(running)
    job.finish(math.inf)
    job.leave()
    kept = job.id
    finished(job, hyperparameters={**HYPERPARAMETERS, "n_epochs": 2})
    models = [model for model in tuned_models(job.store) if model.job["id"] == job.id]
    first, last, whole = models
    assert [model.is_checkpoint for model in models] == [True, True, False]
    with pytest.raises(InvalidRequest, match=r"is the model .* itself"):
        job.tuning.delete_model(last)
    job.tuning.delete_model(first)
    assert not Path(first.path).exists()
    assert [m.name for m in tuned_models(job.store) if m.job["id"] == job.id] == [last.name, whole.name]
    id = job.tuning.adapters.find(whole.name)
    assert id is not None
    job.tuning.delete_model(whole)
    assert {path.name.partition("@")[0].removesuffix(".gguf") for path in (tmp_path / "checkpoints").iterdir()} == {
        kept
    }
    assert job.tuning.adapters.find(whole.name) is job.tuning.adapters.find(last.name) is None
    with pytest.raises(InvalidRequest, match="there is no adapter"):
        job.tuning.adapters.resolve(((id, 1.0),))
    adapters = Adapters(engine.adapters, engine.weight_sets)
    again = FineTuningWorker(job.store, engine, Mock(), None, adapters, "m")
    assert sorted(entry.name for entry in adapters.entries) == sorted(
        model.name for model in tuned_models(job.store) if model.job["id"] == kept
    )
    assert [entry.listed for entry in adapters.entries] == ["@" not in entry.name for entry in adapters.entries]
    again.close()


def test_a_job_stops_early_with_its_best_model(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation losses by epoch; a restart after the last one changes nothing."""
    losses = iter([3.0, 2.0, 2.5, 2.25, 1.0, 1.0])
    validated = Stopping.validated
    monkeypatch.setattr(Stopping, "validated", lambda self, _, step: validated(self, next(losses), step))
    job = Job(tmp_path, engine, full=False)
    job.tuning.set_status(job.id, ("queued", "running"), "cancelled")
    job.leave()
    asked = {**HYPERPARAMETERS, "batch_size": 4, "n_epochs": 6, "validation_split": 0.2, "early_stopping_patience": 2}
    finished(job, hyperparameters=asked)
    row = job.store.get("jobs", job.id)
    assert row is not None
    told = [event["message"] for _, event in job.store.events(job.id)]
    assert "The job ends early: no lower validation loss than that of step 8 in 2 validations" in told
    assert [r["step_number"] for r in job.store.checkpoints(job.id)] == [16, 12, 8, 4]
    model = find(job.store, row["model_name"])
    assert model is not None
    assert model.path == job.store.checkpoints(job.id)[2]["path"]
    id = job.tuning.adapters.find(row["model_name"])
    assert id is not None
    assert job.tuning.adapters.entries[id].path == model.path
    assert next(losses) == 1.0
    job.tuning.close()


@pytest.mark.parametrize(("n", "last", "full"), [(9, 0, False), (19, 10, False), (12, 10, True)])
def test_a_job_that_diverges_keeps_and_names_its_last_good_checkpoint(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, last: int, full: bool
) -> None:
    """Step n (from 0) of two epochs of ten has a rate without bound: at an epoch's end it would be published."""
    rate = "logitless.training.trainer.rate_at"
    monkeypatch.setattr(rate, lambda c, i, *more: math.inf if i == n else rate_at(c, i, *more))
    job = Job(tmp_path, engine, full=full)
    job.tuning.set_status(job.id, ("queued", "running"), "cancelled")
    job.leave()
    body = {"model": "m", "training_file": job.row["training_file"]}
    row = new_job(
        {**body, "hyperparameters": {**HYPERPARAMETERS, "n_epochs": 2, "full": full}},
        job.store,
        JobModel("m", {"m"}, 512),
    )
    job.store.put("jobs", row)
    job.id = row["id"]
    job.tuning.created()
    job.leave()
    name = f"{row['model_name']}@{last}"
    error = job.row["error"]
    assert (job.status, error["code"]) == ("failed", "training_diverged")
    assert re.match(r"the run diverged at step \d+: loss .*, gradient norm ", error["message"])
    assert error["message"].endswith(f"; the last checkpoint is {name}" if last else "; there is no checkpoint")
    assert [row["step_number"] for row in job.store.checkpoints(job.id)] == ([last] if last else [])
    told = [event["message"] for _, event in job.store.events(job.id)]
    first = next(text for text in told if text.startswith("Step 1/20"))
    assert re.fullmatch(r"Step 1/20: training loss=\d\.\d{4}, gradient norm=[\d.]+", first)
    for values in job.results().values():
        assert np.isfinite(np.frombuffer(values, np.float32)).all()
    names = {entry.name for entry in job.tuning.adapters.entries if not entry.removed}
    assert names == ({name, row["model_name"]} if last else set())
    job.tuning.close()


def test_a_job_on_a_full_disk_waits_for_room_and_goes_on(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By itself, to the same bytes as one that never waited; requests are served meanwhile."""
    whole = Job(tmp_path / "whole", engine, full=False)
    whole.finish(math.inf)
    monkeypatch.setattr("logitless.engine.engine_task.RETRY", 0.0)
    job = Job(tmp_path / "waiting", engine, full=False)
    for module, name, error in (
        (save, "save_result", errno.ENOSPC),
        (checkpoint, "save_checkpoint", errno.EDQUOT),
    ):
        write = getattr(module, name)
        outcomes = itertools.chain([OSError(error, "No room")] * 3, itertools.repeat(None))

        def full(*args: Any, write: Any = write, outcomes: Any = outcomes) -> None:
            if problem := next(outcomes):
                raise problem
            write(*args)

        monkeypatch.setattr(module, name, full)
    job.finish(math.inf)
    assert job.results() == whole.results()
    assert caplog.text.count("training waits, because the disk is full") == 1
    n_events, n_whole = len(job.store.events(job.id)), len(whole.store.events(whole.id))
    assert n_events == n_whole  # none is told twice


def test_a_job_that_waits_for_a_full_disk_can_be_paused(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logitless.engine.engine_task.RETRY", 0.0)
    job = Job(tmp_path, engine, full=False)

    def full(*_: object) -> None:
        job.tuning.set_status(job.id, ("running",), "paused")
        raise OSError(errno.ENOSPC, "No room")

    with monkeypatch.context() as patch:
        patch.setattr("logitless.training.save.save_result", full)
        job.leave()
    assert (job.status, job.row["error"]) == ("paused", None)
    assert job.tuning.set_status(job.id, ("paused",), "queued")
    job.finish(math.inf)
    job.tuning.close()


def test_the_end_of_a_job_is_estimated_while_it_runs(
    engine: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps, each a hundred seconds long."""
    job = Job(tmp_path, engine, full=False)
    job.begin()
    assert job.row["estimated_finish"] is None
    clock = Mock(wraps=time)
    began = float(round(job.tuning._began_at))  # differences of whole numbers are exact
    monkeypatch.setattr(job.tuning, "_began_at", began)
    clock.monotonic = lambda: began + 100.0 * job.tuning.stats.step
    clock.time = lambda: 5000.0
    monkeypatch.setattr("logitless.engine.finetuning.worker.time", clock)
    told = []

    def note(_: int) -> None:
        if job.row["estimated_finish"] not in (None, *told[-1:]):
            told.append(job.row["estimated_finish"])

    job.finish(0.0, note)
    assert told == [5000 + 100 * rest for rest in range(9, 0, -1)]
    assert job.row["estimated_finish"] is None
