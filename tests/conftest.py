"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Models, vocabularies and expected outputs made with llama.cpp, which lie beside the checkout, not in it."""
    path = REPO_ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no shared test data at {path}")
    return path
