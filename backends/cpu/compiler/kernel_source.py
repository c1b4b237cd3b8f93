"""Kernel sources: the module that defines a kernel, and the digest of all that it imports."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

KERNEL_FOLDER = Path(__file__).parents[1] / "kernels"
GRAPH_FOLDER = Path(__file__).parents[3] / "graph"
_LINE = r"((?:\.\w+)*) import (\([^)]*\)|[^(\n]*)"
_IMPORTS = re.compile(rf"^from logitless\.backends\.cpu\.kernels{_LINE}", re.MULTILINE)
_OF_GRAPH = re.compile(rf"^from logitless\.graph{_LINE}", re.MULTILINE)


class KernelError(RuntimeError):
    """A kernel could not be compiled. The message names it."""


@functools.cache
def _sources() -> dict[str, tuple[bytes, list[str]]]:
    """Source of every kernel module by its dotted name below `kernels`, and the modules it imports."""
    texts = {
        ".".join(path.relative_to(KERNEL_FOLDER).with_suffix("").parts): path.read_bytes()
        for path in sorted(KERNEL_FOLDER.rglob("*.py"))
    }
    return {
        name: (text, [m for line in _IMPORTS.findall(text.decode()) for m in _imported(line) if m in texts])
        for name, text in texts.items()
    }


def _imported(statement: tuple[str, str]) -> list[str]:
    """Candidate module names of `from <folder><package> import <names>`, below the folder."""
    package, names = statement[0].lstrip("."), re.findall(r"[\w.]+", statement[1])
    return [package, *(f"{package}.{name}".lstrip(".") for name in names)]


@functools.cache
def _module_of(family: str) -> str:
    decorator = f'@kernel("{family}")'.encode()
    module = next((name for name, (text, _) in _sources().items() if decorator in text), None)
    if module is None:
        raise KernelError(f"there is no CPU kernel named {family!r}")
    return module


@functools.cache
def _digest(module: str) -> str:
    """Digest of a module, its transitive imports below `kernels`, and what these import of `graph`
    (formulas, codes). A change recompiles its kernels."""
    closure, stack = {module}, [module]
    while stack:
        for other in _sources()[stack.pop()][1]:
            if other in _sources() and other not in closure:
                closure.add(other)
                stack.append(other)
    texts = [_sources()[name][0] for name in sorted(closure)]
    lines = {line for text in texts for line in _OF_GRAPH.findall(text.decode())}
    paths = {GRAPH_FOLDER / f"{name.replace('.', '/')}.py" for line in lines for name in _imported(line)}
    texts += [path.read_bytes() for path in sorted(paths) if path.exists()]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def _symbol(name: str) -> str:
    """Exported symbol of a kernel: `matmul:q8_0` → `logitless_matmul.q8_0`. No two kernels have the
    same: `x:f32` is not `x_f32`."""
    return "logitless_" + "".join(c if c.isalnum() or c == "_" else "." for c in name)


def compile_kernel(name: str) -> bytes:
    """Machine code of one kernel."""
    # imports LLVM, which a warm start avoids
    from logitless.backends.cpu.compiler import llvm as compiler

    return compiler.compile_kernel(name, _module_of(name.split(":")[0]), _symbol(name))
