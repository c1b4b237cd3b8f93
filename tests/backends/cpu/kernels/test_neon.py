"""ARM's products of bytes, cross-compiled: the code uses their instructions, and few other multiplications.

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

cpu, features = sys.argv[1:3]
isa.host = lambda: isa.Host(cpu, f"+neon,{features}")
assert isa.isa().startswith("neon")
from logitless.backends.cpu.compiler.numba_frontend import ir_of
from logitless.backends.cpu.kernels.ir import builder as emit
emit.is_x86 = lambda b: False
from logitless.backends.cpu.kernels.ir import registry
from logitless.backends.cpu.kernels.matmul import packed_matmul

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
triple = "aarch64-unknown-linux-gnu"
machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
for name in sys.argv[3:]:
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


PRODUCTS = {"q8_0": 4, "q3_k": 1, "iq4_nl": 4}  # rows of a type's product
OTHERS = {"q4_0": 1, "q6_k": 4, "mxfp4": 1, "q2_k": 4, "iq3_xxs": 1}


def assembly(cpu: str, features: str, *kernels: str) -> list[str]:
    """Code of each kernel."""
    command = [sys.executable, "-c", MAKE, cpu, features, *kernels]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\f")[:-1]


def count(instruction: str, code: str) -> int:
    """Number of its places in a code."""
    return len(re.findall(rf"^\t{instruction}\tv", code, re.MULTILINE))


MULTIPLICATIONS = "[su]?(?:mul|mla|mls|mull|mlal|mlsl)2?"


@pytest.mark.parametrize("products", [PRODUCTS, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"])
def test_products_compile_to_dot_instructions(monkeypatch: pytest.MonkeyPatch, products: dict[str, int]) -> None:
    monkeypatch.delenv("LOGITLESS_ISA", raising=False)  # of a run of all tests
    codes = assembly("neoverse-n1", "+dotprod", *(f"linear:{dtype}:{rows}x1" for dtype, rows in products.items()))
    for (dtype, rows), code in zip(products.items(), codes, strict=True):
        assert count("sdot", code) >= 32 * rows, dtype  # of 32 elements of 16 outputs
        assert count(MULTIPLICATIONS, code) <= count("sdot", code) // 32, dtype


def test_products_of_prompts_compile_to_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of few rows have dots; matrices of four rows and 16 outputs replace two dots each."""
    monkeypatch.delenv("LOGITLESS_ISA", raising=False)
    dtypes = ("q8_0", "q6_k")
    codes = assembly("neoverse-v2", "+dotprod,+i8mm", "linear:q4_0:4x1", *(f"linear:{dtype}:4x2" for dtype in dtypes))
    assert (count("smmla", codes[0]), count("sdot", codes[0])) == (0, 128)
    for dtype, code in zip(dtypes, codes[1:], strict=True):
        assert (count("smmla", code), count("sdot", code)) == (128, 0), dtype  # of the first tile and the others
        assert count(MULTIPLICATIONS, code) == 0, dtype
