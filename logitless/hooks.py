"""Hooks: rows of tables that the extras declare for the core.

An extra is a folder of `extras/`. Its `commands.py` has rows of commands in `COMMANDS`, its `routes.py` rows of routes
in `ROUTES`, and so on. The core asks for a kind of rows and names no extra; without the folder there are none.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_EXTRAS = Path(__file__).parent / "extras"


@cache
def rows(kind: str) -> tuple[Any, ...]:
    """The extras' rows of one kind: those of `commands` are in `COMMANDS` of each `extras/<name>/commands.py`."""
    names = sorted(path.parent.name for path in _EXTRAS.glob(f"*/{kind}.py"))
    modules = [import_module(f"logitless.extras.{name}.{kind}") for name in names]
    return tuple(row for module in modules for row in getattr(module, kind.upper()))
