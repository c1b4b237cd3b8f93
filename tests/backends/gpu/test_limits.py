"""Limits of a device: threads and memory of a group, as kernels declare them."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from logitless.backends.gpu.device import dispatches, lower_all, supports
from logitless.backends.gpu.language.dialect import KERNELS, SIMT, SOFT, Shape, TooLarge
from logitless.graph.backend import Backend
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.tensor import feed, variable
from logitless.graph.testing.conformance import OK, UNSUPPORTED, problems, register_all, run

register_all()
LEAST = replace(SIMT, threads=128, local_bytes=16 << 10)  # what Vulkan guarantees
WORKGROUP = 4  # storage class
DECLARATIONS = {"int": 21, "float": 22, "vector": 23, "array": 28, "pointer": 32, "constant": 43, "variable": 59}


def local_bytes(code: bytes) -> int:
    """Bytes of a group's memory that a SPIR-V file without specialisation declares."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    sizes: dict[int, int] = {}  # of types, and the values of constants
    total, at = 0, 5
    while at < len(words):
        op, n = words[at] & 0xFFFF, words[at] >> 16
        a = words[at + 1 : at + n]
        if op in (DECLARATIONS["int"], DECLARATIONS["float"]):
            sizes[a[0]] = a[1] // 8
        elif op == DECLARATIONS["vector"]:
            sizes[a[0]] = sizes.get(a[1], 0) * a[2]
        elif op == DECLARATIONS["array"]:
            sizes[a[0]] = sizes.get(a[1], 0) * sizes.get(a[2], 0)
        elif op == DECLARATIONS["pointer"]:
            sizes[a[0]] = sizes.get(a[2], 0)
        elif op == DECLARATIONS["constant"]:
            sizes[a[1]] = a[2]
        elif op == DECLARATIONS["variable"] and a[2] == WORKGROUP:
            total += sizes[a[0]]
        at += n
    return total


def test_declared_memory_of_groups_is_the_shaders() -> None:
    """glslc leaves out what a variant does not use, so a declaration may be larger."""
    from logitless.backends.vulkan.pipelines import SHADERS, shader_name

    n = 0
    for kernel in KERNELS.values():
        # of each kernel the first variant and the last: reading takes long
        variants = [v for shape in (SIMT, SOFT) for v in kernel.variants(shape)] if not kernel.special else []
        for defines in dict.fromkeys([*variants[:1], *variants[-1:]] if kernel.local else []):
            found = local_bytes((SHADERS / shader_name(kernel, defines)).read_bytes())
            assert found <= kernel.local_bytes(defines) <= 2 * found + 128, shader_name(kernel, defines)
            n += 1
    assert n > 100


@pytest.mark.parametrize("shape", [LEAST, replace(LEAST, dot=True), replace(LEAST, local_bytes=8 << 10)])
def test_products_and_norms_fit_every_device(shape: Shape) -> None:
    w = variable("w", (4096, 4096), "q8_0", constant=True)
    for rows in (1, 4, 16, 17, 600):
        x = feed("x", (rows, 4096))
        for d in lower_all([linear(x, w), rms_norm(x, feed("g", (4096,)), eps=1e-5)], shape):
            assert not KERNELS[d.kernel].excess(d.defines, shape)


def test_kernel_that_does_not_fit_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "logitless.devices")
    (sample,) = next(problems("log_probs")).roots
    for _ in range(2):
        assert not supports(sample, LEAST, "vulkan:7")
    line = "vulkan:7: log_probs runs on the next device: kernel log_probs needs groups of 256 threads"
    assert [record.getMessage() for record in caplog.records] == [f"{line}, the device has 128"]
    with pytest.raises(TooLarge):
        dispatches(sample, LEAST)
    assert supports(sample, SIMT, "vulkan:7")


def test_device_with_the_least_limits_computes_rightly(open_device: Callable[[str], Backend]) -> None:
    from logitless.backends.vulkan.backend import VulkanBackend

    open_device("vulkan:0")
    backend = VulkanBackend()
    backend.shape = LEAST
    labels = [f"f32[{rows}, 512] q8_0[" for rows in (1, 33)]
    cases = [p for p in problems("linear") if "odd" not in p.label and any(w in p.label for w in labels)]
    cases += [next(problems("expert_linear")), next(problems("rms_norm")), next(problems("log_probs"))]
    outcomes = [run(p, [backend]).status for p in cases]
    backend.close()
    assert outcomes == [OK] * 4 + [UNSUPPORTED]
