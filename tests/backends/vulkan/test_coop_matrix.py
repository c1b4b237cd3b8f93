"""Choice of cooperative matrices, without a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.backends.errors import DeviceLost
from logitless.backends.gpu.device import lower_all
from logitless.backends.gpu.language.dialect import SIMT
from logitless.backends.vulkan import autotune, coop_matrix
from logitless.backends.vulkan.api import COMPUTE
from logitless.backends.vulkan.autotune import TunedKernel, known, measure
from logitless.backends.vulkan.coop_matrix import F32, I8, I32, CoopMatrixEntry, Matrices, choose
from logitless.backends.vulkan.instance import DeviceInfo
from logitless.cli.commands.machine.devices import as_text, vulkan_devices
from logitless.graph.backend import Location
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import Tensor, feed, variable

F16 = 0
BYTES, FLOATS = (I8, I8, I32, I32), (F16, F16, F32, F32)


def entries(sizes: Sequence[tuple[int, int, int]], types: tuple[int, int, int, int]) -> list[CoopMatrixEntry]:
    return [CoopMatrixEntry(s, types) for s in sizes]


@pytest.mark.parametrize(
    ("found", "subgroup", "taken"),
    [
        (entries([(16, 16, 16), (16, 8, 16)], FLOATS) + entries([(16, 16, 32), (16, 8, 32)], BYTES), 32, "16x16x32"),
        (entries([(16, 16, 16)], FLOATS) + entries([(16, 16, 16)], BYTES), 64, "16x16x16"),
        (entries([(8, 16, 16)], FLOATS) + entries([(8, 16, 32)], BYTES), 32, "8x16x32"),
        (entries([(8, 8, 8)], (F32, F32, F32, F32)) + entries([(8, 8, 8)], BYTES), 8, "8x8x8"),
        (entries([(16, 16, 32)], BYTES), 32, None),  # scales cannot be applied without f32 of the same size
        (entries([(16, 16, 16)], FLOATS), 32, None),
        (entries([(16, 16, 16)], FLOATS) + entries([(16, 16, 64)], BYTES), 32, None),  # a block has 32 k
        (entries([(32, 32, 8)], FLOATS) + entries([(32, 32, 16)], BYTES), 8, None),  # 4 tiles for 16 subgroups
        ([], 32, None),
    ],
)
def test_choose_takes_the_largest_size_that_fits(
    found: list[CoopMatrixEntry], subgroup: int, taken: str | None
) -> None:
    matrices = choose(found, subgroup)
    assert (str(matrices) if matrices else None) == taken
    assert matrices is None or matrices.constants["SG"] == subgroup


@pytest.mark.parametrize(
    ("sizes", "stages", "fixed"),
    [((32, 32), 0, True), ((32, 64), COMPUTE, False), ((32, 64), 0, None), ((64, 64), 0, None)],
)
def test_a_subgroup_size_need_not_be_required_where_it_is_the_only_one(
    sizes: tuple[int, int], stages: int, fixed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVK has subgroups of 32 and no stage that can require them."""
    supported = entries([(16, 16, 16)], FLOATS) + entries([(16, 16, 32)], BYTES)
    monkeypatch.setattr(coop_matrix, "entries", lambda instance, device: supported)
    limits = SimpleNamespace(maxComputeSharedMemorySize=49152, maxComputeWorkGroupInvocations=1024)
    v13 = SimpleNamespace(requiredSubgroupSizeStages=stages, maxComputeWorkgroupSubgroups=32)
    v13.minSubgroupSize, v13.maxSubgroupSize = sizes
    core = SimpleNamespace(limits=limits, deviceType=2, vendorID=0x10DE)
    matrices = coop_matrix.find(None, None, set(coop_matrix.NEEDS), core, 32, v13)
    assert (matrices and matrices.fixed) == fixed
    core.vendorID = coop_matrix.INTEL  # the smallest size that a pipeline can require
    v13.minSubgroupSize, v13.maxSubgroupSize = 16, 32
    intel = coop_matrix.find(None, None, set(coop_matrix.NEEDS), core, 32, v13)
    assert (intel and (intel.subgroup, intel.fixed)) == ((16, False) if stages else None)


INFO = DeviceInfo(
    index=0,
    name="a device",
    kind="discrete",
    driver="1",
    api=(1, 3, 0),
    memory_bytes=1 << 30,
    features=frozenset({"shaderIntegerDotProduct"}),
    extensions=frozenset(),
    queue_family=0,
    fast_dots=True,
    matrices=Matrices(16, 16, 32, 32),
    broadcasts=True,
    lanes=32,
    vendor=0,
    max_invocations=1024,
    local_bytes=32 << 10,
    identity=b"device and driver",
    card=b"",
    missing="",
    handle=None,
    instance=None,  # type: ignore[arg-type]
)


@pytest.mark.parametrize(("vendor", "lanes", "rows"), [(0x5143, 64, 4), (0x1002, 32, 8), (0x8086, 8, 4)])
def test_products_of_floats_have_four_rows_a_group_where_registers_are_few(vendor: int, lanes: int, rows: int) -> None:
    shape = autotune.class_of(replace(INFO, vendor=vendor, lanes=lanes, fast_dots=False))
    w = variable("w", (4096, 64), "q8_0", constant=True)
    for m in (5, 512):
        (product,) = lower_all([linear(feed("x", (m, 64)), w)], shape)
        assert dict(product.defines)["MT"] == rows


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path))
    for name in (autotune.DOTS, autotune.MATRICES):
        monkeypatch.delenv(name, raising=False)


