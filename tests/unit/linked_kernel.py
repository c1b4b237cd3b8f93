"""A function as a kernel that nobody registers, for the tests beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.cpu import compile as compiler
from backends.cpu import image
from backends.cpu.frontend import ir_of


def linked(run: Callable[[Any, int, int, Any], None]) -> int:
    """The address of a kernel."""
    source, entry = ir_of(run)
    (address,) = image.load([image.link(compiler.object_code(source, entry, "tested"), "tested")])
    return address
