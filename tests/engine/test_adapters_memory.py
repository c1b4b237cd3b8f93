"""Adapter stack on a device without memory for a larger one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logitless.engine.adapters import Adapters
from logitless.engine.errors import ServerFault
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from tests.models.adapters.test_lora import log_probs, random_adapter


def test_running_sequence_goes_on_when_device_is_full(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ModelRunner(
        shared_data / "models" / "arch-llama-gqa-F32.gguf", RunnerOptions(n_ctx=64, n_slots=2, n_ubatch=64)
    )
    engine.load()
    adapters = Adapters(engine.adapters, engine.weight_sets)
    for i in range(2):
        adapters.add(f"{i}.gguf", partial(random_adapter, engine.gguf, i, 12))
    runs = adapters.resolve(((0, 1.0),))
    adapters.in_use = lambda: [runs]
    before = log_probs(engine, [runs.mix])
    most = max(t.nbytes for pair in engine.adapters.pairs.values() for t in pair)
    backend = engine.session.backends[0]
    real = backend.alloc

    def alloc(nbytes: int, **more: Any) -> Any:
        if nbytes > most:
            raise MemoryError("no room")
        return real(nbytes, **more)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "alloc", alloc)
        with pytest.raises(ServerFault, match="no room"):
            adapters.resolve(((1, 1.0),))
        assert log_probs(engine, [runs.mix]) == before
        assert adapters.resolve(((0, 1.0),)) == runs
    other = adapters.resolve(((1, 1.0),))
    assert log_probs(engine, [runs.mix, other.mix])[0] == before[0]
    engine.close()
