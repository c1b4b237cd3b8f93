"""Data-parallel training: any number of processes ends with the bytes of one, also where some end."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.registry import open_backends
from logitless.graph.execution.session import Session
from logitless.training.config import TrainingConfig
from logitless.training.errors import TrainingError
from logitless.training.parallel.coordinator import Transport, WorkerLost
from logitless.training.parallel.processes import Processes
from logitless.training.parallel.worker import GradientWorker, Recipe
from logitless.training.run import FineTuning
from logitless.training.trainer import Control

ROWS = [{"prompt": f"{i} plus {i} is ", "completion": f"{2 * i}."} for i in range(24)]
LORA: dict[str, Any] = {"lora_r": 2}
FULL: dict[str, Any] = {"full": True}
N_STEPS, N_BATCHES = 4, 5
Weights = dict[str, Any]
Lines = Callable[[Control], None]


class Arrays:
    """A store in this process. Nothing may be taken twice, or read when it is gone."""

    def __init__(self) -> None:
        self.values: dict[object, np.ndarray] = {}

    def put(self, values: np.ndarray) -> object:
        ref = object()
        self.values[ref] = np.array(values)
        return ref

    def get(self, ref: object) -> np.ndarray:
        return self.values[ref]

    def take(self, ref: object) -> np.ndarray:
        return self.values.pop(ref)

    def clear(self) -> None:
        pass  # others' vectors are here as well


class Here(Transport):
    """Workers in this process, which work when their answer is waited for. `ends` has the number of
    each message, counted over all ranks, whose worker is lost before it answers."""

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self.store = Arrays()
        self._ends, self._n, self._stack = set(ends), 0, ExitStack()
        self._workers: dict[int, GradientWorker] = {}
        self._asked: dict[int, deque[tuple[str, Any]]] = {}

    def start(self, rank: int, recipe: Recipe, n_shards: int) -> None:
        steps = self._stack.enter_context(recipe.steps())
        self._workers[rank] = GradientWorker(steps, self.store, rank, n_shards)
        self._asked[rank] = deque()

    def send(self, rank: int, method: str, *args: Any) -> None:
        self._asked[rank].append((method, args))

    def receive(self, rank: int) -> Any:
        self._n += 1
        method, args = self._asked[rank].popleft()
        if self._n in self._ends:
            self._workers.pop(rank, None)
        if rank not in self._workers:
            raise WorkerLost(f"worker {rank} has ended")
        return getattr(self._workers[rank], method)(*args)

    def close(self) -> None:
        self._stack.close()


def trained(
    model: Path,
    folder: Path,
    weights: Weights,
    *,
    n: int = 1,
    transport: Callable[[], Transport] | None = None,
    n_steps: int = N_STEPS,
    before_step: Lines | None = None,
    resume: bool = False,
) -> bytes:
    """The files of a run: its result and its checkpoint."""
    backends = partial(open_backends, ["cpu"], 1)
    config = TrainingConfig(
        ctx_size=16, batch_size=2, grad_acc=N_BATCHES, iterations=n_steps, val_split=0.1, neftune_noise_alpha=5.0,
        warmup=100, **weights,
    )  # fmt: skip
    session = Session(backends())
    try:
        with FineTuning(session, model, ROWS, config, before_step=before_step) as run:
            if resume:
                assert run.resume(folder / "c.gguf")
            if transport is not None:
                run.share(n, backends, transport)
            run.fit()
            run.save(folder / "result.gguf")
            run.save_checkpoint(folder / "c.gguf")
    finally:
        session.close()
    return (folder / "result.gguf").read_bytes() + (folder / "c.gguf").read_bytes()


@pytest.fixture(scope="module", params=[LORA, FULL], ids=["lora", "full"])
def alone(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    """A method, and the files of one process."""
    return request.param, trained(model, tmp_path_factory.mktemp("alone"), request.param)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_any_number_of_workers_ends_with_the_bytes_of_one(
    alone: tuple[Weights, bytes], model: Path, tmp_path: Path, n: int
) -> None:
    method, expected = alone
    transport = Here()
    assert trained(model, tmp_path, method, n=n, transport=lambda: transport) == expected
    assert len(transport.store.values) == N_STEPS, "only parameters are left, which other processes clear"


@pytest.mark.parametrize(
    "method",
    [{"lora_r": 2, "lora_dora": True}, {"lora_r": 2, "lora_init": "pissa"}, {"lora_r": 32}],
    ids=["dora", "pissa", "wide"],
)
def test_all_kinds_of_adapters_have_the_bytes_of_one_process(model: Path, tmp_path: Path, method: Weights) -> None:
    expected = trained(model, tmp_path, method, n_steps=1)
    assert trained(model, tmp_path, method, n=2, transport=Here, n_steps=1) == expected


@pytest.mark.parametrize("ends", [(1,), (2,), (7,), (11, 12, 13), (20, 31)])
def test_a_step_that_loses_workers_is_computed_again(
    alone: tuple[Weights, bytes], model: Path, tmp_path: Path, ends: tuple[int, ...]
) -> None:
    method, expected = alone
    assert trained(model, tmp_path, method, n=3, transport=lambda: Here(ends)) == expected


def test_workers_that_end_again_and_again_end_the_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="worker 1 has ended, 4 times before a step was done"):
        trained(model, tmp_path, LORA, n=2, transport=lambda: Here(range(1, 1000)))


def test_more_workers_than_micro_batches_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="workers 6: each needs a device run of its own"):
        trained(model, tmp_path, LORA, n=6, transport=Here)


def test_processes_may_be_killed_and_a_run_goes_on_with_another_number(
    alone: tuple[Weights, bytes], model: Path, tmp_path: Path
) -> None:
    method, expected = alone
    transports: list[Processes] = []

    def processes() -> Processes:
        transports.append(Processes())
        return transports[-1]

    def kill(control: Control) -> None:
        if control.iteration == 1:
            os.kill(transports[-1].pids[2], signal.SIGKILL)

    trained(model, tmp_path, method, n=3, transport=processes, n_steps=2, before_step=kill)
    assert trained(model, tmp_path, method, n=2, transport=processes, resume=True) == expected
    assert not any(transport.folder.exists() for transport in transports)


def test_a_worker_that_cannot_open_the_model_says_why(model: Path, tmp_path: Path) -> None:
    def moved() -> Processes:
        model.rename(tmp_path / "moved.gguf")
        return Processes()

    try:
        with pytest.raises(TrainingError, match=r"worker 1: .*m\.gguf"):
            trained(model, tmp_path, LORA, n=2, transport=moved)
    finally:
        (tmp_path / "moved.gguf").rename(model)
