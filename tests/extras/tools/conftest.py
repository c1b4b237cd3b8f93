"""Fixtures: a folder for temporary files of a test's own, by which its processes are told from those of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import connect, serve, serve_here  # noqa: F401  (fixtures)


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder; children of tools inherit its name."""
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder
