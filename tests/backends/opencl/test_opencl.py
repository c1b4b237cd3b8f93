"""OpenCL backend: lost devices, released plans, compiler output in the log."""

from __future__ import annotations

import logging
import platform
import struct
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from logitless.backends.errors import DeviceLost
from logitless.backends.gpu.language import prelude
from logitless.backends.gpu.language.dialect import KERNELS
from logitless.graph.backend import Backend, Location

if TYPE_CHECKING:
    from logitless.backends.opencl.backend import OpenCLBackend


@pytest.fixture
def device(open_device: Callable[[str], Backend]) -> OpenCLBackend:
    return cast("OpenCLBackend", open_device("opencl:0"))


def program(device: OpenCLBackend) -> Any:
    from logitless.backends.opencl.programs import build_program

    return build_program(device._context, "__kernel void f(__global float *x, const ulong at) { x[at] = 1; }")


def test_refused_launch_raises_device_lost(device: OpenCLBackend) -> None:
    from logitless.backends.opencl.native_launch import Kernels, table

    bound = Kernels()
    row = bound.bind(program(device), "f", [], (1, 1, 1), 1)  # nothing is bound
    with pytest.raises(DeviceLost, match=r"opencl:0: clEnqueueNDRangeKernel failed with -52"):  # CL_INVALID_KERNEL_ARGS
        device.queue(table([row]))


def test_missing_kernel_or_argument_of_wrong_size_raises(device: OpenCLBackend) -> None:
    import pyopencl as cl

    from logitless.backends.opencl.native_launch import Kernels

    made = program(device)
    with pytest.raises(cl.Error, match="clCreateKernel failed with -46"):  # CL_INVALID_KERNEL_NAME
        Kernels().bind(made, "g", [], (1, 1, 1), 1)
    with pytest.raises(cl.Error, match="clSetKernelArg failed with -51"):  # CL_INVALID_ARG_SIZE
        Kernels().bind(made, "f", [b"", b"\0" * 3], (1, 1, 1), 1)


def test_bound_kernels_run_and_are_released_with_their_plan(device: OpenCLBackend) -> None:
    from logitless.backends.opencl.native_launch import Kernels, table

    made, memory = program(device), device.alloc(8)
    before = made.reference_count
    bound = Kernels()
    arguments = [struct.pack("@P", memory.buffer.int_ptr), struct.pack("@Q", 1)]
    device.queue(table([bound.bind(made, "f", arguments, (1, 1, 1), 1)]))
    assert device.download(Location(memory), 8).view("f4").tolist() == [0.0, 1.0]
    held = made.reference_count
    del bound
    end = time.monotonic() + 10
    while made.reference_count > before and time.monotonic() < end:  # PoCL's thread forgets its command a moment later
        time.sleep(0.01)
    counts = "Portable Computing Language" in device.identity  # NVIDIA's kernels are not counted
    assert (held, made.reference_count) == (before + counts, before)


@pytest.fixture
def compiler_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """A warning that every program gives, a new one each time: no cache knows its source."""
    text = f"warning_{uuid.uuid4().hex}"
    monkeypatch.setattr(prelude, "CL", f"#warning {text}\ntypedef int {text};\n{prelude.CL}")
    caplog.set_level(logging.DEBUG, "logitless.devices")
    return text


def log_levels(caplog: pytest.LogCaptureFixture, text: str) -> list[int]:
    """Levels of the log lines that contain the text."""
    return [record.levelno for record in caplog.records if text in record.getMessage()]


def test_compiler_output_of_a_kernel_is_a_debug_line(
    device: OpenCLBackend, compiler_warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings are errors in tests: a Python warning would be raised."""
    from logitless.backends.opencl.programs import Programs

    defines = KERNELS["top_experts"].variants(device.shape)[0]
    Programs(device._context, device.identity, device.shape).program("top_experts", defines)
    assert log_levels(caplog, compiler_warning) == [logging.DEBUG]


def test_cached_binary_builds_without_warning(
    device: OpenCLBackend,
    compiler_warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from logitless.backends.opencl.programs import Programs

    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path))
    defines = KERNELS["top_experts"].variants(device.shape)[0]
    for _ in range(2):
        made = Programs(device._context, "keeps binaries", device.shape).program("top_experts", defines)
        assert made.kernel_names == "top_experts"
    assert len(list((tmp_path / "opencl").iterdir())) == 1
    assert logging.DEBUG in log_levels(caplog, compiler_warning)


def test_programs_are_compiled_in_one_place() -> None:
    folder = Path(__file__).resolve().parents[3] / "backends" / "opencl"
    assert [path.name for path in folder.glob("*.py") if "cl.Program(" in path.read_text()] == ["programs.py"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's calling convention")
def test_abi_warning_for_float16_arguments_is_off(device: OpenCLBackend, caplog: pytest.LogCaptureFixture) -> None:
    """Clang warns of each function that passes 16 floats where registers have 8: all
    processors with AVX2.
    """
    if device.shape.name != "cpu":
        pytest.skip("no vectors of 16")
    from logitless.backends.opencl.programs import build_program

    caplog.set_level(logging.DEBUG, "logitless.devices")
    half = '__attribute__((noinline, target("no-avx512f")))'
    code = f"""
typedef int new_{uuid.uuid4().hex};
{half} float16 twice(float16 x) {{ return x * 2.0f; }}
{half} void work(__global float16* x) {{ *x = twice(*x); }}
__kernel void f(__global float16* x) {{ work(x); }}
"""
    build_program(device._context, code)
    assert "changes the ABI" in caplog.text
    caplog.clear()
    build_program(device._context, prelude.CL + prelude.CL_CPU + code)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("system", "names"),
    [
        ("linux", ["libOpenCL.so.1", "libOpenCL.so"]),
        ("win32", ["OpenCL.dll"]),
        ("darwin", ["/System/Library/Frameworks/OpenCL.framework/OpenCL"]),
    ],
)
def test_loader_has_the_names_of_the_system(
    device: OpenCLBackend, system: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from logitless.backends.errors import DeviceError
    from logitless.backends.opencl import native_launch

    tried: list[str] = []

    def missing(name: str) -> object:
        tried.append(name)
        raise OSError(name)

    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr(native_launch.ctypes, "PyDLL", missing)
    with pytest.raises(DeviceError, match="the OpenCL loader's functions cannot be found"):
        native_launch._functions.__wrapped__()
    assert tried[1:] == names  # after the library that pyopencl is linked with
