"""Fixtures of the examples' tests."""

from __future__ import annotations

from tests.training.conftest import session

__all__ = ["session"]
