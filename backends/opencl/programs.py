"""OpenCL programs: one per kernel variant, cached on disk as the driver's binary.

`build_program` is the only place that compiles OpenCL; compiler output goes to the log. PoCL has a
disk cache of its own (`use_cache_of_pocl`), and its binaries cost as much as compiling again."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from typing import Any

import pyopencl as cl

from logitless.backends import disk_cache
from logitless.backends.gpu.language.dialect import KERNELS, Defines, Shape, render_opencl

log = logging.getLogger("logitless.devices")
OPTIONS = ["-cl-std=CL1.2"]


def build_program(context: Any, code: str | bytes) -> Any:
    """Compile a program for a context of one device, from source or from the driver's binary.

    Compilers warn of correct kernels: their output is a debug line of the log, never a Python
    warning. Raises pyopencl's error, with the compiler's output, where the program is refused."""
    (device,) = context.devices
    program: Any = cl.Program(context, code) if isinstance(code, str) else cl.Program(context, [device], [code])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        program.build(OPTIONS)
    if output := (program.get_build_info(device, cl.program_build_info.LOG) or "").strip():
        log.debug("the OpenCL compiler of %s says: %s", device.name.strip(), output)
    return program


class Programs:
    """Programs of one device, cached on disk for the next process."""

    def __init__(self, context: Any, identity: str, shape: Shape) -> None:
        self._context, self._identity, self._shape = context, identity, shape
        self._keep = "PoCL" not in identity
        self._programs: dict[tuple[str, Defines], Any] = {}

    def program(self, name: str, defines: Defines) -> Any:
        key = name, defines
        if key not in self._programs:
            self._programs[key] = self._build(name, defines)
        return self._programs[key]

    def _build(self, name: str, defines: Defines) -> Any:
        source = render_opencl(KERNELS[name], defines, self._shape)
        if not self._keep:
            return build_program(self._context, source)
        digest = hashlib.sha256("\0".join([self._identity, *OPTIONS, source]).encode()).hexdigest()[:24]
        path = disk_cache.cache_folder() / "opencl" / f"{name}-{digest}"
        binary = disk_cache.read(path)
        if binary:
            try:
                return build_program(self._context, binary)
            except cl.Error:  # a driver that changed without changing its version
                pass
        program = build_program(self._context, source)
        disk_cache.write(path, program.get_info(cl.program_info.BINARIES)[0])
        return program


def use_cache_of_pocl() -> None:
    """Put PoCL's disk cache beside ours. PoCL reads the variable once, when it starts."""
    os.environ.setdefault("POCL_CACHE_DIR", str(disk_cache.writable_folder() / "pocl"))
    # pyopencl's own would keep a second copy of every program
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
