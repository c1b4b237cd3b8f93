"""`scripts/chip-table`: instructions, spills and loads of the shipped kernels, by the compilers of GPUs.

No device is needed and nothing is computed. Mesa's drivers run over Debian's mesa-drm-shim, a library that answers in
place of a kernel driver for a chip that is not there; VK_KHR_pipeline_executable_properties tells the compiler's
statistics and its machine code, whose loads from memory are counted by width. The OpenCL text is compiled by ocloc for
Intel and by clang and ptxas (PyPI: nvidia-cuda-nvcc-cu12) for NVIDIA.

Rows stay in build/chip-table, by chip and by what was compiled: a run goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from logitless.backends.errors import KernelRefused
from logitless.backends.gpu import device as _kernels  # noqa: F401  (registers every kernel)
from logitless.backends.gpu.attention.paged_attention import NARROW, NARROW_ROWS, TILES
from logitless.backends.gpu.language.dialect import KERNELS, SIMT, Defines, Kernel, Shape, render_opencl
from logitless.backends.gpu.matmul.unpack import BLOCKS
from logitless.backends.vulkan import api
from logitless.backends.vulkan import device as vulkan_device
from logitless.backends.vulkan.autotune import class_of
from logitless.backends.vulkan.instance import DeviceInfo, all_devices
from logitless.backends.vulkan.pipelines import SHADERS, Pipelines, shader_name

# The driver, its shim, and the variable that names the chip to it; ocloc's names of devices.
CHIPS = {
    **{chip: ("radeon", "amdgpu", "AMDGPU_GPU_ID", chip) for chip in ("navi21", "navi31", "gfx1201", "phoenix")},
    "renoir": ("radeon", "amdgpu", "AMDGPU_GPU_ID", "renoir"),
    "m1": ("asahi", "asahi", "", ""),
    "adreno740": ("freedreno", "freedreno", "FD_GPU_ID", "740"),
    "ad102": ("nouveau", "nouveau", "NOUVEAU_CHIPSET", "0x192"),
    "a770": ("intel", "i915", "NOOP_I915_ID", "56a0"),  # DG2
    "xe_g7": ("intel", "i915", "NOOP_I915_ID", "9a49"),  # Tiger Lake
}
INTEL = {"battlemage": "bmg", "dg2": "dg2", "tigerlake": "tgllp"}
NVIDIA = ("sm_75", "sm_86", "sm_89", "sm_120")
CACHE = Path("build", "chip-table")
CLANG = ["clang", "-x", "cl", "-cl-std=CL2.0", "-target", "nvptx64-nvidia-nvcl", "-Xclang", "-cl-ext=+cl_khr_fp16"]
CLANG += ["-Xclang", "-target-feature", "-Xclang", "+ptx78", "-Xclang", "-target-cpu", "-Xclang", "sm_75"]
CLANG += ["-Xclang", "-disable-llvm-verifier", "-O3", "-S", "-w"]
SHIM = ["clang", "-O1", "-shared", "-fPIC", "-I/usr/include/libdrm"]
REGISTERS = 65536  # of a multiprocessor of NVIDIA
EXTENSION = "VK_KHR_pipeline_executable_properties"
FEATURES, PIPELINE, PROPERTIES, EXECUTABLE, STATISTIC, TEXT = range(1000269000, 1000269006)
CAPTURE = 0x40 | 0x80  # statistics, internal representations
# Kernels that `--families` joins into a line; the first pattern that fits counts.
FAMILIES = {
    "products by dots, 1 row": "linear_dot_*-MT1-*",
    "products by dots, 4 and 8 rows": "linear_dot_*",
    "products of floats, 1 row": "linear_*-MT1-*",
    "products by matrices": "linear_coop_*",
    "products of floats, 4 and 8 rows": "linear_*",
    "experts by dots": "expert_linear_dot_*",
    "experts of floats": "expert_linear_*",
    "attention, one token": "attention_spans_*",
    "attention in tiles": "attention_tiles_*",
    "latent attention": "latent_attention_*",
    "sparse attention": "sparse_*attention_*",
    "KV cache": "*_[kv]_*",
    "sampler": "sample-*",
    "norms and rounding": "*norm*",
    "training: products": "gemm*",
    "training: attention": "*attention*",
    "rows and unpacking": "*_rows*",
    "the rest": "*",
}
MEMBERS = ("b32", "i64", "u64", "f64")  # of a statistic's value, by its format
# Statistics by the names that drivers give them, in lower case.
COLUMNS = {
    "instructions": ("instructions", "instruction count", "instrs"),
    "spills": ("spilled vgprs", "spilled sgprs", "spills", "fills", "spills to memory", "stp count", "ldp count"),
    "waves": ("subgroups per simd", "max warps/sm", "max waves per core", "threads", "max dispatch width"),
}
# Loads from memory in machine code: mnemonics, whose width is in the name (bits, or words of four bytes).
LOADS = re.compile(
    r"\b(?:global|flat|buffer|s)_(?:buffer_)?load_(\w+)"
    r"|\bld\.global[.\w]*\.([bus]\d+)\b"
    r"|\bldg\.(?:a\.)?(\w+) .*, (\d+)$"
    r"|\bload\.ugm\.(d\d+)(?:u32)?(?:x(\d+))?\."
    r"|\ba64_untyped_read:(\w+)",
    re.M,
)
WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "dwordx8": 32, "dwordx16": 64}


def load_bytes(match: re.Match[str]) -> int:
    """Bytes of a load; less than a word counts as one."""
    if match[7]:  # a letter a word
        return 4 * len(match[7])
    name = match[1] or match[2] or match[3] or match[5]
    if name in WIDTHS:
        return WIDTHS[name]
    bits = re.search(r"\d+", name)
    return max(int(bits[0]) // 8 if bits else 4, 4) * int(match[4] or match[6] or 1)


class Recorder:
    """The Vulkan library, whose pipelines are compiled with statistics. `last`: those of the last pipeline."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self.ffi, self.lib = ffi, lib
        self.last: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)

    def vkCreateDevice(self, gpu: Any, info: Any, allocator: Any, out: Any) -> int:
        names = [self.ffi.string(info.ppEnabledExtensionNames[i]) for i in range(info.enabledExtensionCount)]
        self.keep = keep = [self.ffi.new("char[]", name) for name in (*names, EXTENSION.encode())]
        array = self.ffi.new("char *[]", keep)
        feature = self.ffi.new("VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR *")
        feature.sType, feature.pipelineExecutableInfo, feature.pNext = FEATURES, 1, info.pNext
        info.enabledExtensionCount, info.ppEnabledExtensionNames, info.pNext = len(keep), array, feature
        result: int = self.lib.vkCreateDevice(gpu, info, allocator, out)
        self.device = out[0]
        return result

    def vkCreateComputePipelines(self, device: Any, _: Any, n: int, info: Any, allocator: Any, out: Any) -> int:
        info.flags |= CAPTURE
        start = time.perf_counter()
        result: int = self.lib.vkCreateComputePipelines(device, self.ffi.NULL, n, info, allocator, out)
        self.last = {"seconds": time.perf_counter() - start}
        if result == 0:
            self.last |= self._statistics(out[0])
        return result

    def _call(self, name: str, info: Any, kind: str, code: int) -> list[Any]:
        address = self.lib.vkGetDeviceProcAddr(self.device, name.encode())
        call, count = self.ffi.cast(f"PFN_{name}", address), self.ffi.new("uint32_t *")
        call(self.device, info, count, self.ffi.NULL)
        self.items = items = self.ffi.new(f"{kind}[]", max(count[0], 1))
        for i in range(count[0]):
            items[i].sType = code
        call(self.device, info, count, items)
        if code == TEXT:  # sizes are known now
            self.texts = [self.ffi.new("char[]", max(items[i].dataSize, 1)) for i in range(count[0])]
            for i, text in enumerate(self.texts):
                items[i].pData = text
            call(self.device, info, count, items)
        return [items[i] for i in range(count[0])]

    def _statistics(self, pipeline: Any) -> dict[str, Any]:
        executable = self.ffi.new("VkPipelineExecutableInfoKHR *")
        executable.sType, executable.pipeline = EXECUTABLE, pipeline
        numbers = self._call(
            "vkGetPipelineExecutableStatisticsKHR", executable, "VkPipelineExecutableStatisticKHR", STATISTIC
        )
        values = {self.ffi.string(s.name).decode().lower(): getattr(s.value, MEMBERS[s.format]) for s in numbers}
        name = "vkGetPipelineExecutableInternalRepresentationsKHR"
        texts = self._call(name, executable, "VkPipelineExecutableInternalRepresentationKHR", TEXT)
        code = self.ffi.string(self.ffi.cast("char *", texts[-1].pData)).decode(errors="replace") if texts else ""
        return {"statistics": values, "loads": Counter(load_bytes(m) for m in LOADS.finditer(code))}


