"""exp, log and tanh of a float32 without a library, so that loops around them become vector code.

Written with fused multiply-adds and bit patterns only, so a kernel's permission to re-associate cannot change them.
`exp_f32` is within 1 ulp, `log_f32` and `tanh_f32` within 2; `exp_exact` and `log_exact` compute in double and round
once, which is what glibc's expf and logf return in all but about one case in a million (test_sampling_mathf.py).
The polynomials are weighted minimax fits made for this file.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from backends.cpu.kernels.registry import _unary, abs_f32, fma_f32

F32, F64, I32, I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)
f32 = types.float32
ROOT_HALF, MAGIC32, MAGIC64 = 0x3F3504F3, 0x4B400000, 0x4338000000000000  # √½; 1.5·2²³ and 1.5·2⁵² as bits


@intrinsic
def _ldexp(typingctx, p, t):
    """p · 2ⁿ for p near 1, with n the integer that was added to 1.5·2²³ to give t: half of n goes into the exponent
    field, half is a factor, so a subnormal result is rounded once and nothing overflows on the way."""

    def codegen(ctx, b, sig, args):
        n = b.sub(b.bitcast(args[1], I32), ir.Constant(I32, MAGIC32))
        half = b.ashr(n, ir.Constant(I32, 1))
        start = b.bitcast(b.add(b.bitcast(args[0], I32), b.shl(half, ir.Constant(I32, 23))), F32)
        rest = b.shl(b.add(b.sub(n, half), ir.Constant(I32, 127)), ir.Constant(I32, 23))
        return b.fmul(start, b.bitcast(rest, F32))

    return f32(f32, f32), codegen


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
def exp_f32(x):
    """eˣ: +0 from -104 down to -inf, +inf from 88.73 up, subnormal results included; NaN gives NaN."""
    x = np.float32(-105) if x < np.float32(-105) else x
    x = np.float32(89) if x > np.float32(89) else x
    t = fma_f32(x, np.float32(1.44269504), np.float32(12582912))
    n = fma_f32(t, np.float32(1), np.float32(-12582912))
    r = fma_f32(n, np.float32(-0.693145752), x)
    r = fma_f32(n, np.float32(-1.42860677e-6), r)
    p = fma_f32(np.float32(0.0013814320554956794), r, np.float32(0.008368851616978645))
    p = fma_f32(p, r, np.float32(0.041668400168418884))
    p = fma_f32(p, r, np.float32(0.1666651964187622))
    p = fma_f32(p, r, np.float32(0.4999999403953552))
    p = fma_f32(fma_f32(p, r, np.float32(1)), r, np.float32(1))
    return _ldexp(p, t)


@njit(forceinline=True)
def exp_exact(x):
    """eˣ of a float32 computed in double and rounded once; the same limits as exp_f32, about three times the work."""
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
def log_f32(x):
    """ln x: 0 gives -inf, a negative number or NaN gives NaN, +inf gives +inf; subnormals are exact."""
    small = x < np.float32(1.1754944e-38)
    y = x * np.float32(8388608) if small else x
    e = _exponent(y) - (np.float32(23) if small else np.float32(0))
    f = fma_f32(_mantissa(y), np.float32(1), np.float32(-1))
    p = fma_f32(np.float32(0.06746641546487808), f, np.float32(-0.11675657331943512))
    p = fma_f32(p, f, np.float32(0.11888165026903152))
    p = fma_f32(p, f, np.float32(-0.1240558847784996))
    p = fma_f32(p, f, np.float32(0.14219552278518677))
    p = fma_f32(p, f, np.float32(-0.1666799634695053))
    p = fma_f32(p, f, np.float32(0.2000211924314499))
    p = fma_f32(p, f, np.float32(-0.25000008940696716))
    p = fma_f32(p, f, np.float32(0.3333331346511841))
    tail = fma_f32(fma_f32(p, f, np.float32(-0.5)), fma_f32(f, f, np.float32(0)), np.float32(0))
    tail = fma_f32(e, np.float32(1.42860677e-6), tail)
    head = fma_f32(e, np.float32(0.693145752), f)
    value = tail + head
    value = x if x == np.float32(np.inf) else value
    value = np.float32(-np.inf) if x == np.float32(0) else value
    return value if x >= np.float32(0) else np.float32(np.nan)


@njit(forceinline=True)
def log_exact(x):
    """ln x of a float32 computed in double and rounded once; the same limits as log_f32."""
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


@njit(forceinline=True)
def tanh_f32(x):
    """tanh x: odd, ±1 beyond ±9.01; NaN gives NaN."""
    a = abs_f32(x)
    q = fma_f32(x, x, np.float32(0))
    p = fma_f32(np.float32(-0.005717042367905378), q, np.float32(0.020650584250688553))
    p = fma_f32(p, q, np.float32(-0.05374349653720856))
    p = fma_f32(p, q, np.float32(0.13331490755081177))
    p = fma_f32(p, q, np.float32(-0.3333328366279602))
    near = fma_f32(fma_f32(p, q, np.float32(0)), x, x)
    far = fma_f32(np.float32(-2) / (exp_f32(a + a) + np.float32(1)), np.float32(1), np.float32(1))
    far = -far if x < np.float32(0) else far
    return near if a < np.float32(0.625) else far
