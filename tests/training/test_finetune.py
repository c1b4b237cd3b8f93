"""Headless fine-tuning: without a server or flags."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.models.adapters.lora import read_adapter
from logitless.models.gguf.file import GGUFFile
from logitless.training.config import TrainingConfig
from logitless.training.errors import TrainingError
from logitless.training.run import FineTuning
from logitless.training.trainer import Step, Validated

ROWS = [{"prompt": f"{i} plus {i} is ", "completion": f"{2 * i}."} for i in range(24)]
CONFIG = TrainingConfig(ctx_size=32, batch_size=4, iterations=4, lora_r=2)


def test_rows_become_an_adapter(session: Session, model: Path, tmp_path: Path) -> None:
    steps: list[Step] = []
    validated: list[Validated] = []
    gradients: list[dict[str, np.ndarray]] = []
    kinds = {Step: steps, Validated: validated}
    with FineTuning(
        session, model, ROWS, replace(CONFIG, val_split=0.25, seed=1), on_gradients=gradients.append
    ) as run:
        finished = run.fit(lambda event: kinds.get(type(event), []).append(event))  # type: ignore[attr-defined]
        run.save(tmp_path / "adapter.gguf")
    assert finished.reason == "4 iterations are done"
    assert len(steps) == len(gradients) == 4
    assert validated
    with GGUFFile.open(model) as gguf:
        pairs = read_adapter(tmp_path / "adapter.gguf", gguf, run.hparams).pairs
    assert {f"{name}.lora_{half}" for name in pairs for half in "ab"} == set(gradients[0])


def test_a_file_of_rows_is_the_rows(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    losses: list[list[float]] = []
    for data in (ROWS, path, str(path)):
        session = Session([CPUBackend(1)])
        losses.append([])
        with FineTuning(session, model, data, replace(CONFIG, full=True, lora_r=4)) as run:
            run.fit(lambda event: losses[-1].append(event.loss) if isinstance(event, Step) else None)
        session.close()
    assert losses[0] == losses[1] == losses[2]


def test_a_resumed_run_goes_on_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    results = []
    for stop in (None, 2):
        session = Session([CPUBackend(1)])
        with FineTuning(session, model, ROWS, replace(CONFIG, iterations=stop or 4)) as run:
            run.fit()
            run.save_checkpoint(tmp_path / "c.gguf")
            run.save(tmp_path / "a.gguf")
        session.close()
        results.append((tmp_path / "a.gguf").read_bytes())
    session = Session([CPUBackend(1)])
    with FineTuning(session, model, ROWS, CONFIG) as run:
        assert run.resume(tmp_path / "c.gguf")
        run.fit()
        run.save(tmp_path / "a.gguf")
    session.close()
    assert (tmp_path / "a.gguf").read_bytes() == results[0] != results[1]


def test_a_context_beyond_the_models_is_refused(session: Session, model: Path) -> None:
    with pytest.raises(TrainingError, match="ctx_size 128: is more than the model's 64"):
        FineTuning(session, model, ROWS, replace(CONFIG, ctx_size=128))


def test_a_row_at_fault_is_named(session: Session, model: Path) -> None:
    with pytest.raises(TrainingError, match=r"rows: line 2: is a prompt \('prompt'\), and line 1 is"):
        FineTuning(session, model, [ROWS[0], {"prompt": "a"}], CONFIG)