def column(row: dict[str, Any], name: str) -> int | None:
    """A column of the table from a driver's statistics."""
    values = [row["statistics"][key] for key in COLUMNS[name] if key in row["statistics"]]
    return (sum(values) if name == "spills" else values[0]) if values else None


def variants(patterns: list[str]) -> Iterator[tuple[str, Kernel, Defines]]:
    for kernel in KERNELS.values():
        for defines in dict.fromkeys(kernel.variants(SIMT)):
            name = shader_name(kernel, defines)[:-4]
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                yield name, kernel, defines


def is_launched(kernel: Kernel, sizes: dict[str, int], info: DeviceInfo, shape: Shape) -> bool:
    """False for a variant that a device never runs."""
    if kernel.name == "sample":
        return sizes["WG"] <= (512 if shape.dot else 256)
    if kernel.name.startswith(("linear_dot", "expert_linear_dot", "linear_coop")):
        return shape.dot and (not kernel.special or info.matrices is not None)
    if shape.dot and kernel.name.removeprefix("expert_").removeprefix("linear_") in BLOCKS:
        return False
    if kernel.name.startswith("attention_tiles") and kernel.name.endswith(NARROW):
        return sizes["ROWS"] == (NARROW_ROWS if shape.narrow else TILES[sizes["MAX_SIZE"]])
    few_rows = not kernel.name.startswith("linear_") or sizes.get("MT", 1) <= shape.rows
    return few_rows and sizes["WG"] <= info.max_invocations


