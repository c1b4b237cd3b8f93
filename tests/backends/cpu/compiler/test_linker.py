"""Linked code images against LLVM's own loader, from the same object files."""

from __future__ import annotations

import ctypes
import struct

import pytest

from logitless.backends.cpu.compiler import linker
from logitless.backends.cpu.compiler import llvm as compiler

TABLES = """
@names = private constant [3 x ptr] [ptr @one, ptr @two, ptr @three]
@one = private constant [2 x i64] [i64 11, i64 12]
@two = private constant [2 x i64] [i64 21, i64 22]
@three = private constant [2 x i64] [i64 31, i64 32]
define i64 @f(i64 %i, i64 %j) {
  %at = getelementptr [3 x ptr], ptr @names, i64 0, i64 %i
  %row = load ptr, ptr %at
  %element = getelementptr i64, ptr %row, i64 %j
  %found = load i64, ptr %element
  ret i64 %found
}"""
CASES = "\n".join(f"c{i}:\n  %r{i} = call double @exp(double {i}.25)\n  br label %end" for i in range(8))
BRANCHES = f"""
declare double @exp(double)
declare double @cos(double)
define i64 @f(i64 %i, i64 %j) {{
  switch i64 %i, label %other [ {" ".join(f"i64 {i}, label %c{i}" for i in range(8))} ]
{CASES}
other:
  %x = sitofp i64 %j to double
  %c = call double @cos(double %x)
  br label %end
end:
  %r = phi double [ %c, %other ], {", ".join(f"[ %r{i}, %c{i} ]" for i in range(8))}
  %bits = bitcast double %r to i64
  ret i64 %bits
}}"""
WRITTEN = "@n = global i64 3\ndefine i64 @f() {\n  store i64 4, ptr @n\n  ret i64 0\n}"
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def object_of(source: str) -> bytes:
    # nothing is folded
    return bytes(compiler.target().emit_object(compiler.llvm.parse_assembly(source)))


@pytest.mark.parametrize("source", [TABLES, BRANCHES], ids=["addresses", "branches and calls"])
def test_image_computes_what_the_object_file_does(source: str) -> None:
    code = object_of(source)
    own = compiler.target.__wrapped__()  # an engine destroys its target machine with it
    engine = compiler.llvm.create_mcjit_compiler(compiler.llvm.parse_assembly(""), own)
    engine.add_object_file(compiler.llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    theirs = FUNCTION(engine.get_function_address("f"))
    linked = linker.link(code, "f")
    assert linker.is_image(linked)
    assert not linker.is_image(code)
    rows = range(3) if source is TABLES else range(10)
    expected = [theirs(i, j) for i in rows for j in (0, 1)]
    for entry in linker.load([linked, linked]):  # each with its own absolute words
        assert [FUNCTION(entry)(i, j) for i in rows for j in (0, 1)] == expected
    assert source is not TABLES or expected == [11, 12, 21, 22, 31, 32]


def test_unsupported_object_is_not_linked() -> None:
    code = object_of(TABLES)
    for other, why in (
        (b"", "x86-64"),
        (b"\xcf\xfa\xed\xfe" + bytes(60), "x86-64"),  # macOS
        (code[:18] + struct.pack("<H", 183) + code[20:], "x86-64"),  # 64-bit Arm
        (object_of(WRITTEN), "section .data"),
        (object_of(BRANCHES.replace("@cos", "@no_such_function")), "function no_such_function"),
    ):
        with pytest.raises(linker.NotLinkable, match=why):
            linker.link(other, "f")
    with pytest.raises(linker.NotLinkable, match="no function g"):
        linker.link(code, "g")


def test_load_of_no_images() -> None:
    assert linker.load([]) == []
