"""Warnings about requests: each is told once, for clients repeat themselves, and no client can fill the log."""

from __future__ import annotations

import logging

MOST = 64  # different ones
_told: set[str] = set()


def warn_once(log: logging.Logger, line: str) -> None:
    if line not in _told and len(_told) < MOST:
        _told.add(line)
        log.warning("%s", line)


def forget() -> None:
    """Tell all again."""
    _told.clear()
