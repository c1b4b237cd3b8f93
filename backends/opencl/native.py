"""Kernels straight from the driver: a plan binds thousands of arguments and a step has hundreds of launches.

Through the binding a kernel object costs 0.3 ms (it makes Python code for each), an argument 12 µs and a launch 9 µs.
The functions are those of the loader that the binding itself is linked with.
Python's lock is kept: none of these calls waits for the device, and to get the lock back each time would cost more.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import pyopencl as cl

from backends.errors import DeviceError

Sizes = ctypes.c_size_t * 3
POINTER, UINT = ctypes.c_void_p, ctypes.c_uint
ARGUMENTS: dict[str, list[Any]] = {
    "clCreateKernel": [POINTER, ctypes.c_char_p, POINTER],
    "clSetKernelArg": [POINTER, UINT, ctypes.c_size_t, POINTER],
    "clReleaseKernel": [POINTER],
    "clEnqueueNDRangeKernel": [POINTER, POINTER, UINT, POINTER, POINTER, POINTER, UINT, POINTER, POINTER],
}


class CallFailed(cl.Error):
    """What the binding would raise. `code` is OpenCL's."""

    code = 0

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with {code}")
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


@functools.cache
def _functions() -> dict[str, Any]:
    """By name. DeviceError where the loader cannot be reached."""
    for library in (cl._cl.__file__, "OpenCL.dll"):  # Windows finds no functions of what a library is linked with
        try:
            loader = ctypes.PyDLL(library)
            found = {name: getattr(loader, name) for name in ARGUMENTS}
        except (AttributeError, OSError):
            continue
        for name, function in found.items():
            function.argtypes = ARGUMENTS[name]
            function.restype = POINTER if name == "clCreateKernel" else ctypes.c_int
        return found
    raise DeviceError("the OpenCL loader's functions cannot be found")


class Launches:
    """Kernels with bound arguments, to be queued in order as often as wanted."""

    def __init__(self, queue: Any) -> None:
        self._functions = _functions()
        self._queue = queue
        self._calls: list[tuple[Any, ...]] = []
        self._kernels: list[int] = []
        release = self._functions["clReleaseKernel"]
        weakref.finalize(self, _each, release, self._kernels).atexit = False  # the driver may be gone by then

    def add(self, program: Any, name: str, arguments: Sequence[bytes], groups: Sequence[int], threads: int) -> None:
        """A kernel of a program. `arguments` as the device has them; what they point to is the caller's to keep."""
        code = ctypes.c_int()
        kernel = self._functions["clCreateKernel"](program.int_ptr, name.encode(), ctypes.addressof(code))
        if not kernel:
            raise CallFailed("clCreateKernel", code.value)
        self._kernels.append(kernel)
        bind = self._functions["clSetKernelArg"]
        for i, value in enumerate(arguments):
            if status := bind(kernel, i, len(value), value):
                raise CallFailed("clSetKernelArg", status)
        gx, gy, gz = groups
        size, local = Sizes(gx * threads, gy, gz), Sizes(threads, 1, 1)
        self._calls.append((self._queue.int_ptr, kernel, 3, None, size, local, 0, None, None))

    def run(self) -> None:
        launch = self._functions["clEnqueueNDRangeKernel"]
        for call in self._calls:
            if status := launch(*call):
                raise CallFailed("clEnqueueNDRangeKernel", status)


def _each(function: Any, values: list[int]) -> None:
    for value in values:
        function(value)
