"""JIT cache of compiled kernels, intact or damaged, and the compile workers that fill it."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from logitless.backends.cpu.compiler import jit, kernel_source, linker
from logitless.backends.cpu.compiler.workers import ROOT, CompileWorkers
from logitless.backends.cpu.threads.pool import ENTRY, bits

NAMES = ("copy_pages", "rms_norm")  # quick to compile
IMPORT = "import sys; from logitless.backends.cpu.compiler import jit; "
PROGRAM = f"{IMPORT}jit.prefetch(sys.argv[1:]); jit.load(sys.argv[1:]); print('fine')"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has loaded nothing."""
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_addresses", {})
    workers = CompileWorkers(lambda name, n_waiting: None, jit._store, jit._read, jit._lock_kernel)
    monkeypatch.setattr(jit, "_workers", workers)
    jit._folder.cache_clear()
    yield tmp_path / "cache"
    jit._folder.cache_clear()


@pytest.fixture(scope="module")
def code() -> bytes:
    return kernel_source.compile_kernel("rms_norm")


def works() -> None:
    """Load the kernel in a process that has loaded nothing, and run it."""
    jit._addresses.clear()
    run = ENTRY(jit.address("rms_norm"))
    x, w, y = np.full(8, 3.0, np.float32), np.ones(8, np.float32), np.zeros(8, np.float32)
    args = np.array([x.ctypes.data, w.ctypes.data, y.ctypes.data, 8, bits(0.0)], np.int64)
    out = np.zeros(8, np.int64)
    assert run(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(out.ctypes.data), args.ctypes.data, 0, 1, 0) == 0
    np.testing.assert_allclose(y, 1.0, rtol=1e-6)


def no_compiler(name: str) -> bytes:
    raise AssertionError(f"{name} was compiled again")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about a register of x86-64")
def test_kernels_of_similar_names_have_symbols_of_their_own() -> None:
    assert kernel_source._symbol("x:f32") != kernel_source._symbol("x_f32")


def test_machine_code_reserves_rbp() -> None:
    """The prologue sets up the frame pointer: push rbp; mov rbp, rsp.

    LLVM would otherwise use rbp as the base of prefetches in `linear`.
    """
    assert b"\x55\x48\x89\xe5" in kernel_source.compile_kernel("linear:q8_0:8x1")


