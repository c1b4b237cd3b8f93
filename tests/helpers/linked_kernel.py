"""A function as a kernel that nobody registers, for the tests beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logitless.backends.cpu.compiler import linker
from logitless.backends.cpu.compiler import llvm as compiler
from logitless.backends.cpu.compiler.numba_frontend import ir_of


def linked(run: Callable[[Any, int, int, Any], None]) -> int:
    """The address of a kernel."""
    source, entry = ir_of(run)
    (address,) = linker.load([linker.link(compiler.object_code(source, entry, "tested"), "tested")])
    return address
