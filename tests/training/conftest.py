"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.models.synthetic.model import ModelShape
from logitless.training.scratch import new_model


@pytest.fixture
def session() -> Iterator[Session]:
    """On one thread of the CPU."""
    backend = CPUBackend(1)
    session = Session([backend])
    yield session
    session.close()
    backend.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes with two layers and a context of 64 tokens, only to be read."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    new_model(path, None, ModelShape(32, 2, 4, 2, 48, 0, n_ctx=64), seed=3)
    return path
