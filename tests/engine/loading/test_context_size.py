"""Context size: chosen or refused by the memory beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logitless.engine.loading import memory
from logitless.engine.loading.memory import cache_bytes
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions, OptionConflict
from logitless.engine.runner.model_runner import RunnerOptions
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of


@pytest.fixture
def model(shared_data: Path) -> Path:
    return shared_data / "models" / "prometheus-shakespeare-2.3M-F32.gguf"


def wanted(model: Path, n_ctx: int, monkeypatch: pytest.MonkeyPatch, part: float) -> RunnerOptions:
    """Of a machine of whose memory the weights take such a part."""
    with GGUFFile.open(model) as gguf:
        weights = memory.weights_nbytes(gguf)
    monkeypatch.setattr("logitless.engine.loading.open_model.total_memory", lambda: int(weights / part))
    return open_model(model, ModelOptions(ctx_size=n_ctx)).engine_options


def test_weights_count_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is mapped while it is loaded; its pages are no memory that a cache could not have."""
    with GGUFFile.open(model) as gguf:
        assert 0.9 * gguf.size < memory.weights_nbytes(gguf) <= gguf.size
        counted = cache_bytes(hparams_of(gguf), "f16", "f16", n_slots=1, n_ubatch=512, n_checkpoints=2, swa_full=True)
        n_ctx = counted.most(int(memory.weights_nbytes(gguf) * (0.9 / 0.3 - 1)))
    assert n_ctx > 4096
    assert wanted(model, n_ctx, monkeypatch, 0.3).n_ctx == n_ctx
    with pytest.raises(OptionConflict, match=f"--ctx-size {n_ctx}: the KV cache would need 0.0 GiB, and there is"):
        wanted(model, n_ctx, monkeypatch, 0.4)


def test_a_small_context_is_tried_anyway(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted(model, 4096, monkeypatch, 0.95).n_ctx == 4096


@pytest.mark.parametrize(
    ("options", "n_ctx", "n_ctx_slot"),
    [
        ({"ctx_size": 512}, 512, 512),  # four slots, one cache
        ({"ctx_size": 512, "parallel": -1}, 512, 512),
        ({"ctx_size": 512, "parallel": 1}, 512, 512),
        ({"ctx_size": 512, "parallel": 2}, 512, 256),
        ({"ctx_size": 512, "parallel": 3}, 512, 170),
        ({"ctx_size": 512, "parallel": 2, "kv_unified": True}, 512, 512),
        ({"ctx_size": 512, "kv_unified": False}, 512, 128),
        ({"ctx_size": 512, "parallel": 2, "kv_unified_per_slot": 100}, 512, 100),
        ({"ctx_size": 512, "parallel": 2, "kv_unified_per_slot": 300}, 512, 256),
        ({"ctx_size": 512, "kv_unified_per_slot": 300}, 512, 300),
        ({"parallel": 3, "kv_unified_per_slot": 100}, 300, 100),
        ({"kv_unified_per_slot": 100}, 400, 100),
        ({}, 256, 256),  # as the model was trained
        ({"parallel": 2}, 512, 256),
    ],
)
def test_the_context_of_a_slot(model: Path, options: dict[str, Any], n_ctx: int, n_ctx_slot: int) -> None:
    opened = open_model(model, ModelOptions(**options))
    engine = opened.engine()
    assert (engine.n_ctx, engine.n_ctx_slot) == (n_ctx, n_ctx_slot)
    slots = opened.scheduler(engine).slots
    assert [slot.n_ctx for slot in slots] == [n_ctx_slot] * opened.options.n_slots
