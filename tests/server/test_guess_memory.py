"""What a block that guesses takes: it is counted where layers are placed, and loaded with the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import server.engine
from models.model import hparams_of
from server.engine import Engine, EngineOptions
from tests.models.nextn_specs import NEXTN
from tests.models.test_block_file import three_files
from tests.models.test_nextn import changed

OPTIONS = EngineOptions(256, n_slots=2, n_ubatch=64, threads=1, n_guesses=2)


def test_all_of_it_is_loaded_and_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, _, _ = three_files(tmp_path, NEXTN["glm4moe 355B"])
    asked: list[Any] = []
    monkeypatch.setattr(server.engine, "fit", lambda sizes, backends: asked.append(sizes) or True)
    engine = Engine(both, OPTIONS)
    assert engine._fits(None)
    engine.load()
    own = f"blk.{engine.hparams.n_layer}."
    held = {name: state for name, state in engine.session._states.items() if name.startswith(own)}
    assert len(held) > 20
    assert [name for name, state in held.items() if not state.buffers] == []
    planned, _ = engine.rehearse()
    assert asked[-1][0].weights == planned[0].weights
    assert asked[-1][0].states == planned[0].states
    engine.close()


def test_finetunes_made_before_the_block_came_are_served(tmp_path: Path) -> None:
    """Of a model whose block has a file of its own."""
    s = replace(NEXTN["glm4moe"], n_layer=2)
    both, layers, block = three_files(tmp_path, s)
    engine = Engine(layers, replace(OPTIONS, block=str(block)))
    name = "blk.0.attn_q.weight"
    tuned = changed(layers, tmp_path / "tuned.gguf", {name: np.zeros((64, 64), np.float32)})
    for path in (tuned, both):
        model = engine.weight_sets.model(engine.weight_sets.put(path))
        assert model.hparams == hparams_of(engine.gguf)
        assert model.nextn is not None
        assert engine.model.nextn is not None
        assert model.nextn.tensors == engine.model.nextn.tensors
    engine.close()
