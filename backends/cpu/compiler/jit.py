"""JIT cache: compiled kernels as machine code on disk. `address("rms_norm")` is an entry point.

A kernel of `backends/cpu/kernels` is compiled once per machine (`llvm.py`). The cache key covers
numba, LLVM, the processor and its features, and the kernel's sources. A file ends in a checksum,
and a damaged one is compiled again. A warm start reads the files in milliseconds and imports
neither numba nor LLVM (`linker.py`). Kernels have numba's calling convention: `i32 f(ret*,
exception*, a, begin, end, scratch)`."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata as metadata
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from logitless.backends import disk_cache
from logitless.backends.cpu.compiler import linker
from logitless.backends.cpu.compiler.kernel_source import KernelError, _digest, _module_of, _symbol, compile_kernel
from logitless.backends.cpu.compiler.workers import CompileWorkers
from logitless.backends.errors import DeviceError
from logitless.backends.host import host, isa

COMPILER_FILES = ("llvm.py", "numba_frontend.py", "linker.py")
_lock = threading.RLock()
_addresses: dict[str, int] = {}
# called with each kernel to compile and the number still waiting
on_compile: Callable[[str, int], None] | None = None
MIN_PARALLEL = 4  # kernels from which on compile workers pay


@functools.cache
def _folder() -> Path:
    """Cache folder of this machine and compiler."""
    digest = hashlib.sha256()
    versions = metadata.version("numba"), metadata.version("llvmlite"), sys.implementation.cache_tag
    for part in (*versions, host().name, host().attributes, isa()):
        digest.update(part.encode())
    for name in COMPILER_FILES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return disk_cache.cache_folder() / "cpu" / digest.hexdigest()[:16]


def _path(name: str) -> Path:
    return _folder() / f"{_symbol(name)}-{_digest(_module_of(name.split(':')[0]))}.kernel"


def address(name: str) -> int:
    """Entry point of a kernel. It is compiled if the cache lacks it."""
    entry = _addresses.get(name)
    if entry is None:
        load([name])
        entry = _addresses[name]
    return entry


def prefetch(names: Iterable[str]) -> None:
    """Start compiling the kernels that the cache lacks, in this order; return at once."""
    _workers.submit([n for n in dict.fromkeys(names) if n not in _addresses and not _read(n)])


def finish() -> None:
    """Wait for the kernels that `prefetch` has queued."""
    _workers.wait()


def load(names: Iterable[str]) -> None:
    """Load kernels from the cache, or compile and cache them.

    KernelError names a kernel that cannot be compiled. DeviceError: the system forbids running
    generated code."""
    names = dict.fromkeys(names)
    # lock-free: a thread that compiles holds the lock for seconds
    if all(n in _addresses for n in names):
        return
    with _lock:
        new = [n for n in names if n not in _addresses]
        cached = {n: _read(n) for n in new}
        absent = [n for n, code in cached.items() if not code]
        if len(absent) >= MIN_PARALLEL:
            _workers.submit(absent)
        _addresses.update(_load_entries({n: _workers.result(n) or cached[n] or _compile_here(n) for n in new}))


def _load_entries(codes: dict[str, bytes]) -> dict[str, int]:
    images = [n for n, code in codes.items() if linker.is_image(code)]
    try:
        entries = dict(zip(images, linker.load([codes[n] for n in images]), strict=True))
    except OSError as error:
        raise _not_executable(error) from None
    objects = [n for n in codes if n not in entries]
    if objects:
        from logitless.backends.cpu.compiler import llvm as compiler

        entries |= zip(objects, compiler.load_objects([(_symbol(n), codes[n]) for n in objects]), strict=True)
    for name, entry in entries.items():
        if not entry:
            _path(name).unlink(missing_ok=True)
            raise KernelError(f"kernel {name}: the cached object has no such function (removed; start again)")
    return entries


def _not_executable(error: OSError) -> DeviceError:
    return DeviceError(f"cpu: this system forbids running generated code: {error.strerror}")


def _report(name: str, n_waiting: int) -> None:
    if on_compile is not None:
        on_compile(name, n_waiting)


def _compile_here(name: str) -> bytes:
    with disk_cache.lock(_path(name)):
        if code := _read(name):  # another process has compiled it meanwhile
            return code
        _report(name, 0)
        code = _compile(name)
        _store(name, code)
        return code


def _compile(name: str) -> bytes:
    try:
        return compile_kernel(name)
    except KernelError:
        raise
    except PermissionError as error:  # numba may not generate code either
        raise _not_executable(error) from None
    except Exception as error:
        reason = " ".join(str(error).split())
        raise KernelError(f"kernel {name} cannot be compiled: {type(error).__name__}: {reason}") from error


def _read(name: str) -> bytes:
    return disk_cache.read(_path(name))


def _store(name: str, code: bytes) -> None:
    disk_cache.write(_path(name), code)


def _lock_kernel(name: str, wait: bool) -> AbstractContextManager[bool]:
    return disk_cache.lock(_path(name), wait=wait)


_workers = CompileWorkers(_report, _store, _read, _lock_kernel)
