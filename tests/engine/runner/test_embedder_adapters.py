"""Embeddings under adapters and full finetunes: equal to a model file with the adapter merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from logitless.engine.adapters import Adapters
from logitless.engine.requests import Lora
from logitless.engine.runner.embedder import F32
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.adapters.lora import Adapter, Pair
from logitless.models.adapters.merge import merge
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from logitless.models.weights.weights import check_weights
from tests.helpers.bert_model import tensors, write

TEXTS = [[5, 7, 9], [11, 3, 8], [6] * 20]


@pytest.fixture(scope="module", params=["bert", "stories260K"])
def files(
    request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Adapter, Path]:
    """A model, an adapter of its matrices, and the model with half of that merged into it."""
    folder = tmp_path_factory.mktemp("files")
    if request.param == "bert":
        path = write(folder / "base.gguf", tensors())
    else:
        path = shared_data / "models" / "stories260K.gguf"
    rng = np.random.default_rng(5)
    with GGUFFile.open(path) as base:
        h = hparams_of(base)
        pairs = {
            name: Pair(
                rng.normal(size=(3, part.shape[1])).astype(np.float32) / 8,
                rng.normal(size=(part.shape[0], 3)).astype(np.float32) / 8,
            )
            for name, part in check_weights(base, h).items()
            if len(part.shape) == 2 and name.startswith(("blk.", "cls")) and name.endswith(".weight")
        }
        adapter = Adapter(pairs)
        merge(folder / "merged.gguf", base, h, [(adapter, 0.5)])
    return path, adapter, folder / "merged.gguf"


@pytest.fixture
def engine(files: tuple[Path, Adapter, Path]) -> Iterator[ModelRunner]:
    engine = opened(files[0])
    yield engine
    engine.close()


def opened(path: Path) -> ModelRunner:
    engine = ModelRunner(path, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=64, threads=1, embeddings=True))
    engine.load()
    return engine


def vectors(engine: ModelRunner, pooling: str, known: Adapters | None = None, lora: Lora | None = None) -> list[F32]:
    found: dict[int, F32] = {}
    for group in engine.embedder.groups(TEXTS):
        texts = [TEXTS[i] for i in group]
        given = () if known is None else (known.resolve(lora),)
        found |= dict(zip(group, engine.embedder.embed(texts, pooling, *given), strict=True))
    return [found[i] for i in range(len(TEXTS))]


def test_vectors_are_those_of_the_merged_model(files: tuple[Path, Adapter, Path], engine: ModelRunner) -> None:
    _, adapter, merged = files
    other = opened(merged)
    known = Adapters(engine.adapters, engine.weight_sets)
    adapted = known.add("adapter", lambda: adapter)
    whole = known.add(merged, None, name="ft:whole")
    for pooling in ("mean", "last", "none", *(["rank"] if engine.embedder.ranks else [])):
        base = vectors(engine, pooling)
        wanted = vectors(other, pooling)
        mixed = vectors(engine, pooling, known, ((adapted, 0.5),))
        for a, b, c in zip(wanted, mixed, base, strict=True):
            np.testing.assert_allclose(b, a, atol=2e-4 * np.abs(a).max())
            assert np.abs(c - a).max() > 1e-2 * np.abs(a).max()
        for a, b in zip(wanted, vectors(engine, pooling, known, ((whole, 1.0),)), strict=True):
            assert a.tobytes() == b.tobytes()
        for a, b in zip(base, vectors(engine, pooling, known, ()), strict=True):
            assert a.tobytes() == b.tobytes()
    known.set_scales({adapted: 0.5})
    served = vectors(engine, "mean", known, None)
    for a, b in zip(vectors(engine, "mean", known, ((adapted, 0.5),)), served, strict=True):
        assert a.tobytes() == b.tobytes()
    other.close()