class Rows:
    """Rows of a chip by a hash of what was compiled, on disk: a run that ends early loses one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {row["key"]: row for row in map(json.loads, lines)}

    def add(self, row: dict[str, Any]) -> None:
        self.known[row["key"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def key_of(*parts: str | bytes) -> str:
    joined = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(joined).hexdigest()[:16]


def compile_on_chip(path: Path, patterns: list[str]) -> None:
    """Compile shaders on the Vulkan device of the shim; prints a line of JSON before and after each."""
    recorder = Recorder(*api.binding())
    for name, module in list(sys.modules.items()):
        if name.startswith("logitless.backends.vulkan.") and hasattr(module, "binding"):
            module.binding = lambda: (recorder.ffi, recorder)  # type: ignore[attr-defined]
    info = all_devices()[0]
    if info.missing:
        sys.exit(f"{info.name} lacks {info.missing}")
    pipelines, shape, rows = Pipelines(vulkan_device.Device(info)), class_of(info), Rows(path)
    for name, kernel, defines in variants(patterns):
        if not is_launched(kernel, dict(defines), info, shape):
            continue
        code = (SHADERS / shader_name(kernel, defines)).read_bytes()
        special = [str(info.matrices.constants)] if kernel.special and info.matrices else []
        row = {"kernel": name, "key": key_of(name, info.driver, code, *special)}
        print(json.dumps(row), flush=True)
        if row["key"] not in rows.known:
            try:
                pipelines.get(kernel, defines)
            except KernelRefused as error:
                recorder.last = {"failed": str(error)}
            print(json.dumps(row | recorder.last), flush=True)
    os._exit(0)  # no-op drivers do not all end well


def rows_by_mesa(chip: str, patterns: list[str], rows: Rows) -> list[dict[str, Any]]:
    """Rows of shaders. A compiler that crashes fails one kernel, and the next process goes on behind it."""
    driver, shim, variable, value = CHIPS[chip]
    names: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        library = f"/usr/lib/x86_64-linux-gnu/lib{shim}_noop_drm_shim.so"
        if shim == "i915":  # Debian has none
            library = f"{cache}/i915.so"
            source = Path(__file__).with_name("chip_table_i915.c")
            subprocess.run([*SHIM, str(source), "-o", library], check=True)
        env = os.environ | {
            "VK_DRIVER_FILES": f"/usr/share/vulkan/icd.d/{driver}_icd.json",
            "LD_PRELOAD": library,
            "NVK_I_WANT_A_BROKEN_VULKAN_DRIVER": "1",
            "MESA_SHADER_CACHE_DISABLE": "true",
            "XDG_CACHE_HOME": cache,
        }
        env |= {variable: value} if variable else {}
        command = [sys.executable, "-m", "scripts.chip_table", "--here", str(rows.path), *patterns]
        while True:
            with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    if line.startswith("{"):
                        row = json.loads(line)
                        names[row["kernel"]] = row["key"]
                        if len(row) > 2:
                            rows.add(row)
            if child.returncode == 0:
                return [rows.known[key] for key in names.values()]
            if child.returncode > 0 or row["key"] in rows.known:
                sys.exit(f"{chip}: the compiler ended with {child.returncode}")
            rows.add(row | {"failed": f"the compiler ended with {child.returncode}"})


def compile_for_intel(target: str, text: str) -> dict[str, Any]:
    """Row of an OpenCL text by ocloc."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cl").write_text(text)
        command = ["ocloc", "compile", "-file", "kernel.cl", "-device", target, "-q"]
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        code = b"".join(path.read_bytes() for path in Path(folder).glob("*.bin"))
    # the kernel's description in the binary: ocloc prints its warnings of spills without -q only
    numbers = {
        name: int((re.search(rf"\b{name}: *(\d+)".encode(), code) or [0, 0])[1]) for name in ("spill_size", "simd_size")
    }
    width = numbers["simd_size"]
    words = numbers["spill_size"] // (4 * width) if width else 0
    row: dict[str, Any] = {"statistics": {"spills": words, "max dispatch width": width}}
    return row | ({"failed": process.stdout} if process.returncode else {})


