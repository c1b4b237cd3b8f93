"""The shipped SPIR-V is what today's kernels compile to, and needs nothing that a device may lack."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from backends.kernels.dialect import KERNELS, SIMT, SOFT
from backends.vulkan import shaders
from backends.vulkan.pipelines import SHADERS, shader_name

CAPABILITIES = {1: "Shader", 5347: "PhysicalStorageBufferAddresses", 4433: "StorageBuffer16BitAccess"}
CAPABILITIES |= {4448: "StorageBuffer8BitAccess", 22: "Int16", 39: "Int8"}
SOFT_ONLY = {61: "GroupNonUniform", 64: "GroupNonUniformBallot", 11: "Int64"}  # only where a CPU runs Vulkan
DOTS_ONLY = {6018: "DotProductInput4x8BitPacked", 6019: "DotProduct"}  # only where a device has them
OP_CAPABILITY = 17


def test_shaders_are_those_of_the_sources() -> None:
    assert list(shaders.outdated()) == [], "run scripts/build-shaders"


def test_every_variant_is_shipped() -> None:
    variants = {(k, d) for k in KERNELS.values() for shape in (SIMT, SOFT) for d in k.variants(shape)}
    names = {shader_name(k, d) for k, d in variants}
    assert len(names) == len(variants)
    assert names == {path.name for path in SHADERS.glob("*.spv")}


@pytest.mark.parametrize("change", ["source", "file", "missing", "superfluous"])
def test_what_is_old_is_named(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(shaders.sources()))
    for path in (*SHADERS.glob("*.spv"), shaders.MANIFEST):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(shaders, "SHADERS", tmp_path)
    if change == "source":
        monkeypatch.setattr(shaders, "sources", lambda: shaders_with(name))
    elif change == "file":
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\0\0\0\0")
    elif change == "missing":
        (tmp_path / name).unlink()
    else:
        name = "nobody.spv"
        (tmp_path / name).write_bytes(b"")
    assert list(shaders.outdated()) == [name]


ALL = shaders.sources()


def shaders_with(changed: str) -> dict[str, str]:
    return ALL | {changed: ALL[changed] + "\n// changed"}


@pytest.mark.parametrize("path", sorted(SHADERS.glob("*.spv")), ids=lambda p: p.stem)
def test_capabilities(path: Path) -> None:
    words = struct.unpack(f"<{path.stat().st_size // 4}I", path.read_bytes())
    at, found = 5, set()
    while at < len(words) and words[at] & 0xFFFF == OP_CAPABILITY:
        found.add(words[at + 1])
        at += words[at] >> 16
    assert words[0] == 0x07230203
    more = SOFT_ONLY if "_soft_" in path.name else DOTS_ONLY if "_dot_" in path.name else {}
    assert found <= {*CAPABILITIES, *more}
