"""Compiled OpenCL programs: one per kernel variant, kept on disk as the driver's binary.

PoCL keeps what it compiles by itself (we tell it where), and making a binary of it costs as much as compiling again.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any

import pyopencl as cl

from logitless.backends import disk_cache
from logitless.backends.gpu.language.dialect import KERNELS, Defines, Shape, render_opencl

OPTIONS = ["-cl-std=CL1.2"]


class Programs:
    """Programs of one device. What is compiled once is read from the cache by the next process."""

    def __init__(self, context: Any, device: Any, identity: str, shape: Shape) -> None:
        self._context, self._device, self._identity, self._shape = context, device, identity, shape
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
            return self._compile(source)
        digest = hashlib.sha256("\0".join([self._identity, *OPTIONS, source]).encode()).hexdigest()[:24]
        path = disk_cache.cache_folder() / "opencl" / f"{name}-{digest}"
        kept = disk_cache.read(path)
        if kept:
            try:
                return cl.Program(self._context, [self._device], [kept]).build(OPTIONS)
            except cl.Error:  # a driver that changed without changing its version
                pass
        program = self._compile(source)
        disk_cache.write(path, program.get_info(cl.program_info.BINARIES)[0])
        return program

    def _compile(self, source: str) -> Any:
        with warnings.catch_warnings():  # NVIDIA's compiler has something to say of kernels in which nothing is wrong
            warnings.simplefilter("ignore", cl.CompilerWarning)
            return cl.Program(self._context, source).build(OPTIONS)


def use_cache_of_pocl() -> None:
    """PoCL compiles for each local size on its own and keeps the result: beside ours. It reads this when it starts."""
    os.environ.setdefault("POCL_CACHE_DIR", str(disk_cache.cache_folder() / "pocl"))
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # pyopencl's own would keep a second copy of every program
