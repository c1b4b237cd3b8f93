"""Host facts: the processor's name and features, asked of LLVM once per machine."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest

from logitless.backends import host as isa


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows with each question, in a process and a folder that know nothing yet."""
    calls, real = [], isa._query_llvm
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path))
    monkeypatch.setattr(isa, "_query_llvm", lambda *of_arm: calls.append(1) or real(*of_arm))
    isa.host.cache_clear()
    yield calls
    isa.host.cache_clear()


def again() -> isa.Host:
    isa.host.cache_clear()
    return isa.host()


def test_processor_is_cached(asked: list[int]) -> None:
    first = isa.host()
    assert (first.name, first.attributes) == (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    assert again() == first
    assert len(asked) == 1
    for feature, present in llvm.get_host_cpu_features().items():
        assert first.has(feature) == present


def test_processor_cache_misses_after_a_change(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path("/proc/cpuinfo").read_text()
    told = tmp_path / "cpuinfo"
    real = open

    def other(path: Any, *args: Any) -> Any:
        return real(told if path == "/proc/cpuinfo" else path, *args)

    monkeypatch.setattr(builtins, "open", other)
    told.write_text(here)
    isa.host()
    # the same one, at another speed
    told.write_text(here.replace("cpu MHz", "cpu MHz\t: 1.5\ncpu MHz"))
    again()
    assert len(asked) == 1
    told.write_text(here.replace("flags\t", "flags\t: one_more\nflags\t"))
    again()
    assert len(asked) == 2
    told.unlink()  # no Linux: asked at each start
    again(), again()
    assert len(asked) == 4


def test_damaged_processor_cache_is_rebuilt(asked: list[int], tmp_path: Path) -> None:
    first = isa.host()
    (kept,) = (tmp_path / "cpu").iterdir()
    kept.write_bytes(kept.read_bytes()[:20])
    assert again() == first
    assert len(asked) == 2


@pytest.mark.parametrize("variant", ["avx_vnni", "avx2"])
def test_requested_isa_limits_what_kernels_use(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = isa.Host("sapphirerapids", "+avx,+avx2,+fma,+avxvnni,+avx512f,+avx512vl,+avx512bw,+avx512vnni,+amx-int8")
    monkeypatch.setattr(isa, "host", lambda: machine)
    monkeypatch.setattr(isa, "isa", lambda: "avx512_vnni")
    assert isa.target_host.__wrapped__() == machine
    monkeypatch.setattr(isa, "isa", lambda: variant)
    target = isa.target_host.__wrapped__()
    assert target.has("avx", "avx2", "fma")
    assert target.has("avxvnni") == (variant == "avx_vnni")
    assert "-avx512f" in target.attributes
    assert "+avx512" not in target.attributes
    assert "+amx" not in target.attributes
    assert not target.is_zen
    monkeypatch.setattr(isa, "host", lambda: isa.Host("znver4", machine.attributes))
    assert isa.target_host.__wrapped__().is_zen == (variant == "avx2")  # Zen 3, whose memory is AMD's
    assert isa.target_host.__wrapped__().prefetches_rows(1) == (variant == "avx2")
    assert not isa.target_host.__wrapped__().prefetches_rows(2)
    # whose best variant is avx2
    older = isa.Host("skylake-avx512", "+avx2,+fma,+avx512f,+avx512vl,+avx512bw")
    monkeypatch.setattr(isa, "host", lambda: older)
    monkeypatch.setattr(isa, "isa", lambda: "avx2")
    assert isa.target_host.__wrapped__() == older


def test_cache_sizes_come_from_sysfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the system tells them; without a system that does, small ones."""

    def tell(index: int, level: int, kind: str, size: str) -> None:
        folder = tmp_path / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")

    monkeypatch.setattr(isa, "CACHE_INFO", tmp_path / "cache")
    sizes = isa.cache_nbytes.__wrapped__
    assert [sizes(1), sizes(2), sizes(3)] == [32 << 10, 256 << 10, 64 << 20]
    for told in ((0, 1, "Instruction", "64K"), (1, 1, "Data", "48K"), (2, 2, "Unified", "2M"), (3, 3, "Unified", "")):
        tell(*told)
    assert [sizes(1), sizes(2), sizes(3)] == [48 << 10, 2 << 20, 64 << 20]
    (tmp_path / "cache" / "index3" / "size").write_text("16384K\n")
    assert sizes(3) == 16 << 20
    (tmp_path / "cache" / "index2" / "size").write_text("many\n")
    assert sizes(2) == 256 << 10


@pytest.mark.parametrize(
    ("features", "isas"),
    [("asimddp i8mm", ["neon_i8mm", "neon_dot", "plain"]), ("asimddp", ["neon_dot", "plain"]), ("i8mm", ["plain"])],
)
def test_arm_products_of_bytes_are_detected(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, isas: list[str]
) -> None:
    told, real = tmp_path / "cpuinfo", open
    monkeypatch.setattr(builtins, "open", lambda path, *args: real(told if path == "/proc/cpuinfo" else path, *args))
    told.write_text(f"processor\t: 0\nFeatures\t: fp asimd {features} ssbs\nCPU part\t: 0xd0c\n")
    monkeypatch.setattr(llvm, "get_host_cpu_features", llvm.FeatureMap)
    for _ in range(2):
        again()
        assert isa.available_isas() == isas
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("machine", "has_matrices", "best"),
    [("arm64", False, "neon_dot"), ("arm64", True, "neon_i8mm"), ("x86_64", True, "plain")],
)
def test_apple_dot_product_is_assumed(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, machine: str, has_matrices: bool, best: str
) -> None:
    real = open

    def without(path: Any, *args: Any, **more: Any) -> Any:
        if path == "/proc/cpuinfo":
            raise FileNotFoundError(path)
        return real(path, *args, **more)

    monkeypatch.setattr(builtins, "open", without)
    # what it tells there: nothing
    monkeypatch.setattr(llvm, "get_host_cpu_features", llvm.FeatureMap)
    monkeypatch.setattr(isa.sys, "platform", "darwin")
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    monkeypatch.setattr(isa, "_apple_has", {"FEAT_I8MM": has_matrices}.get)
    assert isa.available_isas()[0] == best