def test_stored_kernel_is_read_back(cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    jit._store("rms_norm", code)
    monkeypatch.setattr(jit, "compile_kernel", no_compiler)
    works()
    files = [path for path in cache.rglob("*") if path.is_file() and not path.name.startswith("host-")]
    assert [path.suffix for path in files] == [".kernel"]


def test_unlinkable_object_is_loaded_by_llvm(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_machine(code: bytes, symbol: str) -> bytes:
        raise linker.NotLinkable("not an object file for x86-64")

    monkeypatch.setattr(linker, "link", other_machine)
    jit._addresses.clear()
    jit.load(["rms_norm", "copy_pages"])
    assert not any(linker.is_image(path.read_bytes()) for path in cache.rglob("*.kernel"))
    monkeypatch.setattr(jit, "compile_kernel", no_compiler)
    works()


def test_warm_start_imports_no_compiler(cache: Path, code: bytes) -> None:
    jit._store("rms_norm", code)
    program = f"{IMPORT}jit.load(['rms_norm']); print('llvmlite' in sys.modules)"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = [subprocess.run(command, env=environment, capture_output=True, check=True).stdout for _ in range(2)]
    assert outputs == [b"True\n", b"False\n"]  # the first asks LLVM for the processor's name


@pytest.mark.parametrize(
    "damage",
    [lambda d: b"", lambda d: b"garbage", lambda d: d[: len(d) // 2], lambda d: d[:100] + bytes(64) + d[164:]],
    ids=["empty", "garbage", "truncated", "zeroed"],
)
def test_damaged_file_is_compiled_again(cache: Path, code: bytes, damage, monkeypatch: pytest.MonkeyPatch) -> None:
    jit._store("rms_norm", code)
    path = jit._path("rms_norm")
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(jit, "compile_kernel", lambda name: code)
    works()
    monkeypatch.setattr(jit, "compile_kernel", no_compiler)
    works()


def test_unwritable_cache_still_works(cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(jit, "compile_kernel", lambda name: code)
    works()
    monkeypatch.setattr(jit, "MIN_PARALLEL", 1)  # by a compile worker, whose answer is all there is
    monkeypatch.setattr(jit, "compile_kernel", no_compiler)
    works()


def test_full_disk_leaves_no_file(cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    jit._store("rms_norm", code)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_two_processes_share_an_empty_cache(cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LOGITLESS_CACHE": str(cache)}
    command = [sys.executable, "-c", PROGRAM, *NAMES]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in both] == [b"fine\n"] * 2
    assert not list(cache.rglob("*.lock"))
    assert len(list(cache.rglob("*.kernel"))) == len(NAMES)
    assert len([path for path in cache.rglob("*") if path.is_file()]) == len(NAMES) + 1  # and the processor's name


def test_compile_error_names_the_kernel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> bytes:
        raise TypeError("cannot\nunify")

    monkeypatch.setattr(jit, "compile_kernel", broken)
    with pytest.raises(kernel_source.KernelError, match="rms_norm cannot be compiled: TypeError: cannot unify"):
        jit.load(["rms_norm"])
    with pytest.raises(kernel_source.KernelError, match="no CPU kernel named 'nonsense'"):
        jit.load(["nonsense"])


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to refuse")
def test_forbidden_code_generation_is_a_one_line_error(cache: Path, code: bytes) -> None:
    """Services with MemoryDenyWriteExecute are such systems."""
    jit._store("rms_norm", code)
    refuse = "import ctypes; refused = ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0"  # PR_SET_MDWE, Linux 6.3
    program = f"{refuse}\n{IMPORT}\ntry: jit.load(['rms_norm'])\nexcept jit.DeviceError as e: print(e)"
    command = [sys.executable, "-c", f"{program}\nif not refused: print('cannot be made executable')"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode()
    assert "cannot be made executable" in outputs
    assert len(outputs.splitlines()) == 1


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(1)",
        "import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)",
        "input(); print(1000, flush=True); print('too little')",
        "input(); print('what?')",
        "print(0, flush=True); input(); print(0, flush=True); input()",  # it cannot, and reports it
    ],
)
def test_broken_workers_leave_kernels_to_the_caller(program: str) -> None:
    workers = CompileWorkers(lambda name, n_waiting: None, lambda name, code: pytest.fail("nothing was compiled"))
    workers.command = [sys.executable, "-c", program]
    names = [f"k{i}" for i in range(5 if "cannot" in program else 2)]
    workers.submit(names)
    assert [workers.result(name) for name in names] == [b""] * len(names)


def test_dead_worker_raises_nothing() -> None:
    """Nothing is raised in the thread that feeds it: that would be a traceback on the terminal."""
    workers = CompileWorkers(
        lambda name, n_waiting: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT), lambda name, code: None
    )
    workers.command = [sys.executable, "-c", ""]
    others = set(threading.enumerate())
    workers.submit(["a"])
    feeding = set(threading.enumerate()) - others
    assert workers.result("a") == b""
    for thread in feeding:
        thread.join()


def test_missing_executable_leaves_kernels_to_the_caller() -> None:
    workers = CompileWorkers(lambda name, n_waiting: None, lambda name, code: None)
    workers.command = ["/no/such/program"]
    workers.submit(["a", "b", "c"])
    assert [workers.result(name) for name in "abc"] == [b""] * 3


def test_a_kernel_that_another_process_compiles_is_read_from_the_cache(cache: Path, code: bytes) -> None:
    """The kernel waits behind the others, and is compiled once."""
    started: list[str] = []
    lock = jit._lock_kernel("rms_norm", True)
    lock.__enter__()
    workers = CompileWorkers(lambda name, n_waiting: started.append(name), jit._store, jit._read, jit._lock_kernel)
    workers.submit(["rms_norm", "copy_pages"])
    assert workers.result("copy_pages")
    jit._store("rms_norm", code)
    lock.__exit__(None, None, None)
    assert workers.result("rms_norm") == code
    assert started == ["copy_pages"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_their_parent() -> None:
    """Killed in any way, in the middle of a kernel, without output."""
    program = (
        "from logitless.backends.cpu.compiler.workers import CompileWorkers; "
        "workers = CompileWorkers(lambda *a: print('begun', flush=True), print);"
        "workers.submit(['log_probs']); workers.result('log_probs')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"begun\n"
    (child,) = [int(word) for task in Path(f"/proc/{parent.pid}/task").iterdir() for word in children(task)]
    parent.send_signal(signal.SIGKILL)
    out, errors = parent.communicate(timeout=10)
    assert (out, errors) == (b"", b"")
    assert ends(child)


def children(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def ends(pid: int) -> bool:
    """True if the process, which is not our child, ends within ten seconds."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)
