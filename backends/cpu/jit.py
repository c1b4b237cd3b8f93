"""Compiled kernels, kept on disk as object code: `address("rms_norm")` is the entry of a native function.

A kernel is compiled once per machine: numba turns the function of `backends/cpu/kernels` into LLVM IR, LLVM into an
object file, and the file is kept under the cache folder, named by hashes of what it depends on: numba, LLVM, the
processor and its features, and the kernel's sources. A warm start maps those files in milliseconds and imports
llvmlite only. Calling convention: numba's, `i32 f(ret*, exception*, a, begin, end, scratch)`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from backends.cpu.isa import isa

KERNEL_FOLDER = Path(__file__).parent / "kernels"
_lock = threading.RLock()
_addresses: dict[str, int] = {}
on_compile: Callable[[str], None] | None = None  # told the name of each kernel that has to be compiled
SLOW = ("sample", "attention")  # kernels that take longest to compile: first in line


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
    """One for each machine and compiler."""
    digest = hashlib.sha256()
    for part in (metadata.version("numba"), metadata.version("llvmlite"), sys.version, llvm.get_host_cpu_name()):
        digest.update(part.encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode() + isa().encode())
    for name in ("jit.py", "frontend.py", "isa.py"):
        digest.update((KERNEL_FOLDER.parent / name).read_bytes())
    return cache_folder() / "cpu" / digest.hexdigest()[:16]


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


def load(names: Iterable[str]) -> None:
    """Make kernels ready: from the cache where possible, compiled (and kept) otherwise. KernelError names a failure."""
    with _lock:
        wanted = [n for n in dict.fromkeys(names) if n not in _addresses]
        if not wanted:
            return
        absent = [n for n in wanted if not _path(n).exists()]
        if absent:
            _compile_apart(absent)
        objects: dict[str, bytes] = {}
        for name in wanted:
            try:
                objects[name] = _path(name).read_bytes()
            except OSError:  # not cached: the disk is full or read-only
                _report(name)
                objects[name] = compile_kernel(name)
                _store(_path(name), objects[name])
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


def _report(name: str) -> None:
    if on_compile is not None:
        on_compile(name)


def _compile_apart(names: list[str]) -> None:
    """Fill the cache with several processes, because numba compiles one kernel at a time in each."""
    n_processes = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)
    if len(names) < 4 or n_processes < 2:
        return
    command = [sys.executable, "-m", "backends.cpu.jit"]
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    queue = deque(sorted(names, key=lambda n: n.split(":")[0] not in SLOW))
    # a process takes kernels from its standard input, one a line, and answers each with a line
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for _ in range(min(n_processes, len(names)))
    ]

    def feed(worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(OSError), worker.stdin, worker.stdout:
            while queue:
                name = queue.popleft()
                _report(name)
                worker.stdin.write(name.encode() + b"\n")
                worker.stdin.flush()
                if not worker.stdout.readline():
                    return  # it failed: `load` compiles what is missing itself, and says what is wrong
        worker.wait()

    threads = [threading.Thread(target=feed, args=(w,)) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def missing(names: Iterable[str]) -> list[str]:
    """Those that would have to be compiled."""
    return [n for n in dict.fromkeys(names) if n not in _addresses and not _path(n).exists()]


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


def _store(path: Path, data: bytes) -> None:
    """Write whole or not at all; a read-only or full disk only costs the next start its compile time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(data)
        os.replace(f.name, path)
    except OSError:
        return


def _serve() -> None:
    """The process that `_compile_apart` starts."""
    for line in sys.stdin:
        name = line.strip()
        _store(_path(name), compile_kernel(name))
        print(name, flush=True)


if __name__ == "__main__":
    _serve()
