"""The device that is taken where the user names none: a GPU that is right and faster, else the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.backends import default_device, registry
from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.default_device import Candidate, DefaultDevice, Verdict, has_gpu, judge
from logitless.backends.errors import DeviceError, DeviceLost
from logitless.graph.backend import Backend

BIG = Candidate("vulkan:1", "Big", "discrete", 24 << 30, b"big", b"card 1")
OTHER_DRIVER = Candidate("vulkan:2", "Big by another driver", "discrete", 24 << 30, b"big2", b"card 1")
SMALL = Candidate("vulkan:3", "Small", "discrete", 8 << 30, b"small", b"card 2")
SHARED = Candidate("vulkan:0", "Shared", "integrated", 32 << 30, b"shared", b"card 3")
BY_OPENCL = Candidate("opencl:0", "Big (CL)", "discrete", 24 << 30, b"cl")
RIGHT, SLOW, WRONG = Verdict(speed=8.25), Verdict(speed=0.5), Verdict("computes a product wrongly")


@pytest.fixture(autouse=True)
def verdicts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the verdicts of others, nor those of this machine."""
    monkeypatch.setattr(default_device, "_path", lambda gpu: tmp_path / gpu.name)


def default(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[Candidate], verdicts: dict[str, Verdict], files: bool = True
) -> DefaultDevice:
    monkeypatch.setattr(default_device, "has_gpu", lambda: files)
    monkeypatch.setattr(default_device, "_vulkan", lambda: [g for g in gpus if g.name.startswith("vulkan")])
    monkeypatch.setattr(default_device, "_opencl", lambda: [g for g in gpus if g.name.startswith("opencl")])
    monkeypatch.setattr(default_device, "trial", lambda name, open_backend: verdicts.get(name, RIGHT))
    return registry.default_device()


@pytest.mark.parametrize(
    ("gpus", "verdicts", "names"),
    [
        ((BIG,), {}, ("vulkan:1",)),
        ((SHARED,), {}, ("vulkan:0",)),
        ((SHARED, SMALL, BIG), {}, ("vulkan:1", "vulkan:3")),  # an integrated one is the last resort
        ((SHARED, BIG), {"vulkan:1": WRONG}, ("vulkan:0",)),
        ((SHARED, BIG), {"vulkan:1": SLOW, "vulkan:0": SLOW}, ("cpu",)),
        ((BIG, OTHER_DRIVER), {}, ("vulkan:1",)),  # one card
        ((BIG, OTHER_DRIVER), {"vulkan:1": WRONG}, ("vulkan:2",)),
        ((BIG, BY_OPENCL), {}, ("vulkan:1",)),
        ((BIG, BY_OPENCL), {"vulkan:1": WRONG}, ("opencl:0",)),
        ((), {}, ("cpu",)),
    ],
)
def test_default_device_is_the_best_that_passes(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[Candidate], verdicts: dict[str, Verdict], names: tuple[str, ...]
) -> None:
    assert default(monkeypatch, gpus, verdicts).names == names


def test_default_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default(monkeypatch, [BIG], {}).why == "Big: 8.2 times the CPU's speed"
    gpus, verdicts = [SHARED, SMALL], {"vulkan:0": SLOW, "vulkan:3": WRONG}
    why = "vulkan:3 (Small): computes a product wrongly; vulkan:0 (Shared) has 0.50 times the CPU's speed"
    default_device._path(SMALL).unlink(missing_ok=True)
    assert default(monkeypatch, gpus, verdicts) == DefaultDevice(("cpu",), why)


def test_one_card_under_two_drivers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"vulkan:0": b"a", "vulkan:1": b"b", "opencl:0": b"a", "opencl:1": b"", "opencl:2": b"", "cpu": b""}

    def open_(name: str, threads: int) -> Any:
        return SimpleNamespace(name=name, card=cards[name], close=lambda: closed.append(name))

    closed: list[str] = []
    monkeypatch.setattr(registry, "_open_backend", open_)
    names = ["vulkan:0", "vulkan:1", "opencl:1", "opencl:2"]
    assert [b.name for b in registry.open_backends(names)] == [*names, "cpu"]
    with pytest.raises(DeviceError, match=r"^devices vulkan:0 and opencl:0 are one card under two drivers: name one$"):
        registry.open_backends(["vulkan:1", "vulkan:0", "opencl:0"])
    assert closed == ["vulkan:1", "vulkan:0", "opencl:0"]


def test_default_device_without_files_of_a_gpu_opens_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.backends.vulkan.instance.all_devices", lambda: pytest.fail("the loader is opened"))
    monkeypatch.setattr(default_device, "has_gpu", lambda: False)
    assert registry.default_device() == DefaultDevice(("cpu",), "no GPU")


def test_default_device_is_never_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """lavapipe and PoCL are installed here, or nothing is."""
    monkeypatch.setattr(default_device, "has_gpu", lambda: True)
    monkeypatch.setattr(default_device, "trial", lambda *_: RIGHT)
    kinds = {"cpu", "other", "accelerator"}
    assert all(gpu.kind not in kinds for gpu in default_device.candidates())


@pytest.mark.parametrize("name", ["dri/renderD128", "nvidia0", "dxg"])
def test_has_gpu_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "card0").touch()  # a screen without a GPU
    (tmp_path / "nvidia-caps").mkdir()
    assert not has_gpu(tmp_path)
    (tmp_path / name).touch()
    assert has_gpu(tmp_path)


def test_has_gpu_elsewhere_is_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert has_gpu(tmp_path)


def opened(device: Callable[[], Backend]) -> Callable[[str], Backend]:
    return lambda name: CPUBackend(1) if name == "cpu" else device()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"N": 64, "K": 64, "PROMPT": 4, "DECODE": 2}.items():
        monkeypatch.setattr(default_device, name, value)


@pytest.mark.parametrize("factor", [1.1, np.nan])
def test_trial_finds_a_device_that_computes_wrongly(
    small: None, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    work, factors = default_device._work, [factor, 1.0]

    def skewed(*args: Any) -> tuple[Any, float]:
        result, seconds = work(*args)
        result[np.unravel_index(np.abs(result).argmax(), result.shape)] *= factors.pop(0)
        return result, seconds

    monkeypatch.setattr(default_device, "_work", skewed)
    assert default_device.trial("vulkan:1", opened(lambda: CPUBackend(1))) == WRONG


def test_trial_tells_the_speed_of_a_right_device(small: None) -> None:
    verdict = default_device.trial("vulkan:1", opened(lambda: CPUBackend(1)))
    assert not verdict.fault
    assert verdict.speed > 0


def test_verdict_is_kept_and_a_lost_device_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Verdict | Exception] = [DeviceLost("vulkan:1: gone"), RIGHT]

    def trial(name: str, open_backend: object) -> Verdict:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(default_device, "trial", trial)
    verdicts = [judge(BIG, opened(lambda: CPUBackend(1))) for _ in range(3)]
    assert verdicts == [Verdict("vulkan:1: gone"), RIGHT, RIGHT]
