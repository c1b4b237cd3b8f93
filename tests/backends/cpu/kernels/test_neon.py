"""ARM dot products, cross-compiled: the code uses dot instructions, and few other multiplications.

`scripts/arm` checks the results in an emulator.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

MAKE = """
import sys
import llvmlite.binding as llvm
from logitless.backends import host as isa

isa.host = lambda: isa.Host("neoverse-n1", "+neon,+dotprod")
assert isa.isa() == "neon_dot"
from logitless.backends.cpu.compiler.numba_frontend import ir_of
from logitless.backends.cpu.kernels.ir import builder as emit
emit.is_x86 = lambda b: False
from logitless.backends.cpu.kernels.ir import registry
from logitless.backends.cpu.kernels.matmul import packed_matmul

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
triple = "aarch64-unknown-linux-gnu"
machine = llvm.Target.from_triple(triple).create_target_machine(cpu="neoverse-n1", features="+dotprod", opt=3)
for name in sys.argv[1:]:
    family, *params = name.split(":")
    text, entry = ir_of(registry.KERNELS[family](*params))
    module = llvm.parse_assembly(text)
    module.triple = triple
    module.data_layout = str(machine.target_data)
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = "internal"
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    print(machine.emit_assembly(module), end="\f")
"""


PRODUCTS = {
    "q8_0": 4,
    "q4_0": 1,
    "q6_k": 4,
    "iq4_nl": 4,
    "mxfp4": 1,
    "q2_k": 4,
    "q3_k": 1,
    "iq3_xxs": 1,
}  # rows of a type's product


def test_products_compile_to_dot_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGITLESS_ISA", raising=False)  # of a run of all tests
    command = [sys.executable, "-c", MAKE, *(f"linear:{dtype}:{rows}x1" for dtype, rows in PRODUCTS.items())]
    codes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\f")[:-1]
    for (dtype, rows), code in zip(PRODUCTS.items(), codes, strict=True):
        dots = re.findall(r"^\tsdot\tv", code, re.MULTILINE)
        assert len(dots) >= 32 * rows, dtype  # of 32 elements of 16 outputs
        others = re.findall(r"^\t[su]?(?:mul|mla|mls|mull|mlal|mlsl)2?\tv.*", code, re.MULTILINE)
        assert len(others) <= len(dots) // 32, (dtype, others)
