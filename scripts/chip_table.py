"""`scripts/chip-table`: instructions, spills and loads of the shipped kernels, by the compilers of GPUs.

No device is needed and nothing is computed. Mesa's drivers run over Debian's mesa-drm-shim, a library that answers in
place of a kernel driver for a chip that is not there; VK_KHR_pipeline_executable_properties tells the compiler's
statistics and its machine code, whose loads from memory are counted by width. The OpenCL text is compiled by ocloc for
Intel and by clang and ptxas (PyPI: nvidia-cuda-nvcc-cu12) for NVIDIA.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logitless.backends.errors import KernelRefused
from logitless.backends.gpu import device as _kernels  # noqa: F401  (registers every kernel)
from logitless.backends.gpu.language.dialect import KERNELS, SIMT, Defines, Kernel, Shape, render_opencl
from logitless.backends.vulkan import api
from logitless.backends.vulkan import device as vulkan_device
from logitless.backends.vulkan.autotune import class_of
from logitless.backends.vulkan.instance import DeviceInfo, all_devices
from logitless.backends.vulkan.pipelines import Pipelines, shader_name

# The driver, its shim, and the variable that names the chip to it; ocloc's names of devices.
CHIPS = {
    **{chip: ("radeon", "amdgpu", "AMDGPU_GPU_ID", chip) for chip in ("navi21", "navi31", "gfx1201", "phoenix")},
    "renoir": ("radeon", "amdgpu", "AMDGPU_GPU_ID", "renoir"),
    "m1": ("asahi", "asahi", "", ""),
    "adreno740": ("freedreno", "freedreno", "FD_GPU_ID", "740"),
    "ad102": ("nouveau", "nouveau", "NOUVEAU_CHIPSET", "0x192"),
}
INTEL = {"battlemage": "bmg", "dg2": "dg2", "tigerlake": "tgllp"}
NVIDIA = ("sm_75", "sm_86", "sm_89", "sm_120")
CLANG = ["clang", "-x", "cl", "-cl-std=CL2.0", "-target", "nvptx64-nvidia-nvcl", "-Xclang", "-cl-ext=+cl_khr_fp16"]
CLANG += ["-Xclang", "-target-feature", "-Xclang", "+ptx78", "-Xclang", "-target-cpu", "-Xclang", "sm_75"]
CLANG += ["-Xclang", "-disable-llvm-verifier", "-O3", "-S", "-w"]
REGISTERS = 65536  # of a multiprocessor of NVIDIA
EXTENSION = "VK_KHR_pipeline_executable_properties"
FEATURES, PIPELINE, PROPERTIES, EXECUTABLE, STATISTIC, TEXT = range(1000269000, 1000269006)
CAPTURE = 0x40 | 0x80  # statistics, internal representations
MEMBERS = ("b32", "i64", "u64", "f64")
# Statistics by the names that drivers give them, in lower case.
COLUMNS = {
    "instructions": ("instructions", "instruction count", "instrs"),
    "spills": ("spilled vgprs", "spilled sgprs", "spills", "fills", "spills to memory", "stp count", "ldp count"),
    "waves": ("subgroups per simd", "max warps/sm", "max waves per core", "threads"),
}
# Loads from memory in machine code: mnemonics, whose width is in the name (bits, or words of four bytes).
LOADS = re.compile(
    r"\b(?:global|flat|buffer|s)_(?:buffer_)?load_(\w+)"
    r"|\bld\.global[.\w]*\.([bus]\d+)\b"
    r"|\bldg\.(?:a\.)?(\w+) .*, (\d+)$",
    re.M,
)
WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "dwordx8": 32, "dwordx16": 64}


def load_bytes(match: re.Match[str]) -> int:
    """Bytes of a load; less than a word counts as one."""
    name = next(part for part in match.groups()[:3] if part)
    if name in WIDTHS:
        return WIDTHS[name]
    bits = re.search(r"\d+", name)
    return max(int(bits[0]) // 8 if bits else 4, 4) * int(match[4] or 1)


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
        wish = self.ffi.new("VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR *")
        wish.sType, wish.pipelineExecutableInfo, wish.pNext = FEATURES, 1, info.pNext
        info.enabledExtensionCount, info.ppEnabledExtensionNames, info.pNext = len(keep), array, wish
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
        which = self.ffi.new("VkPipelineExecutableInfoKHR *")
        which.sType, which.pipeline = EXECUTABLE, pipeline
        numbers = self._call(
            "vkGetPipelineExecutableStatisticsKHR", which, "VkPipelineExecutableStatisticKHR", STATISTIC
        )
        found = {self.ffi.string(s.name).decode().lower(): getattr(s.value, MEMBERS[s.format]) for s in numbers}
        name = "vkGetPipelineExecutableInternalRepresentationsKHR"
        texts = self._call(name, which, "VkPipelineExecutableInternalRepresentationKHR", TEXT)
        code = self.ffi.string(self.ffi.cast("char *", texts[-1].pData)).decode(errors="replace") if texts else ""
        return {"statistics": found, "loads": Counter(load_bytes(m) for m in LOADS.finditer(code))}


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


def launches(kernel: Kernel, sizes: dict[str, int], info: DeviceInfo, shape: Shape) -> bool:
    """False for a variant that a device never runs."""
    if kernel.name == "sample":
        return sizes["WG"] <= (512 if shape.dot else 256)
    if kernel.name.startswith(("linear_dot", "expert_linear_dot", "linear_coop")):
        return shape.dot and (not kernel.special or info.matrices is not None)
    few_rows = not kernel.name.startswith("linear_") or sizes.get("MT", 1) <= shape.rows
    return few_rows and sizes["WG"] <= info.max_invocations


def compile_on_chip(patterns: list[str]) -> None:
    """Compile shaders on the Vulkan device that the shim pretends; a line of JSON each."""
    recorder = Recorder(*api.binding())
    for name, module in list(sys.modules.items()):
        if name.startswith("logitless.backends.vulkan.") and hasattr(module, "binding"):
            module.binding = lambda: (recorder.ffi, recorder)  # type: ignore[attr-defined]
    info = all_devices()[0]
    if info.missing:
        sys.exit(f"{info.name} lacks {info.missing}")
    pipelines, shape = Pipelines(vulkan_device.Device(info)), class_of(info)
    for name, kernel, defines in variants(patterns):
        if not launches(kernel, dict(defines), info, shape):
            continue
        try:
            pipelines.get(kernel, defines)
        except KernelRefused as error:
            recorder.last = {"failed": str(error)}
        print(json.dumps({"kernel": name, **recorder.last}), flush=True)
    os._exit(0)  # no-op drivers do not all end well


def compile_for_intel(target: str, patterns: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name, kernel, defines in variants(patterns):
        if kernel.extensions:
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "kernel.cl").write_text(render_opencl(kernel, defines, SIMT))
            command = ["ocloc", "compile", "-file", "kernel.cl", "-device", target, "-q"]
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - start
            spilled = re.findall(r"spilled .*?(\d+)", done.stdout + done.stderr)
            row = {"kernel": name, "seconds": seconds, "loads": {}, "statistics": {"spills": sum(map(int, spilled))}}
            rows.append(row | ({"failed": done.stdout} if done.returncode else {}))
    return rows


def compile_for_nvidia(target: str, patterns: list[str]) -> list[dict[str, Any]]:
    ptxas = shutil.which("ptxas") or next(Path(sys.prefix).rglob("cuda_nvcc/bin/ptxas"))
    head, rows = Path(__file__).with_suffix(".cl").read_text(), []
    for name, kernel, defines in variants(patterns):
        if kernel.extensions:
            continue
        with tempfile.TemporaryDirectory() as folder:
            text, code = Path(folder, "kernel.cl"), Path(folder, "kernel.ptx")
            text.write_text(head + render_opencl(kernel, defines, SIMT))
            start, said = time.perf_counter(), ""
            for command in ([*CLANG, str(text), "-o", str(code)], [ptxas, "-v", f"-arch={target}", str(code)]):
                if code.exists():  # clang writes another target than ptxas is to compile for
                    code.write_text(re.sub(r"\.target sm_\w+", f".target {target}", code.read_text()))
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
                said += done.stdout + done.stderr
                if done.returncode:
                    break
        registers = max(map(int, re.findall(r"Used (\d+) registers", said)), default=0)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", said))) // 4
        warps = min(REGISTERS // (32 * registers), 48) if registers else 0
        row = {"kernel": name, "seconds": time.perf_counter() - start, "loads": {}}
        row["statistics"] = {"spills": spills, "registers": registers, "max warps/sm": warps}
        rows.append(row | ({"failed": said} if done.returncode else {}))
    return rows


def rows_of(chip: str, patterns: list[str]) -> list[dict[str, Any]]:
    if chip in INTEL:
        return compile_for_intel(INTEL[chip], patterns)
    if chip in NVIDIA:
        return compile_for_nvidia(chip, patterns)
    driver, shim, variable, value = CHIPS[chip]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "VK_DRIVER_FILES": f"/usr/share/vulkan/icd.d/{driver}_icd.json",
            "LD_PRELOAD": f"/usr/lib/x86_64-linux-gnu/lib{shim}_noop_drm_shim.so",
            "NVK_I_WANT_A_BROKEN_VULKAN_DRIVER": "1",
            "MESA_SHADER_CACHE_DISABLE": "true",
            "XDG_CACHE_HOME": cache,
        }
        command = [sys.executable, "-m", "scripts.chip_table", "--here", *patterns]
        env |= {variable: value} if variable else {}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{chip}: the compiler ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def cell(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["–"] * 5
    if "failed" in row:
        return ["failed", *["–"] * 4]
    numbers = [column(row, name) for name in COLUMNS]
    loads = " ".join(f"{n}×{width}" for width, n in sorted((int(w), n) for w, n in row["loads"].items()))
    return ["–" if n is None else f"{n:,}" for n in numbers] + [loads or "–", f"{row['seconds']:.2f}"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", default=",".join(CHIPS), help=f"of {', '.join([*CHIPS, *INTEL, *NVIDIA])}")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--before", type=Path, help="an earlier --json: each number becomes `before → now`")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("patterns", nargs="+", help="names of kernels, as `linear_dot_q8_0-*`")
    args = parser.parse_args(argv)
    if args.here:
        compile_on_chip(args.patterns)
    results = {chip: rows_of(chip, args.patterns) for chip in args.chips.split(",")}
    if args.json:
        args.json.write_text(json.dumps(results))
    earlier = json.loads(args.before.read_text()) if args.before else {}
    print("| kernel | chip | instructions | spills | waves | loads × bytes | seconds |\n|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["kernel"] for rows in results.values() for row in rows):
        for chip, rows in results.items():
            now, old = (
                cell(next((row for row in of if row["kernel"] == name), None)) for of in (rows, earlier.get(chip, []))
            )
            if any(row["kernel"] == name for row in rows):
                both = [f"{a} → {b}" if a not in (b, "–") else b for a, b in zip(old, now, strict=True)]
                print(f"| {name} | {chip} | {' | '.join(both)} |")
    for chip, rows in results.items():
        failed = sum("failed" in row for row in rows)
        spills = sum("failed" not in row and bool(column(row, "spills")) for row in rows)
        print(f"\n{chip}: {len(rows)} kernels, {failed} failed, {spills} spill", end="")
    print()


if __name__ == "__main__":
    main()
