"""Child processes of tools: a bare environment, limits, and an end that takes all their descendants along."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from logitless.frontend.workers import to_thread

MARK = "LOGITLESS_TOOL"  # a variable that all descendants of a call inherit, also those in sessions of their own
MAX_TASKS = 256  # of the user, beside those that run already
MAX_FILE = 256 << 20  # bytes of a file that a command writes
SWEEP_SECONDS = 5.0
_PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "TZ", "TERM", "XDG_RUNTIME_DIR")


def environment(more: Mapping[str, str] = {}) -> dict[str, str]:
    """The variables of a child: none of this process's keys and tokens, and a mark to find it by."""
    entries = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**entries, **more, MARK: secrets.token_hex(16)}


async def start(
    command: Sequence[str], environ: Mapping[str, str], cwd: str | Path | None = None, **pipes: Any
) -> asyncio.subprocess.Process:
    """A child in a session of its own. Raises OSError."""
    return await asyncio.create_subprocess_exec(*command, env=environ, cwd=cwd, start_new_session=True, **pipes)


def limit(process: asyncio.subprocess.Process) -> None:
    """Bound what the child and its descendants may use. The system holds root to no number of processes."""
    with suppress(OSError, ValueError, ImportError, AttributeError):  # the last two: not Linux
        import resource

        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        bytes_ = MAX_FILE if hard == resource.RLIM_INFINITY else min(MAX_FILE, hard)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (bytes_, bytes_))
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NPROC)
        tasks = _tasks_of_user() + MAX_TASKS
        tasks = tasks if hard == resource.RLIM_INFINITY else min(tasks, hard)
        resource.prlimit(process.pid, resource.RLIMIT_NPROC, (tasks, tasks))


def _tasks_of_user() -> int:
    """Threads that the user runs now."""
    n, own = 0, os.getuid()
    for entry in _processes():
        with suppress(OSError):
            if os.stat(entry).st_uid == own:
                n += len(os.listdir(entry / "task"))
    return n


async def end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Kill the child with its process group, then every process that inherited the mark, until there is none."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await to_thread(lambda: _sweep(mark))
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()  # a descendant may still have the pipes
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 5)


def _sweep(mark: str) -> None:
    """Kill all processes that have the mark, until a look at the processes finds each of them another's.

    One that forks and ends while it is looked for has a child that this look has not seen; so a process
    that is gone, or that has no environment yet or any more, asks for one more look."""
    target = f"{MARK}={mark}".encode()
    others: set[str] = set()
    empty: set[str] = set()
    deadline = time.monotonic() + SWEEP_SECONDS
    sure = False
    while not sure and time.monotonic() < deadline:
        sure = True
        for entry in _processes():
            if entry.name in others:
                continue
            try:
                environ = (entry / "environ").read_bytes()
            except PermissionError:
                others.add(entry.name)
                continue
            except OSError:
                environ = b""
            if target in environ.split(b"\0"):
                sure = False
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(int(entry.name), signal.SIGKILL)
            elif environ or entry.name in empty:  # as of zombies and of the system's own threads
                others.add(entry.name)
            else:
                empty.add(entry.name)
                sure = False


def _processes() -> list[Path]:
    try:
        return [Path("/proc") / name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # not Linux
        return []
