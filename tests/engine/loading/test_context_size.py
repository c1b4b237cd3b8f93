"""How large a context is made, or refused, by what memory there is beside the weights."""

from __future__ import annotations

from pathlib import Path

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
    monkeypatch.setattr(memory, "total_memory", lambda: int(weights / part))
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
