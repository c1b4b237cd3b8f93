"""Compile workers: processes that compile kernels in parallel.

numba compiles one kernel at a time per process. A worker reads kernel names from its standard
input, one a line. It answers each with a line that holds the size, then the machine code; size 0
means failure. When the parent ends, the input ends, and the worker exits at once and silently. It
has its own session, so Ctrl-C at the terminal reaches the parent only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

from logitless.backends.cores import cores

ROOT = Path(__file__).parents[4]
MAX_PROCESSES = 8


def _missing(name: str) -> bytes:
    return b""


def _unlocked(name: str, wait: bool) -> contextlib.AbstractContextManager[bool]:
    return contextlib.nullcontext(True)


class CompileWorkers:
    """Queue of kernels to compile. `on_start(name, n_waiting)` and `on_done(name, code)` report.

    `read(name)`: code that another process has compiled meanwhile, or nothing. `lock(name, wait)`:
    holds the right to compile a kernel; False if another process has it."""

    def __init__(
        self,
        on_start: Callable[[str, int], None],
        on_done: Callable[[str, bytes], None],
        read: Callable[[str], bytes] = _missing,
        lock: Callable[[str, bool], contextlib.AbstractContextManager[bool]] = _unlocked,
    ) -> None:
        self._on_start, self._on_done, self._read, self._lock_kernel = on_start, on_done, read, lock
        self._postponed: set[str] = set()  # kernels that another process was compiling
        self.command = [sys.executable, "-P", "-m", "logitless.backends.cpu.compiler.workers"]
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._results: dict[str, Future[bytes]] = {}
        self._n_threads = 0  # each feeds one process

    def submit(self, names: Iterable[str]) -> None:
        """Queue kernels for compilation, in this order; return at once."""
        with self._lock:
            new = [name for name in names if name not in self._results]
            self._results.update((name, Future()) for name in new)
            self._waiting += new
            for _ in range(min(len(new), min(cores(), MAX_PROCESSES) - self._n_threads)):
                self._n_threads += 1
                threading.Thread(target=self._feed, name="compile", daemon=True).start()

    def result(self, name: str) -> bytes:
        """Wait for the code of a queued kernel. Empty when it was not queued or did not compile."""
        future = self._results.get(name)
        code = future.result() if future else b""
        self._results.pop(name, None)
        return code

    def wait(self) -> None:
        """Wait for all queued kernels."""
        with self._lock:
            waiting = list(self._results.values())
        for future in waiting:
            future.result()

    def _next(self) -> str | None:
        with self._lock:
            if not self._waiting:
                self._n_threads -= 1
                return None
            return self._waiting.popleft()

    def _postpone(self, name: str) -> bool:
        """Put a kernel that another process compiles behind the waiting ones, once; False: wait for it."""
        with self._lock:
            if name in self._postponed or not self._waiting:
                return False
            self._postponed.add(name)
            self._waiting.append(name)
            return True

    def _feed(self) -> None:
        # an empty part is the cwd
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            return self._retire()
        # closing flushes bytes that a dead process did not read
        with contextlib.suppress(BrokenPipeError), process:
            while (name := self._next()) is not None:
                with contextlib.ExitStack() as held:
                    if not held.enter_context(self._lock_kernel(name, False)):
                        if self._postpone(name):
                            continue
                        held.enter_context(self._lock_kernel(name, True))
                    code = self._read(name)
                    if not code:
                        self._on_start(name, len(self._waiting))
                        answer = _ask(process, name)
                        # crashed or killed: another worker may have better luck with the rest
                        if answer is None:
                            process.kill()
                            self._results[name].set_result(b"")
                            return self._retire()
                        if code := answer:
                            self._on_done(name, code)
                self._results[name].set_result(code)
        return None

    def _retire(self) -> None:
        """Retire one worker. The last one resolves all waiting kernels as not compiled."""
        with self._lock:
            self._n_threads -= 1
            while self._waiting and not self._n_threads:
                self._results[self._waiting.popleft()].set_result(b"")


def _ask(process: subprocess.Popen[bytes], name: str) -> bytes | None:
    """A worker's code of a kernel, empty if it does not compile; None if the worker has died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(name.encode() + b"\n")
        process.stdin.flush()
        size = int(process.stdout.readline())
        code = process.stdout.read(size)
    except (OSError, ValueError):
        return None
    return code if len(code) == size else None


def _serve() -> None:
    """Main loop of a compile worker."""
    answers = open(os.dup(1), "wb")  # noqa: SIM115
    os.dup2(2, 1)  # keeps prints of numba and LLVM out of the answers
    names: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            names.put(line.strip())
        os._exit(0)  # also in the middle of a kernel

    threading.Thread(target=read, daemon=True).start()
    from logitless.backends.cpu.compiler.kernel_source import compile_kernel

    while True:
        try:
            code = compile_kernel(names.get())
        except Exception:  # the parent compiles it again and reports the error
            code = b""
        answers.write(b"%d\n%b" % (len(code), code))
        answers.flush()


if __name__ == "__main__":
    _serve()