class Device:
    """A backend whose products take the time that it is told, matrices of fewer rows than
    `few` ten times as much.

    `right`: whether matrices give the bits of dots.
    """

    name = "vulkan:0"

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, dots: float, matrices: float, *, right: bool = True, few: int = 0
    ) -> None:
        self.shape, self.seconds, self.right = replace(SIMT, dot=True), {False: dots, True: matrices}, right
        self.few = few
        self.device: Any = type("Device", (), {"info": INFO})
        self.now, self.last, self.n_sizes = 0.0, False, 0
        monkeypatch.setattr(autotune.time, "perf_counter", lambda: self.now)

    def alloc(self, nbytes: int) -> None: ...
    def load(self, t: Tensor, raw: np.ndarray) -> None: ...
    def wait(self) -> None: ...

    def upload(self, place: Location, data: np.ndarray) -> None:
        self.n_sizes += 1

    def compile(self, nodes: Sequence[Tensor], place: Callable[[Tensor], Location]) -> Any:
        coop = self.shape.coop > 0
        seconds = self.seconds[coop] * (10 if coop and nodes[0].shape[0] < self.few else 1)

        def run() -> None:
            self.now += seconds
            self.last = coop

        return type("Program", (), {"run": staticmethod(run)})

    def download(self, place: Location, nbytes: int) -> np.ndarray:
        return np.full(4, 0 if self.right else self.last, np.uint8)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return lambda *seconds, **how: Device(monkeypatch, *seconds, **how)


def test_autotune_takes_the_faster_kernel_and_caches_it(device: Callable[..., Any]) -> None:
    assert known(INFO) is None
    assert measure(device(3e-4, 1e-4)) == TunedKernel(True, "3.00 times as fast as integer dot products")
    kept = known(INFO)
    assert kept is not None
    assert kept.used
    assert known(replace(INFO, identity=b"device and another driver")) is None
    assert known(replace(INFO, matrices=Matrices(16, 16, 16, 32))) is None
    assert measure(device(1e-4, 3e-4)) == TunedKernel(False, "integer dot products are 3.00 times as fast")
    assert known(INFO) == TunedKernel(False, "integer dot products are 3.00 times as fast")


@pytest.mark.parametrize(("few", "rows"), [(0, 33), (48, 33), (64, 65), (200, 129)])
def test_autotune_finds_the_first_rows_where_matrices_win(device: Callable[..., Any], few: int, rows: int) -> None:
    """On a large GPU, matrices of few rows leave most of it idle."""
    found = measure(device(3e-5, 1e-5, few=few))
    assert (found.used, found.rows) == (True, rows)
    assert known(INFO) == found


def test_autotune_of_a_slow_device_stays_in_its_budget(device: Callable[..., Any]) -> None:
    """At most 0.3 s for both, where a large product takes 64 times as long as a small one."""
    slow = device(0.06, 0.05)
    assert measure(slow).used
    assert slow.now < 0.3
    assert slow.n_sizes == 1
    quick = device(1e-4, 2e-4)
    assert not measure(quick).used
    assert quick.n_sizes == 2


def test_autotune_refuses_matrices_with_wrong_bits(device: Callable[..., Any]) -> None:
    assert measure(device(1, 1e-6, right=False)) == TunedKernel(False, "the driver computes them wrongly")


def test_autotune_after_a_driver_failure_is_not_repeated(
    device: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = device(1e-4, 1e-4)
    before = backend.shape

    def refuse(nodes: object, place: object) -> None:
        raise OSError("Vulkan: compiling it failed")

    monkeypatch.setattr(backend, "compile", refuse)
    with caplog.at_level(logging.INFO, "logitless.devices"):
        assert measure(backend) == TunedKernel(False, "Vulkan: compiling it failed")
    assert "not used: Vulkan: compiling it failed" in caplog.text
    assert backend.shape == before

    def die(nodes: object, place: object) -> None:
        raise DeviceLost("Vulkan: the device was lost")

    monkeypatch.setattr(backend, "compile", die)
    with pytest.raises(DeviceLost):
        measure(backend)
    assert known(INFO) == TunedKernel(False, "the driver did not survive the trial")


def test_known_choice_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(replace(INFO, matrices=None)) == TunedKernel(False, "the device has none that fit")
    without = known(replace(INFO, fast_dots=False))
    assert without is not None
    assert not without.used
    for wish, used in (("1", True), ("0", False)):
        monkeypatch.setenv(autotune.MATRICES, wish)
        assert known(INFO) == TunedKernel(used, f"LOGITLESS_VULKAN_MATRICES={wish}")
    monkeypatch.setenv(autotune.DOTS, "0")
    without = known(INFO)
    assert without is not None
    assert not without.used


@pytest.mark.parametrize(
    ("info", "wish", "told"),
    [
        (INFO, "1", "integer dot products: used; cooperative matrices (16x16x32): used (LOGITLESS_VULKAN_MATRICES=1)"),
        (INFO, "", "cooperative matrices (16x16x32): not yet known (timed when the device is first opened)"),
        (replace(INFO, fast_dots=False, matrices=None), "", "products: not used; cooperative matrices: none"),
    ],
)
def test_devices_command_shows_the_choice(
    info: DeviceInfo, wish: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(autotune.MATRICES, wish)
    monkeypatch.setattr("logitless.backends.vulkan.instance.all_devices", lambda: [info])
    assert told in as_text(vulkan_devices())
