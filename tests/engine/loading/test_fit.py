"""Context that fits into memory: --fit, --fit-ctx; plans ahead of requests: --no-warmup."""

from __future__ import annotations

from pathlib import Path

import pytest

from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from tests.helpers.reference_model import Spec, write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(path := tmp_path / "m.gguf", Spec(n_vocab=512, n_ctx_train=1 << 16, vocabulary=True))
    return path


@pytest.mark.parametrize(
    ("options", "n_ctx"),
    [
        (ModelOptions(), 4096),
        (ModelOptions(fit_ctx=256), 1024),
        (ModelOptions(fit_ctx=2048), 2048),
        (ModelOptions(fit_ctx=256, fit_target=[0]), 1280),
        (ModelOptions(fit_ctx=256, fit_target="9999,1"), 256),
        (ModelOptions(fit=False), 1 << 16),
        (ModelOptions(fit="off", kv_unified_per_slot=100), 400),
    ],
)
def test_a_context_is_fitted_to_the_memory_unless_fit_is_off(
    model: Path, options: ModelOptions, n_ctx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logitless.engine.loading.open_model.total_memory", lambda: 1 << 20)
    assert open_model(model, options).engine_options.n_ctx == n_ctx


@pytest.mark.parametrize("warmup", [True, False])
def test_plans_are_made_ahead_unless_there_is_no_warmup(model: Path, warmup: bool) -> None:
    engine = open_model(model, ModelOptions(ctx_size=64, parallel=1, threads=1, warmup=warmup)).engine()
    engine.load()
    n = len(engine._ahead)
    assert engine.prepare_ahead() is warmup
    assert len(engine._ahead) == n - warmup
    engine.close()
