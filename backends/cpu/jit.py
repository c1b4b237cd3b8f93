"""Compiled kernels, kept on disk as object code: `address("rms_norm")` is the entry of a native function.

A kernel is compiled once per machine: numba turns the function of `backends/cpu/kernels` into LLVM IR, LLVM into an
object file, and the file is kept under the cache folder in a folder named by a hash of everything that it depends on
(the kernels' sources, numba and LLVM, the processor and its features). A warm start maps those files in milliseconds
and imports llvmlite only. Calling convention: numba's, `i32 f(ret*, exception*, a, begin, end, scratch)`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from backends.cpu.isa import isa

KERNEL_FOLDER = Path(__file__).parent / "kernels"
_lock = threading.RLock()
_addresses: dict[str, int] = {}
Progress = Callable[[str, int, int], None]  # kernel name, how many are done, how many there are to compile


class KernelError(RuntimeError):
    """A kernel could not be compiled; the message names it."""


def cache_folder() -> Path:
    """`LOGITLESS_CACHE`, else the user's cache folder."""
    base = os.environ.get("LOGITLESS_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


@functools.cache
def _folder() -> Path:
    digest = hashlib.sha256()
    for source in sorted(KERNEL_FOLDER.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    import importlib.metadata as metadata

    for part in (metadata.version("numba"), metadata.version("llvmlite"), sys.version, llvm.get_host_cpu_name()):
        digest.update(part.encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode() + isa().encode())
    digest.update(Path(__file__).read_bytes())
    return cache_folder() / "cpu" / digest.hexdigest()[:16]


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
    return _folder() / (_symbol(name) + ".o")


def address(name: str) -> int:
    """The entry point of a kernel, compiled now if it never was on this machine."""
    found = _addresses.get(name)
    if found is None:
        load([name])
        found = _addresses[name]
    return found


def load(names: Iterable[str], progress: Progress | None = None) -> None:
    """Make kernels ready: from the cache where possible, compiled (and kept) otherwise. KernelError names a failure."""
    with _lock:
        wanted = [n for n in dict.fromkeys(names) if n not in _addresses]
        objects: dict[str, bytes] = {}
        missing = []
        for name in wanted:
            try:
                objects[name] = _path(name).read_bytes()
            except OSError:
                missing.append(name)
        for i, name in enumerate(missing):
            if progress:
                progress(name, i, len(missing))
            objects[name] = compile_kernel(name)
            _store(_path(name), objects[name])
        if progress and missing:
            progress("", len(missing), len(missing))
        if not objects:
            return
        engine = _engine()
        for name in wanted:
            engine.add_object_file(llvm.ObjectFileRef.from_data(objects[name]))
        engine.finalize_object()
        for name in wanted:
            found = engine.get_function_address(_symbol(name))
            if not found:
                _path(name).unlink(missing_ok=True)
                raise KernelError(f"kernel {name}: the cached object has no such function (removed; start again)")
            _addresses[name] = found


def missing(names: Iterable[str]) -> list[str]:
    """Those that would have to be compiled."""
    return [n for n in dict.fromkeys(names) if n not in _addresses and not _path(n).exists()]


def compile_kernel(name: str) -> bytes:
    """Object code of one kernel."""
    family, *params = name.split(":")
    registry = importlib.import_module("backends.cpu.kernels.registry")
    for source in sorted(KERNEL_FOLDER.glob("*.py")):
        if family not in registry.KERNELS and source.stem != "__init__":
            importlib.import_module(f"backends.cpu.kernels.{source.stem}")
    if family not in registry.KERNELS:
        raise KernelError(f"there is no CPU kernel named {family!r}")
    from numba import njit, types

    function = registry.KERNELS[family](*params)
    signature = getattr(function, "signature", None) or types.void(
        types.CPointer(types.int64), types.int64, types.int64, types.int64
    )
    # Sums may be re-associated into vector lanes: a fixed order per kernel, the same for every row (DESIGN rule 6).
    fastmath = getattr(function, "fastmath", {"reassoc", "contract", "nsz"})
    compiled = njit(signature, nogil=True, fastmath=fastmath, error_model="numpy")(function)
    entry = compiled.overloads[compiled.signatures[0]].fndesc.llvm_func_name
    return _object_code(compiled.inspect_llvm(compiled.signatures[0]), entry, _symbol(name))


def _object_code(source: str, entry: str, symbol: str) -> bytes:
    """Everything but the entry becomes private, so numba's Python wrappers are dropped and nothing refers to numba."""
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
    builder = llvm.create_pass_builder(_target(), llvm.create_pipeline_tuning_options(speed_level=3))
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    return bytes(_target().emit_object(module))


def _store(path: Path, data: bytes) -> None:
    """Write whole or not at all; a read-only or full disk only costs the next start its compile time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(data)
        os.replace(f.name, path)
    except OSError:
        return