def compile_for_nvidia(target: str, text: str) -> dict[str, Any]:
    """Row of an OpenCL text by clang and ptxas."""
    ptxas = shutil.which("ptxas") or next(Path(sys.prefix).rglob("cuda_nvcc/bin/ptxas"))
    with tempfile.TemporaryDirectory() as folder:
        source, code, output = Path(folder, "kernel.cl"), Path(folder, "kernel.ptx"), ""
        source.write_text(Path(__file__).with_suffix(".cl").read_text() + text)
        for command in ([*CLANG, str(source), "-o", str(code)], [ptxas, "-v", f"-arch={target}", str(code)]):
            if code.exists():  # clang writes another target than ptxas is to compile for
                code.write_text(re.sub(r"\.target sm_\w+", f".target {target}", code.read_text()))
            process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            output += process.stdout + process.stderr
            if process.returncode:
                break
    registers = max(map(int, re.findall(r"Used (\d+) registers", output)), default=0)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", output))) // 4
    warps = min(REGISTERS // (32 * registers), 48) if registers else 0
    row: dict[str, Any] = {"statistics": {"spills": spills, "registers": registers, "max warps/sm": warps}}
    return row | ({"failed": output} if process.returncode else {})


def rows_of_text(
    compile_text: Callable[[str, str], dict[str, Any]], target: str, patterns: list[str], rows: Rows
) -> list[dict[str, Any]]:
    """Rows of the OpenCL text of kernels."""
    keys = []
    for name, kernel, defines in variants(patterns):
        if kernel.extensions:
            continue
        text = render_opencl(kernel, defines, SIMT)
        keys.append(key_of(name, text))
        if keys[-1] not in rows.known:
            start = time.perf_counter()
            row = compile_text(target, text)
            rows.add({"kernel": name, "key": keys[-1], "seconds": time.perf_counter() - start, "loads": {}} | row)
    return [rows.known[key] for key in keys]


def rows_of(chip: str, patterns: list[str]) -> list[dict[str, Any]]:
    rows = Rows(CACHE / f"{chip}.jsonl")
    if chip in INTEL:
        return rows_of_text(compile_for_intel, INTEL[chip], patterns, rows)
    if chip in NVIDIA:
        return rows_of_text(compile_for_nvidia, chip, patterns, rows)
    return rows_by_mesa(chip, patterns, rows)


def cell(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["–"] * 5
    if "failed" in row:
        return ["failed", *["–"] * 4]
    numbers = [column(row, name) for name in COLUMNS]
    loads = " ".join(f"{n}×{width}" for width, n in sorted((int(w), n) for w, n in row["loads"].items()))
    return ["–" if n is None else f"{n:,}" for n in numbers] + [loads or "–", f"{row['seconds']:.2f}"]


def print_families(results: dict[str, list[dict[str, Any]]]) -> None:
    """A line for each family: by chip its kernels, most instructions, fewest waves, bytes of the widest load."""
    print("| kernels |", " | ".join(results), "|\n|---|" + "---|" * len(results))

    def cell_of(rows: list[dict[str, Any]]) -> str:
        if not rows:
            return "–"
        instructions, waves = ([n for row in rows if (n := column(row, name))] for name in ("instructions", "waves"))
        width = max((int(w) for row in rows for w in row["loads"]), default=0)
        return f"{len(rows)}: {max(instructions, default=0):,}, {min(waves, default=0):,}, {width or '–'}"

    families = {
        name: next(family for family, pattern in FAMILIES.items() if fnmatch.fnmatch(name, pattern))
        for rows in results.values()
        for name in (row["kernel"] for row in rows)
    }
    for family in FAMILIES:
        cells = [
            cell_of([row for row in rows if families[row["kernel"]] == family and "failed" not in row])
            for rows in results.values()
        ]
        if set(cells) != {"–"}:
            print(f"| {family} | {' | '.join(cells)} |")


def print_kernels(results: dict[str, list[dict[str, Any]]], earlier: dict[str, list[dict[str, Any]]]) -> None:
    print("| kernel | chip | instructions | spills | waves | loads × bytes | seconds |\n|---|---|---|---|---|---|---|")
    now, old = ({c: {row["kernel"]: row for row in of} for c, of in rows.items()} for rows in (results, earlier))
    for name in dict.fromkeys(row["kernel"] for rows in results.values() for row in rows):
        for chip in results:
            if name in now[chip]:
                both = zip(cell(old.get(chip, {}).get(name)), cell(now[chip][name]), strict=True)
                print(f"| {name} | {chip} | {' | '.join(f'{a} → {b}' if a not in (b, '–') else b for a, b in both)} |")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", default=",".join(CHIPS), help=f"of {', '.join([*CHIPS, *INTEL, *NVIDIA])}")
    parser.add_argument("--families", action="store_true", help="a line for each family of kernels")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--before", type=Path, help="an earlier --json: each number becomes `before → now`")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "patterns", nargs="*", default=["*"], help="names of kernels, as `linear_dot_q8_0-*`; all without"
    )
    args = parser.parse_args(argv)
    if args.here:
        compile_on_chip(args.here, args.patterns)
    results = {chip: rows_of(chip, args.patterns) for chip in args.chips.split(",")}
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.families:
        print_families(results)
    else:
        print_kernels(results, json.loads(args.before.read_text()) if args.before else {})
    for chip, rows in results.items():
        failed = [row["kernel"] for row in rows if "failed" in row]
        spilling = [f"{row['kernel']} {n}" for row in rows if "failed" not in row and (n := column(row, "spills"))]
        print(f"\n{chip}: {len(rows)} kernels, {len(failed)} failed, {len(spilling)} spill", end="")
        print("".join(f"\n  {name}" for name in (*failed, *spilling)), end="")
    print()


if __name__ == "__main__":
    main()
