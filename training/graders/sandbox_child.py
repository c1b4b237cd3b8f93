"""The process of a python grader, in a user namespace of its own, with the system calls that computing needs.

Run as a file: JSON {"source", "sample", "item", "seconds", "nbytes"} in, {"reward"} or {"error",
"kind"} out."""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import resource
import sys
from pathlib import Path
from typing import NamedTuple


class _Machine(NamedTuple):
    """Numbers of a machine: its name in filters, the calls that are looked at, and those that are allowed."""

    arch: int
    clone: int
    fcntl: int
    ioctl: int
    openat: int
    prlimit: int
    allowed: tuple[int, ...]


# memory, time, threads, signals of its own, reading of files and of the system's description
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E, 56, 72, 16, 257, 302,
        (
            0, 1, *range(3, 16), *range(17, 26), 28, *range(32, 40), 60, 63, *range(78, 82), 89, *range(96, 101),
            *(102, 104, 107, 108, 110, 111, 127, 128, 130, 131, 137, 138, 140, 158, 186, 201, 202, 204),
            *(217, 218, 219, 221, *range(228, 234), 262, 267, *range(269, 272), 273, 274, 281, *range(290, 294)),
            *(309, 318, 324, 332, 334, 436, 439),
        ),
    ),
    "aarch64": _Machine(
        0xC00000B7, 220, 25, 29, 56, 261,
        (
            17, *range(19, 25), 43, 44, *range(48, 51), 57, 59, *range(61, 69), 72, 73, *range(78, 81), 93, 94,
            *(96, *range(98, 104), *range(113, 116), 123, 124, 128, *range(132, 138), 139, 141, 153, 160, 163),
            *(165, 168, 169, *range(172, 180), *range(214, 217), 222, 223, 226, 233, 278, 283, 291, 293, 436, 439),
        ),
    ),
}  # fmt: skip
_WRITES = 0x1 | 0x2 | 0x40 | 0x200  # flags of openat: write only, read and write, create, truncate
_FCNTL = (0, 1, 2, 3, 1030)  # copies of descriptors, their flags; no locks, no signals
_IOCTL = (0x5401, 0x5413, 0x5450, 0x5451)  # is it a terminal, how wide; close on exec
_CLONE3, _OPENAT2, _THREAD = 435, 437, 0x10000
_NEW_USER, _NEW_IPC, _NOBODY = 0x10000000, 0x08000000, 65534
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_Rule = tuple[int, int, int, int]


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter)))


def part_from_user(libc: ctypes.CDLL) -> None:
    """Enter a user namespace of its own, or of root become nobody, so that other processes' memory and
    environment cannot be read. Where the system has neither, the filter alone bounds the process."""
    if libc.unshare(_NEW_USER | _NEW_IPC) == 0 or os.getuid():
        return
    read = [Path(os.__file__), *map(Path, sys.path)]
    if all(part.stat().st_mode & 0o005 for path in read if path.exists() for part in (path, *path.parents)):
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _if_in(number: int, argument: int, values: tuple[int, ...]) -> list[_Rule]:
    """Allow a call if an argument (its low half) is one of these."""
    tests = [rule for value in values for rule in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
    return [(_EQUAL, 0, len(tests) + 2, number), _argument(argument), *tests, (_RETURN, 0, 0, _EPERM)]


def _argument(i: int, *, high: bool = False) -> _Rule:
    return (_LOAD, 0, 0, 16 + 8 * i + 4 * high)


def shut_off(libc: ctypes.CDLL) -> None:
    """Give up all system calls but those of the list, for good (seccomp). OSError: it is not possible."""
    name = platform.machine()
    if sys.platform != "linux" or name not in _MACHINES:
        raise OSError(f"python graders need Linux on x86_64 or aarch64, not {sys.platform} on {name}")
    machine = _MACHINES[name]
    rules: list[_Rule] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine.arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32's numbers
        (_RETURN, 0, 0, _EPERM),
        (_EQUAL, 1, 0, _CLONE3),  # the C library takes the older calls then
        (_EQUAL, 0, 1, _OPENAT2),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for number in machine.allowed:
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    rules += [
        (_EQUAL, 0, 4, machine.openat),  # to read
        _argument(2),
        (_ANY_OF, 0, 1, _WRITES),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, machine.clone),  # a thread
        _argument(0),
        (_ANY_OF, 0, 1, _THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
        (_EQUAL, 0, 8, machine.prlimit),  # its own limits, to read
        _argument(0),
        (_EQUAL, 0, 5, 0),
        _argument(2),
        (_EQUAL, 0, 3, 0),
        _argument(2, high=True),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
        *_if_in(machine.fcntl, 1, _FCNTL),
        *_if_in(machine.ioctl, 1, _IOCTL),
        (_RETURN, 0, 0, _EPERM),
    ]
    array = (_Filter * len(rules))(*(_Filter(*rule) for rule in rules))
    program = _Program(len(rules), array)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.byref(program), 0, 0)):  # no new privileges; the filter
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the grader cannot be shut off from the system here")


def limit(seconds: float, nbytes: int) -> None:
    """Bound memory, processor time, files and their sizes."""
    for kind, most in (
        (resource.RLIMIT_AS, nbytes),
        (resource.RLIMIT_CPU, math.ceil(seconds)),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def reward(job: dict[str, object]) -> dict[str, object]:
    """The answer of the grader's process."""
    names: dict[str, object] = {"__name__": "grader"}
    try:
        exec(compile(str(job["source"]), "grader", "exec"), names)
        grade = names.get("grade")
        if not callable(grade):
            return {"error": "it has no function grade(sample, item)", "kind": "python_grader_runtime_error"}
        return {"reward": float(grade(job["sample"], job["item"]))}
    except BaseException as error:
        reply = " ".join(f"{type(error).__name__}: {error}".split())
        return {"error": reply, "kind": "python_grader_runtime_error"}


def main() -> None:
    job = json.load(sys.stdin)
    # what the source prints goes nowhere
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        part_from_user(libc)
        limit(job["seconds"], job["nbytes"])
        shut_off(libc)
        answer = reward(job)
    except (OSError, ValueError) as error:
        answer = {"error": str(error), "kind": "python_grader_server_error"}
    reply = json.dumps(answer).encode()
    with os.fdopen(out, "wb") as stream:
        stream.write(reply)


if __name__ == "__main__":
    main()
