"""Compilation of a kernel: numba makes LLVM IR, LLVM an object file, `linker.py` an image.

Importing this imports LLVM. An object file that cannot be linked is cached as it is, and LLVM loads
it."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm

from logitless.backends.cpu.compiler import linker
from logitless.backends.cpu.compiler.numba_frontend import ir_of
from logitless.backends.host import target_host

FRAMED = r'\1 "frame-pointer"="all" {'


@functools.cache
def target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    here = target_host()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=here.name, features=here.attributes, opt=3, reloc="pic", codemodel="default"
    )


@functools.cache
def _engine() -> Any:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target())


def compile_kernel(name: str, module: str, symbol: str) -> bytes:
    """Code of a kernel of `module` with entry `symbol`: a linked image, or an object file."""
    family, *params = name.split(":")
    importlib.import_module(f"logitless.backends.cpu.kernels.{module}")
    from logitless.backends.cpu.kernels.ir.registry import KERNELS

    source, entry = ir_of(KERNELS[family](*params))
    code = object_code(source, entry, symbol)
    try:
        return linker.link(code, symbol)
    except linker.NotLinkable:
        return code


def object_code(source: str, entry: str, symbol: str) -> bytes:
    """Optimised machine code. Everything but the entry becomes private, so callees are inlined.

    The frame pointer keeps rbp free of other uses. A Xeon mostly ignores a `prefetcht2`
    whose address begins with that register, which LLVM picks now and then; 8 rows took a fifth
    longer (docs/experiments/cpu-matmul.md)."""
    module = llvm.parse_assembly(re.sub(rf'^(define .*{re.escape(entry)}"?\(.*\)) {{$', FRAMED, source, flags=re.M))
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = "internal"
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    main = module.get_function(entry)
    main.linkage = "external"
    main.name = symbol
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(target(), options)
    builder.getModulePassManager().run(module, builder)
    return bytes(target().emit_object(module))


def load_objects(objects: Sequence[tuple[str, bytes]]) -> list[int]:
    """Addresses of (symbol, object file), loaded by LLVM. 0 for a file without its symbol."""
    engine = _engine()
    for _, code in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return [engine.get_function_address(symbol) for symbol, _ in objects]
