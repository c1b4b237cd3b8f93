"""Databases of the stores that these tests open."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def databases_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close them at a test's end: from Python 3.13 on a connection that is left open is a warning."""
    connect = sqlite3.connect
    with ExitStack() as opened:

        def recorded(*args: Any, **options: Any) -> sqlite3.Connection:
            return opened.enter_context(closing(connect(*args, **options)))

        monkeypatch.setattr(sqlite3, "connect", recorded)
        yield
