"""Compiled kernels, kept on disk as object code: `address("rms_norm")` is the entry of a native function.

A kernel is compiled once per machine: numba turns the function of `backends/cpu/kernels` into LLVM IR, LLVM into an
object file, and the file is kept under the cache folder, named by hashes of what it depends on: numba, LLVM, the
processor and its features, and the kernel's sources. It ends in a checksum: what is damaged is compiled again. A warm
start reads those files in milliseconds and imports llvmlite only. Calling convention: numba's,
`i32 f(ret*, exception*, a, begin, end, scratch)`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata as metadata
import re
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from backends import cache
from backends.cpu.farm import Farm
from backends.cpu.isa import isa

KERNEL_FOLDER = Path(__file__).parent / "kernels"
_lock = threading.RLock()
_addresses: dict[str, int] = {}
on_compile: Callable[[str, int], None] | None = None  # told of each kernel that is compiled, and how many more wait
MANY = 4  # kernels for which it pays to start other processes


class KernelError(RuntimeError):
    """A kernel could not be compiled; the message names it."""


@functools.cache
def _folder() -> Path:
    """One for each machine and compiler."""
    digest = hashlib.sha256()
    for part in (metadata.version("numba"), metadata.version("llvmlite"), sys.version, llvm.get_host_cpu_name()):
        digest.update(part.encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode() + isa().encode())
    for name in ("jit.py", "frontend.py", "isa.py"):
        digest.update((KERNEL_FOLDER.parent / name).read_bytes())
    return cache.cache_folder() / "cpu" / digest.hexdigest()[:16]


@functools.cache
def _sources() -> dict[str, tuple[bytes, list[str]]]:
    """Every module of the kernels: its text, and the modules beside it that it imports."""
    return {
        path.stem: (text, re.findall(r"^from backends\.cpu\.kernels(?:\.| import )(\w+)", text.decode(), re.MULTILINE))
        for path in sorted(KERNEL_FOLDER.glob("*.py"))
        for text in [path.read_bytes()]
    }


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


@functools.cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="default",
    )


@functools.cache
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())


def _symbol(name: str) -> str:
    """The exported symbol of a kernel: `matmul:q8_0` → `logitless_matmul_q8_0`."""
    return "logitless_" + "".join(c if c.isalnum() else "_" for c in name)


def _path(name: str) -> Path:
    return _folder() / f"{_symbol(name)}-{_digest(_module_of(name.split(':')[0]))}.o"


def address(name: str) -> int:
    """The entry point of a kernel, compiled now if it never was on this machine."""
    found = _addresses.get(name)
    if found is None:
        load([name])
        found = _addresses[name]
    return found


def prefetch(names: Iterable[str]) -> None:
    """Have kernels that are not cached compiled by other processes, in this order; returns at once."""
    _farm.add([n for n in dict.fromkeys(names) if n not in _addresses and not _read(n)])


def load(names: Iterable[str]) -> None:
    """Make kernels ready: from the cache where possible, compiled (and kept) otherwise. KernelError names a failure."""
    with _lock:
        wanted = [n for n in dict.fromkeys(names) if n not in _addresses]
        if not wanted:
            return
        cached = {n: _read(n) for n in wanted}
        absent = [n for n, code in cached.items() if not code]
        if len(absent) >= MANY:
            _farm.add(absent)
        engine = _engine()
        for name in wanted:
            code = _farm.take(name) or cached[name] or _compile_here(name)
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        for name in wanted:
            found = engine.get_function_address(_symbol(name))
            if not found:
                _path(name).unlink(missing_ok=True)
                raise KernelError(f"kernel {name}: the cached object has no such function (removed; start again)")
            _addresses[name] = found


def _report(name: str, n_waiting: int) -> None:
    if on_compile is not None:
        on_compile(name, n_waiting)


def _compile_here(name: str) -> bytes:
    _report(name, 0)
    try:
        code = compile_kernel(name)
    except KernelError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise KernelError(f"kernel {name} cannot be compiled: {type(error).__name__}: {reason}") from error
    _store(name, code)
    return code


def _read(name: str) -> bytes:
    return cache.read(_path(name))


def _store(name: str, code: bytes) -> None:
    cache.write(_path(name), code)


_farm = Farm(_report, _store)


def compile_kernel(name: str) -> bytes:
    """Object code of one kernel."""
    family, *params = name.split(":")
    importlib.import_module(f"backends.cpu.kernels.{_module_of(family)}")
    registry = importlib.import_module("backends.cpu.kernels.registry")
    from backends.cpu.frontend import ir_of

    source, entry = ir_of(registry.KERNELS[family](*params))
    return _object_code(source, entry, _symbol(name))


def _object_code(source: str, entry: str, symbol: str) -> bytes:
    """Optimised machine code. All but the entry becomes private, so that callees are inlined or dropped."""
    module = llvm.parse_assembly(source)
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = "internal"
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    main = module.get_function(entry)
    main.linkage = "external"
    main.name = symbol
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(_target(), options)
    builder.getModulePassManager().run(module, builder)
    return bytes(_target().emit_object(module))
