"""numba as a front end only: a Python function → unoptimised LLVM IR, callees included.

numba compiles every callee to machine code of its own, with Python wrappers, and optimises each one
with all that it calls. Here only the IR is needed, which `llvm.py` optimises once, as a whole. For
a kernel of 60 small functions that is 6 s instead of 34 s. numba has no option for it, so the
unneeded steps are patched out while a kernel compiles. Half of the rest took, and are patched too:
the rules of arrays for every operator, though a kernel has no arrays; the search for an operator's
rule, repeated for the same types; the colours of messages that nobody reads; the lifetimes of
variables, computed after each pass and used after the last; and garbage collection."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

# Sums may be re-associated into vector lanes. The order is fixed per kernel, the same for every row.
FASTMATH = {"reassoc", "contract", "nsz"}


def names_of(function: Any) -> tuple[str, ...]:
    """The names of a kernel's arguments, where it is `kernel(q, k, …, begin, end, scratch)`; (): it is
    `kernel(a, begin, end, scratch)` and reads the block itself."""
    names = tuple(inspect.signature(function).parameters)
    return () if names[0] == "a" or hasattr(function, "signature") else names[:-3]


def with_block(function: Any) -> Any:
    """The kernel as a function of its argument block."""
    import numba

    if not (names := names_of(function)):
        return function
    fastmath: Any = getattr(function, "fastmath", FASTMATH)
    inner: Any = numba.njit(fastmath=fastmath, error_model="numpy", forceinline=True)(function)
    space: dict[str, Any] = {"kernel": inner}
    values = ", ".join(f"a[{i}]" for i in range(len(names)))
    exec(f"def run(a, begin, end, scratch):\n    kernel({values}, begin, end, scratch)", space)
    return space["run"]


def ir_of(function: Any) -> tuple[str, str]:
    """(IR as text, name of the entry) of a kernel function (kernels/ir/registry.py)."""
    import numba
    from numba.core.compiler_lock import global_compiler_lock

    types: Any = numba.types
    signature = getattr(function, "signature", None) or types.void(
        types.CPointer(types.int64), types.int64, types.int64, types.int64
    )
    fastmath = getattr(function, "fastmath", FASTMATH)
    with global_compiler_lock, _without_machine_code():
        compiled = numba.njit(signature, nogil=True, fastmath=fastmath, error_model="numpy")(with_block(function))
        result: Any = compiled.overloads[compiled.signatures[0]]
        result.library._ensure_finalized()  # links the callees
        return result.library.get_llvm_str(), result.fndesc.llvm_func_name


_signatures: dict[Any, Any] = {}  # by function or operator, and types of its arguments


def _with_cache(get_call_type: Any) -> Any:
    """numba's search for the signature of a call, which runs once for each function and argument types."""

    def cached_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        key = function, args, tuple(sorted(kws.items()))
        if key not in _signatures:
            _signatures[key] = get_call_type(function, context, args, kws)
        return _signatures[key]

    return cached_call_type


def _post_process(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """numba's `PostProcessor.run` for a function that is no generator."""
    from numba.core import postproc, transforms

    canonical: Any = transforms.canonicalize_cfg
    lifetimes: Any = postproc.VariableLifetime
    function = processor.func_ir
    function.blocks = canonical(function.blocks)
    function.variable_lifetime, function.generator_info = lifetimes(function.blocks), None
    if emit_dels:
        processor._insert_var_dels(extend_lifetimes=extend_lifetimes)


@contextlib.contextmanager
def _without_machine_code() -> Iterator[None]:
    from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary, JITCPUCodegen
    from numba.core.errors import termcolor
    from numba.core.lowering import BaseLower
    from numba.core.postproc import PostProcessor
    from numba.core.types.functions import BaseFunction
    from numba.core.typing.npydecl import NumpyRulesArrayOperator, NumpyRulesInplaceArrayOperator

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (CPUCodeLibrary, "_optimize_functions", nothing),
            (CPUCodeLibrary, "_optimize_final_module", nothing),
            (JITCodeLibrary, "_finalize_specific", nothing),
            (BaseLower, "create_cpython_wrapper", nothing),
            (BaseLower, "create_cfunc_wrapper", nothing),
            (NumpyRulesArrayOperator, "generic", nothing),
            (NumpyRulesInplaceArrayOperator, "generic", nothing),
            # of the wrapper, which is never called
            (JITCodeLibrary, "get_pointer_to_function", lambda *args: 1),
            (JITCPUCodegen, "set_env", nothing),
            (BaseFunction, "get_call_type", _with_cache(BaseFunction.get_call_type)),
            (PostProcessor, "run", _post_process),
            (type(termcolor()), "_markup", lambda self, message, *args: message),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))  # colours need colorama
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        yield
