"""Native launches: binding of arguments and the launches of a step without pyopencl.

A plan binds thousands of arguments and a step has hundreds of launches. Through pyopencl a kernel
object costs 0.3 ms (it generates Python code for each), an argument 12 µs and a launch 9 µs. The
functions are those of the loader that pyopencl is linked with. Binding keeps the GIL, since none of
it waits. The launches of a step are one call of machine code without the GIL: the driver's threads
preempt a thread that gives them work, and no other thread could take the GIL meanwhile."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import pyopencl as cl

from logitless.backends.errors import DeviceError

POINTER, UINT = ctypes.c_void_p, ctypes.c_uint
ARGUMENTS: dict[str, list[Any]] = {
    "clCreateKernel": [POINTER, ctypes.c_char_p, POINTER],
    "clSetKernelArg": [POINTER, UINT, ctypes.c_size_t, POINTER],
    "clReleaseKernel": [POINTER],
    "clEnqueueNDRangeKernel": [],
    "clGetDeviceInfo": [POINTER, UINT, ctypes.c_size_t, POINTER, POINTER],
}
LOADERS = {  # by sys.platform
    "win32": ("OpenCL.dll",),
    "darwin": ("/System/Library/Frameworks/OpenCL.framework/OpenCL",),
}
OTHER_LOADERS = ("libOpenCL.so.1", "libOpenCL.so")  # of Linux and the BSDs
ROW = 10  # words of a launch: the kernel, threads in all (x, y, z), threads a group, threads before the first
LAUNCH_ALL = f"""
define i32 @launch_all(ptr %enqueue, ptr %queue, ptr %rows, i64 %n) {{
entry:
  %none = icmp eq i64 %n, 0
  br i1 %none, label %done, label %each
each:
  %i = phi i64 [0, %entry], [%next, %queued]
  %word = mul i64 %i, {ROW}
  %row = getelementptr i64, ptr %rows, i64 %word
  %kernel = load ptr, ptr %row
  %all = getelementptr i64, ptr %row, i64 1
  %own = getelementptr i64, ptr %row, i64 4
  %first = getelementptr i64, ptr %row, i64 7
  %status = call i32 %enqueue(ptr %queue, ptr %kernel, i32 3, ptr %first, ptr %all, ptr %own, i32 0, ptr null, ptr null)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %done, label %queued
queued:
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %each, label %done
done:
  %result = phi i32 [0, %entry], [%status, %each], [0, %queued]
  ret i32 %result
}}"""


class CallFailed(cl.Error):
    """The error that pyopencl would raise. `code` is OpenCL's."""

    code = 0

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with {code}")
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


@functools.cache
def _functions() -> dict[str, Any]:
    """The loader's functions by name. DeviceError where the loader cannot be reached."""
    # Windows does not find functions in the libraries that a library is linked with
    for library in (cl._cl.__file__, *LOADERS.get(sys.platform, OTHER_LOADERS)):
        try:
            loader = ctypes.PyDLL(library)
            functions = {name: getattr(loader, name) for name in ARGUMENTS}
        except (AttributeError, OSError):
            continue
        for name, function in functions.items():
            function.argtypes = ARGUMENTS[name]
            function.restype = POINTER if name == "clCreateKernel" else ctypes.c_int
        return functions
    raise DeviceError("the OpenCL loader's functions cannot be found")


@functools.cache
def _launch_all() -> tuple[Callable[..., int], Any]:
    """`LAUNCH_ALL` as machine code, and the object that keeps it alive."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    compiled = llvm.create_mcjit_compiler(llvm.parse_assembly(LAUNCH_ALL), machine)
    compiled.finalize_object()
    kind = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, POINTER, ctypes.c_int64)
    return kind(compiled.get_function_address("launch_all")), compiled


Row = tuple[int, ...]  # words of a launch
Table = npt.NDArray[np.int64]  # rows of launches


class Kernels:
    """Kernels with bound arguments, which live as long as this."""

    def __init__(self) -> None:
        self._functions = _functions()
        self._kernels: list[int] = []
        release = self._functions["clReleaseKernel"]
        # the driver may be gone by then
        weakref.finalize(self, _each, release, self._kernels).atexit = False

    def bind(self, program: Any, name: str, arguments: Sequence[bytes], groups: Sequence[int], threads: int) -> Row:
        """A launch of a kernel of a program. `arguments` are raw bytes; memory that they point to is
        the caller's to keep."""
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
        return kernel, gx * threads, gy, gz, threads, 1, 1, 0, 0, 0


def part(row: Row, first: int, count: int) -> Row:
    """A range of the groups of a launch, along the axis that has most."""
    kernel, sizes, own, before = row[0], list(row[1:4]), row[4:7], list(row[7:])
    axis = max(range(3), key=lambda i: sizes[i] // own[i])
    sizes[axis] = count * own[axis]
    before[axis] += first * own[axis]
    return kernel, *sizes, *own, *before


def table(rows: Sequence[Row]) -> Table:
    """Launches as the machine code reads them."""
    return np.array(rows, np.int64).reshape(-1, ROW)


def queue_all(queue: Any, launches: Table) -> None:
    """Queue the launches of a table in order."""
    enqueue = ctypes.cast(_functions()["clEnqueueNDRangeKernel"], POINTER)
    status = _launch_all()[0](enqueue, queue.int_ptr, launches.ctypes.data, len(launches))
    if status:
        raise CallFailed("clEnqueueNDRangeKernel", status)


def device_info(device: Any, parameter: int, nbytes: int) -> bytes:
    """A value of a device that pyopencl does not know; empty where the driver does not."""
    out = ctypes.create_string_buffer(nbytes)
    status = _functions()["clGetDeviceInfo"](device.int_ptr, parameter, nbytes, ctypes.addressof(out), None)
    return b"" if status else out.raw


def _each(function: Any, values: list[int]) -> None:
    for value in values:
        function(value)
