"""Scalar exp and log of f32, computed in double and rounded once. Loops of them vectorise.

They return glibc's expf and logf, in all but about one case in a million
(test_scalar_math.py). They use only fused multiply-adds and bit patterns, so re-association cannot
change them. The polynomials are weighted minimax fits made for this file. ir/math.py is faster
where an ulp does not decide a token."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir.registry import _unary

F32, F64, I32, I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
f32 = types.float32
ROOT_HALF, MAGIC64 = 0x3F3504F3, 0x4338000000000000  # √½ and 1.5·2⁵² as bits


def _reduced(b, x):
    return b.sub(b.bitcast(x, I32), ir.Constant(I32, ROOT_HALF))


# x = 2^exponent · mantissa with mantissa in [√½, √2), for normal positive x
_exponent = _unary(f32, f32, lambda b, x: b.sitofp(b.ashr(_reduced(b, x), ir.Constant(I32, 23)), F32))
_mantissa = _unary(
    f32,
    f32,
    lambda b, x: b.bitcast(b.add(b.and_(_reduced(b, x), ir.Constant(I32, 0x7FFFFF)), ir.Constant(I32, ROOT_HALF)), F32),
)


def _pow2_f64(b, t):
    n = b.sub(b.bitcast(t, I64), ir.Constant(I64, MAGIC64 - 1023))
    return b.bitcast(b.shl(n, ir.Constant(I64, 52)), F64)


_scale_f64 = _unary(types.float64, types.float64, _pow2_f64)


@intrinsic
def _fma_f64(typingctx, x, y, z):
    def codegen(ctx, b, sig, args):
        name = "llvm.fma.f64"
        function = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(F64, [F64] * 3), name)
        return b.call(function, args)

    return types.float64(types.float64, types.float64, types.float64), codegen


@njit(forceinline=True)
def exp_exact(x):
    """eˣ: +0 below -104, +inf from 88.73 up, subnormal results included; NaN for NaN."""
    v = np.float64(x)
    v = -150.0 if v < -150.0 else v
    v = 100.0 if v > 100.0 else v
    t = _fma_f64(v, 1.4426950408889634, 6755399441055744.0)
    n = _fma_f64(t, 1.0, -6755399441055744.0)
    r = _fma_f64(n, -0.6931471805599453, v)
    p = _fma_f64(2.749286522885013e-06, r, 2.4881109137866263e-05)
    p = _fma_f64(p, r, 0.00019841541034469707)
    p = _fma_f64(p, r, 0.0013888810557858209)
    p = _fma_f64(p, r, 0.008333333092443704)
    p = _fma_f64(p, r, 0.041666666965581564)
    p = _fma_f64(p, r, 0.16666666667274152)
    p = _fma_f64(p, r, 0.4999999999965934)
    p = _fma_f64(_fma_f64(p, r, 1.0), r, 1.0)
    return np.float32(p * _scale_f64(t))


@njit(forceinline=True)
def log_exact(x):
    """ln x: -inf for 0, NaN for a negative number or NaN, +inf for +inf; exact for subnormals."""
    small = x < np.float32(1.1754944e-38)
    y = x * np.float32(8388608) if small else x
    e = np.float64(_exponent(y)) - (23.0 if small else 0.0)
    m = np.float64(_mantissa(y))
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    p = _fma_f64(q, 1 / 19, 1 / 17)
    p = _fma_f64(p, q, 1 / 15)
    p = _fma_f64(p, q, 1 / 13)
    p = _fma_f64(p, q, 1 / 11)
    p = _fma_f64(p, q, 1 / 9)
    p = _fma_f64(p, q, 1 / 7)
    p = _fma_f64(p, q, 1 / 5)
    p = _fma_f64(p, q, 1 / 3)
    p = _fma_f64(p, q, 1.0)
    value = np.float32(_fma_f64(e, 0.6931471805599453, 2.0 * s * p))
    value = x if x == np.float32(np.inf) else value
    value = np.float32(-np.inf) if x == np.float32(0) else value
    return value if x >= np.float32(0) else np.float32(np.nan)
