"""Sources of the CPU kernels: the module of a kernel, a digest of all that it imports, and its compilation."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

KERNEL_FOLDER = Path(__file__).parents[1] / "kernels"


_IMPORTS = re.compile(r"^from logitless\.backends\.cpu\.kernels((?:\.\w+)*) import (\([^)]*\)|[^(\n]*)", re.MULTILINE)


class KernelError(RuntimeError):
    """A kernel could not be compiled; the message names it."""


@functools.cache
def _sources() -> dict[str, tuple[bytes, list[str]]]:
    """Sources of every kernel module by dotted name below `kernels`, with the kernel modules that each imports."""
    texts = {
        ".".join(path.relative_to(KERNEL_FOLDER).with_suffix("").parts): path.read_bytes()
        for path in sorted(KERNEL_FOLDER.rglob("*.py"))
    }
    return {
        name: (text, [m for line in _IMPORTS.findall(text.decode()) for m in _imported(line) if m in texts])
        for name, text in texts.items()
    }


def _imported(statement: tuple[str, str]) -> list[str]:
    """Dotted names that `from logitless.backends.cpu.kernels<package> import <names>` may stand for."""
    package, names = statement[0].lstrip("."), re.findall(r"[\w.]+", statement[1])
    return [package, *(f"{package}.{name}".lstrip(".") for name in names)]


@functools.cache
def _module_of(family: str) -> str:
    mark = f'@kernel("{family}")'.encode()
    found = next((name for name, (text, _) in _sources().items() if mark in text), None)
    if found is None:
        raise KernelError(f"there is no CPU kernel named {family!r}")
    return found


@functools.cache
def _digest(module: str) -> str:
    """Of a module and all that it imports from beside it: a kernel is compiled anew when one of them changes."""
    closure, stack = {module}, [module]
    while stack:
        for other in _sources()[stack.pop()][1]:
            if other in _sources() and other not in closure:
                closure.add(other)
                stack.append(other)
    return hashlib.sha256(b"".join(_sources()[name][0] for name in sorted(closure))).hexdigest()[:12]


def _symbol(name: str) -> str:
    """The exported symbol of a kernel: `matmul:q8_0` → `logitless_matmul_q8_0`."""
    return "logitless_" + "".join(c if c.isalnum() else "_" for c in name)


def compile_kernel(name: str) -> bytes:
    """The code of one kernel."""
    from logitless.backends.cpu.compiler import llvm as compiler  # imports LLVM, which a warm start does without

    return compiler.compile_kernel(name, _module_of(name.split(":")[0]), _symbol(name))
