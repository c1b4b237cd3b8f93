"""Makes the SPIR-V files that are shipped: every kernel's every variant, with a manifest of what each was made of.

    scripts/build-shaders            compile what changed
    scripts/build-shaders --check    compare only

Needs glslc and spirv-val, on the machine of whoever changes a kernel and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import backends.kernels.device  # noqa: F401  (registers every kernel)
from backends.kernels.dialect import KERNELS, SIMT, SOFT, render_glsl
from backends.vulkan.pipelines import MANIFEST, SHADERS, manifest, shader_name

COMPILE = ["glslc", "--target-env=vulkan1.2", "-O", "-fshader-stage=comp"]
VALIDATE = ["spirv-val", "--target-env", "vulkan1.2"]


class ShaderError(RuntimeError):
    """A kernel that is not valid GLSL or SPIR-V; the message has the compiler's words."""


def sources() -> dict[str, str]:
    """GLSL by the name of the file that it becomes."""
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
    """What is missing, superfluous or not made of today's sources."""
    wanted, held = sources(), manifest() if MANIFEST.exists() else {}
    for name, source in wanted.items():
        entry = held.get(name, {})
        if entry.get("source") != source_hash(source) or entry.get("file") != file_hash(SHADERS / name):
            yield name
    yield from (path.name for path in SHADERS.glob("*.spv") if path.name not in wanted)
    yield from (name for name in held if name not in wanted)


def build() -> list[str]:
    """Compile what is outdated; the names of what changed. ShaderError says why one cannot be compiled."""
    SHADERS.mkdir(exist_ok=True)
    wanted, changed = sources(), list(dict.fromkeys(outdated()))
    for name in changed:
        if name not in wanted:
            (SHADERS / name).unlink(missing_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: compile_shader(wanted[name], SHADERS / name), [n for n in changed if n in wanted]))
    entries = {
        name: {"source": source_hash(source), "file": file_hash(SHADERS / name)}
        for name, source in sorted(wanted.items())
    }
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    MANIFEST.write_text(f'{{\n  "shaders": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
    manifest.cache_clear()
    return changed


def compile_shader(source: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        glsl = Path(folder) / "kernel.comp"
        glsl.write_text(source, encoding="utf-8")
        made = Path(folder) / "kernel.spv"
        for command in ([*COMPILE, str(glsl), "-o", str(made)], [*VALIDATE, str(made)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                numbered = "".join(f"{i}: {line}\n" for i, line in enumerate(source.splitlines(), 1))
                raise ShaderError(f"{target.name}: {done.stdout}{done.stderr}\n{numbered}")
        target.write_bytes(made.read_bytes())


if __name__ == "__main__":
    if "--check" in sys.argv:
        old = list(outdated())
        sys.exit(f"old shaders: {', '.join(old)}: run scripts/build-shaders" if old else 0)
    for name in build():
        print(name)
