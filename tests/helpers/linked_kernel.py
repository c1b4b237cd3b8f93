"""Compiles an unregistered function as a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logitless.backends.cpu.compiler import linker
from logitless.backends.cpu.compiler import llvm as compiler
from logitless.backends.cpu.compiler.numba_frontend import ir_of


def linked(run: Callable[[Any, int, int, Any], None]) -> int:
    """Entry address of a kernel."""
    source, entry = ir_of(run)
    (address,) = linker.load([linker.link(compiler.object_code(source, entry, "tested"), "tested")])
    return address
