"""Workers of data-parallel training as processes of this machine, with vectors in shared memory."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from logitless.training.errors import TrainingError
from logitless.training.parallel.coordinator import Transport, WorkerLost
from logitless.training.parallel.worker import GradientWorker, Recipe
from logitless.training.trainable import F32

_SHARED_MEMORY = "/dev/shm"  # where the system has it; files elsewhere do as well
_COMMAND = "from logitless.training.parallel.processes import serve; serve()"


class FileStore:
    """Vectors in files, which every process maps into its memory. A file is of the process that
    wrote it, in a folder of its own, until another one takes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._numbers = count()

    def put(self, values: F32) -> Path:
        path = self._folder / str(next(self._numbers))
        values.tofile(path)
        return path

    def get(self, ref: Path) -> F32:
        return np.memmap(ref, np.float32, "r")

    def take(self, ref: Path) -> F32:
        values = self.get(ref)
        ref.unlink()  # its memory lasts as long as the array
        return values

    def clear(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()


class Processes(Transport):
    """Child processes, which talk by their standard input and output."""

    def __init__(self) -> None:
        shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="logitless-", dir=shared))
        self.store = FileStore(self.folder / "0")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(self, rank: int, recipe: Recipe, n_shards: int) -> None:
        self._end(rank)
        folder = self.folder / str(rank)
        shutil.rmtree(folder, ignore_errors=True)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this process's
        )
        self._processes[rank] = process
        with suppress(WorkerLost):  # the first answer tells it
            self._write(rank, (recipe, folder, rank, n_shards))

    def send(self, rank: int, method: str, *args: Any) -> None:
        self._write(rank, (method, args))

    def _write(self, rank: int, message: object) -> None:
        stdin = self._process(rank).stdin
        assert stdin is not None
        try:
            pickle.dump(message, stdin)
            stdin.flush()
        except OSError:
            raise self._lost(rank) from None

    def receive(self, rank: int) -> Any:
        stdout = self._process(rank).stdout
        assert stdout is not None
        try:
            succeeded, answer = pickle.load(stdout)
        except (EOFError, pickle.UnpicklingError, OSError):
            raise self._lost(rank) from None
        if not succeeded:
            raise TrainingError(f"worker {rank}: {answer}")
        return answer

    def _process(self, rank: int) -> subprocess.Popen[bytes]:
        process = self._processes.get(rank)
        if process is None:
            raise WorkerLost(f"worker {rank} has ended")
        return process

    def _lost(self, rank: int) -> WorkerLost:
        code = self._end(rank, exited=True)
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        return WorkerLost(f"worker {rank} has ended {how}")

    def _end(self, rank: int, *, exited: bool = False) -> int:
        """End a rank's process, if there is one; returns its exit status. `exited`: it ends by itself."""
        process = self._processes.pop(rank, None)
        if process is None:
            return 0
        if not exited:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # it has ended with a message unread
                assert pipe is not None
                pipe.close()
        return process.wait()

    def close(self) -> None:
        for rank in list(self._processes):
            self._end(rank)
        shutil.rmtree(self.folder, ignore_errors=True)


def serve() -> None:
    """Answer the coordinator's messages: the main function of a worker's process."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        messages: SimpleQueue[Any] = SimpleQueue()
        recipe, folder, rank, n_shards = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_read, args=(sys.stdin.buffer, messages, folder), daemon=True).start()
        store = FileStore(folder)
        try:
            with recipe.steps() as steps:
                worker = GradientWorker(steps, store, rank, n_shards)
                while True:
                    method, args = messages.get()
                    pickle.dump((True, getattr(worker, method)(*args)), answers)
                    answers.flush()
        except Exception as error:
            pickle.dump((False, " ".join(str(error).split()) or type(error).__name__), answers)


def _read(stream: IO[bytes], messages: SimpleQueue[Any], folder: Path) -> None:
    """Queue messages until the coordinator ends; then this process ends as well."""
    try:
        while True:
            messages.put(pickle.load(stream))
    except (EOFError, pickle.UnpicklingError, OSError):
        shutil.rmtree(folder.parent, ignore_errors=True)
        os._exit(0)
