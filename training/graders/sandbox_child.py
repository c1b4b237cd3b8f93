"""The process of a python grader, without sockets, other processes and changes of files.

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

# by machine: its name in filters, clone, openat, and what is refused: networks, other processes and
# programs, changes of files
_MACHINES: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E, 56, 257,
        (
            *(41, 42, 53, 57, 58, 59, 62, 101, 200, 272, 310, 311, 321, 322, 424, 425, 434, 438),
            *(2, 76, *range(82, 89), *range(90, 95), 133, *range(188, 191), *range(258, 261), *range(263, 267)),
            *(268, 316),
        ),
    ),
    "aarch64": (
        0xC00000B7, 220, 56,
        (
            *(97, 117, 129, 130, 198, 199, 203, 221, 270, 271, 280, 281, 424, 425, 434, 438),
            *(*range(5, 8), *range(33, 39), 45, *range(52, 56), 276),
        ),
    ),
}  # fmt: skip
_WRITES = 0x1 | 0x2 | 0x40 | 0x200  # flags of openat: write only, read and write, create, truncate
_CLONE3, _OPENAT2, _THREAD = 435, 437, 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter)))


def shut_off() -> None:
    """Give up sockets, other processes and programs for good (seccomp). OSError: it is not possible."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        raise OSError(f"python graders need Linux on x86_64 or aarch64, not {sys.platform} on {machine}")
    arch, clone, openat, refused = _MACHINES[machine]
    rules = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32's numbers
        (_RETURN, 0, 0, _EPERM),
        (_EQUAL, 1, 0, _CLONE3),  # the C library takes the older calls then
        (_EQUAL, 0, 1, _OPENAT2),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for number in refused:
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    rules += [
        (_EQUAL, 0, 4, openat),
        (_LOAD, 0, 0, 32),
        (_ANY_OF, 0, 1, _WRITES),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_OF, 1, 0, _THREAD),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    array = (_Filter * len(rules))(*(_Filter(*rule) for rule in rules))
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(rules), array)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.byref(program), 0, 0)):  # no new privileges; the filter
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the grader cannot be shut off from the network here")


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


def reward(given: dict[str, object]) -> dict[str, object]:
    """The answer of the grader's process."""
    names: dict[str, object] = {"__name__": "grader"}
    try:
        exec(compile(str(given["source"]), "grader", "exec"), names)
        grade = names.get("grade")
        if not callable(grade):
            return {"error": "it has no function grade(sample, item)", "kind": "python_grader_runtime_error"}
        return {"reward": float(grade(given["sample"], given["item"]))}
    except BaseException as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return {"error": told, "kind": "python_grader_runtime_error"}


def main() -> None:
    given = json.load(sys.stdin)
    # what the source prints goes nowhere
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    try:
        limit(given["seconds"], given["nbytes"])
        shut_off()
        answer = reward(given)
    except (OSError, ValueError) as error:
        answer = {"error": str(error), "kind": "python_grader_server_error"}
    told = json.dumps(answer).encode()
    with os.fdopen(out, "wb") as stream:
        stream.write(told)


if __name__ == "__main__":
    main()
