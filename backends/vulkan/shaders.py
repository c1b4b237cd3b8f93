"""SPIR-V build: every variant of every kernel, with a manifest of their sources' hashes.

    scripts/build-shaders            compile changed kernels
    scripts/build-shaders --check    compare only

Needs glslc and spirv-val, only where a kernel is changed. The shipped files were
compiled with shaderc 2026.4 (SPIRV-Tools 2026.4); older ones lack cooperative matrices (glslang
before 13) or drop `precise`."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import logitless.backends.gpu.device  # noqa: F401  (registers every kernel)
from logitless.backends.gpu.language.dialect import KERNELS, SIMT, SOFT, render_glsl
from logitless.backends.vulkan.pipelines import MANIFEST, SHADERS, SOFT_SHADERS, manifest, shader_name

COMPILE = ["glslc", "--target-env=vulkan1.2", "-O", "-fshader-stage=comp"]
VALIDATE = ["spirv-val", "--target-env", "vulkan1.2"]

PROBE = """#version 460
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x = 1) in;
layout(binding = 0) buffer B { float x[]; };
void main() {
  [[unroll]] for (uint i = 0u; i < 4u; i++) { precise float y = x[i] * x[i + 4u] + x[i + 8u]; x[i] = y; }
}
"""
DECORATE, NO_CONTRACTION = 71, 42
TOO_OLD = "glslc is too old: it forgets `precise` where it unrolls a loop (shaderc 2026.4 is known to be right)"


class ShaderError(RuntimeError):
    """A kernel that is not valid GLSL or SPIR-V; the message has the compiler's output."""


def sources() -> dict[str, str]:
    """GLSL by the name of its SPIR-V file."""
    return {
        shader_name(kernel, defines): render_glsl(kernel, defines)
        for kernel in KERNELS.values()
        for defines in dict.fromkeys((*kernel.variants(SIMT), *kernel.variants(SOFT)))
    }


def source_hash(source: str) -> str:
    return hashlib.sha256("\n".join([*COMPILE, source]).encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def outdated() -> Iterator[str]:
    """Names of files that are missing, superfluous or not compiled from today's sources."""
    expected, recorded = sources(), manifest() if MANIFEST.exists() else {}
    for name, source in expected.items():
        entry = recorded.get(name, {})
        if entry.get("source") != source_hash(source) or entry.get("file") != file_hash(SHADERS / name):
            yield name
    files = (path.relative_to(SHADERS).as_posix() for path in SHADERS.rglob("*.spv"))
    yield from (name for name in files if name not in expected)
    yield from (name for name in recorded if name not in expected)


def build() -> list[str]:
    """Compile outdated files; returns the names of changed ones. ShaderError names a kernel that does not compile."""
    check_compiler()
    SOFT_SHADERS.mkdir(parents=True, exist_ok=True)
    expected, changed = sources(), list(dict.fromkeys(outdated()))
    for name in changed:
        if name not in expected:
            (SHADERS / name).unlink(missing_ok=True)
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(lambda name: compile_shader(expected[name], SHADERS / name), [n for n in changed if n in expected])
        )
    entries = {
        name: {"source": source_hash(source), "file": file_hash(SHADERS / name)}
        for name, source in sorted(expected.items())
    }
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    MANIFEST.write_text(f'{{\n  "shaders": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
    manifest.cache_clear()
    return changed


def check_compiler() -> None:
    """ShaderError when glslc drops `precise`, which keeps a row's bits the same in unrolled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        spirv = Path(folder) / "probe.spv"
        compile_shader(PROBE, spirv)
        exact = sum(op == DECORATE and words[1] == NO_CONTRACTION for op, words in instructions(spirv.read_bytes()))
    if exact != 8:  # a product and a sum, four times
        raise ShaderError(TOO_OLD)


def instructions(code: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Opcode and operands of each instruction of a SPIR-V file."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    at = 5
    while at < len(words):
        yield words[at] & 0xFFFF, words[at + 1 : at + (words[at] >> 16)]
        at += words[at] >> 16


def compile_shader(source: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        glsl = Path(folder) / "kernel.comp"
        glsl.write_text(source, encoding="utf-8")
        spirv = Path(folder) / "kernel.spv"
        for command in ([*COMPILE, str(glsl), "-o", str(spirv)], [*VALIDATE, str(spirv)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                numbered = "".join(f"{i}: {line}\n" for i, line in enumerate(source.splitlines(), 1))
                raise ShaderError(f"{target.name}: {done.stdout}{done.stderr}\n{numbered}")
        target.write_bytes(spirv.read_bytes())


if __name__ == "__main__":
    if "--check" in sys.argv:
        old = list(outdated())
        sys.exit(f"old shaders: {', '.join(old)}: run scripts/build-shaders" if old else 0)
    for name in build():
        print(name)
