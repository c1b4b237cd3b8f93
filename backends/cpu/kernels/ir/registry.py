"""Kernel registry, and typed pointers and conversions for numba.

A kernel is a plain function `kernel(x_at, y_at, n, …, begin, end, scratch)` that numba compiles:

    x_at, n, …   its arguments, int64 each: addresses (`_at`), sizes, float attributes as `_bits`
    begin, end   the units of work (rows, tiles, heads …) of this call; units are independent
    scratch      address of this thread's scratch memory

It returns nothing, raises nothing and allocates nothing. Batch invariance: it gives the same bits
for any division into units. `@kernel("name")` registers it, or a factory `make(*params) -> function`
of kernels that are requested as "name:param:param". A test compares the number of arguments with the lowerings'.
`kernel(a, begin, end, scratch)` reads the block of arguments itself; its docstring lists them.
This package is imported only to compile a kernel: a warm start never imports numba."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel, or `make(*params) -> kernel`, under a family name."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        if name in KERNELS:
            raise ValueError(f"kernel {name} registered twice")
        itself = [*inspect.signature(make).parameters][-3:] == ["begin", "end", "scratch"]
        KERNELS[name] = (lambda: make) if itself else make
        return make

    return register


def _pointer(element: Any) -> Any:
    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        pointer = types.CPointer(element)

        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], ctx.get_value_type(pointer))

        return pointer(types.int64), codegen

    return cast


# `f32p(address)[i]` loads or stores element i, without bounds checks or wrap-around.
f32p, f64p = _pointer(types.float32), _pointer(types.float64)
i8p, u8p, u16p = _pointer(types.int8), _pointer(types.uint8), _pointer(types.uint16)
i32p, u32p, i64p = _pointer(types.int32), _pointer(types.uint32), _pointer(types.int64)


def _unary(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def convert(typingctx: Any, x: Any) -> Any:
        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            return emit(b, args[0])

        return result(argument), codegen

    return convert


F32, I32, I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
f16_to_f32 = _unary(types.float32, types.uint16, lambda b, x: b.fpext(b.bitcast(x, ir.HalfType()), F32))
f32_to_f16 = _unary(types.uint16, types.float32, lambda b, x: b.bitcast(b.fptrunc(x, ir.HalfType()), I16))
bf16_to_f32 = _unary(
    types.float32, types.uint16, lambda b, x: b.bitcast(b.shl(b.zext(x, I32), ir.Constant(I32, 16)), F32)
)
bits_f32 = _unary(types.float32, types.int64, lambda b, x: b.bitcast(b.trunc(x, I32), F32))
bits_of = _unary(types.int32, types.float32, lambda b, x: b.bitcast(x, I32))
from_bits = _unary(types.float32, types.int32, lambda b, x: b.bitcast(x, F32))


def _llvm_f32(name: str, n_args: int) -> Any:
    def declare(b: Any) -> Any:
        return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(F32, [F32] * n_args), name)

    if n_args == 1:

        @intrinsic
        def call1(typingctx: Any, x: Any) -> Any:
            return types.float32(types.float32), lambda ctx, b, sig, args: b.call(declare(b), args)

        return call1

    @intrinsic
    def call2(typingctx: Any, x: Any, y: Any) -> Any:
        return types.float32(types.float32, types.float32), lambda ctx, b, sig, args: b.call(declare(b), args)

    return call2


rint_f32 = _llvm_f32("llvm.rint.f32", 1)  # round half to even
abs_f32 = _llvm_f32("llvm.fabs.f32", 1)
sqrt_f32 = _llvm_f32("llvm.sqrt.f32", 1)
min_f32 = _llvm_f32("llvm.minnum.f32", 2)
max_f32 = _llvm_f32("llvm.maxnum.f32", 2)
