"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session


@pytest.fixture
def session() -> Iterator[Session]:
    """On one thread of the CPU."""
    backend = CPUBackend(1)
    session = Session([backend])
    yield session
    session.close()
    backend.close()
