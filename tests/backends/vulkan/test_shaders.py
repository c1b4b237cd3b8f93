"""Shipped SPIR-V: compiled from today's kernels, with capabilities that every device has."""

from __future__ import annotations

import shutil
import struct
from itertools import takewhile
from pathlib import Path

import pytest

from logitless.backends.gpu.language.dialect import KERNELS, SIMT, SOFT
from logitless.backends.vulkan import shaders
from logitless.backends.vulkan.pipelines import SHADERS, shader_name

CAPABILITIES = {1: "Shader", 5347: "PhysicalStorageBufferAddresses", 4433: "StorageBuffer16BitAccess"}
CAPABILITIES |= {4448: "StorageBuffer8BitAccess", 22: "Int16", 39: "Int8"}
SOFT_ONLY = {61: "GroupNonUniform", 64: "GroupNonUniformBallot", 11: "Int64"}  # only where a CPU runs Vulkan
DOTS_ONLY = {6018: "DotProductInput4x8BitPacked", 6019: "DotProduct"}  # only where a device has them
COOP_ONLY = {6022: "CooperativeMatrixKHR", 5345: "VulkanMemoryModel", 61: "GroupNonUniform"}  # the same
MORE = {"_soft_": SOFT_ONLY, "_dot_": DOTS_ONLY, "_coop_": COOP_ONLY}
OP_CAPABILITY, OP_CONSTANT, OP_MULTIPLY = 17, 43, 133
CUBIC = struct.unpack("<I", struct.pack("<f", 0.044715))[0]


def test_shaders_are_compiled_from_the_sources() -> None:
    assert list(shaders.outdated()) == [], "run scripts/build-shaders"


def test_every_variant_is_shipped() -> None:
    variants = {(k, d) for k in KERNELS.values() for shape in (SIMT, SOFT) for d in k.variants(shape)}
    names = {shader_name(k, d) for k, d in variants}
    assert len(names) == len(variants)
    assert names == {path.relative_to(SHADERS).as_posix() for path in SHADERS.rglob("*.spv")}


@pytest.mark.parametrize("change", ["source", "file", "missing", "superfluous"])
def test_outdated_names_the_changed_file(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(shaders.sources()))
    shutil.copytree(SHADERS, tmp_path, dirs_exist_ok=True)
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


def test_shaders_need_only_common_capabilities() -> None:
    for path in sorted(SHADERS.rglob("*.spv")):
        code = path.read_bytes()
        found = {words[0] for op, words in takewhile(lambda i: i[0] == OP_CAPABILITY, shaders.instructions(code))}
        assert struct.unpack("<I", code[:4]) == (0x07230203,), path.stem
        more = next((c for part, c in MORE.items() if part in path.name), {})
        assert found <= {*CAPABILITIES, *more}, path.stem


def test_unrolled_loops_keep_precise() -> None:
    """GELU's first product and its sum: if merged in some copies of it, a row's bits would
    depend on the batch size.
    """
    n = 0
    for path in [*SHADERS.rglob("linear_*-PAIR1-*.spv"), *SHADERS.glob("glu-*.spv")]:
        code = list(shaders.instructions(path.read_bytes()))
        exact = {w[0] for op, w in code if op == shaders.DECORATE and w[1] == shaders.NO_CONTRACTION}
        factor = next(w[1] for op, w in code if op == OP_CONSTANT and w[2:] == (CUBIC,))
        uses = [(op, w[1]) for op, w in code if factor in w[2:] and op != OP_CONSTANT]
        assert {op for op, _ in uses} == {OP_MULTIPLY}, path.name
        assert {made for _, made in uses} <= exact, path.name
        n += len(uses)
    assert n > 100


def test_compiler_that_drops_precise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = next(SHADERS.glob("add_rows-*.spv")).read_bytes()  # has none of the eight
    monkeypatch.setattr(shaders, "compile_shader", lambda source, target: target.write_bytes(kept))
    with pytest.raises(shaders.ShaderError, match="too old"):
        shaders.check_compiler()
