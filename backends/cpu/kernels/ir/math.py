"""Vector math IR of any width: f32 arithmetic, exp, tanh, and elementwise loops.

The loops may run in place. numba's own loops may not: LLVM vectorises those behind a check that
input and output do not overlap. A lane's result does not depend on the vector's width."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.builder import F32, I32, I64, splat

LANES = 16
# Added to a number, its low bits hold the nearest integer with the exponent bias.
EXPONENT_ZERO = 12582912.0 + 127
STRICT = ("nsz",)  # numba's default flags allow an addition to be re-associated


def vector(n):
    return ir.VectorType(F32, n)


def fill(n, value):
    """A constant of n lanes: f32 from a float, i32 from an int."""
    return ir.Constant(ir.VectorType(F32 if isinstance(value, float) else I32, n), [value] * n)


def call(b, name, *args):
    """LLVM intrinsic of f32 vectors, by its name without the type."""
    kind = args[0].type
    return e.call(b, f"llvm.{name}.v{kind.count}f32", kind, args)


def fma(b, x, y, z):
    """x·y + z, always rounded once. Unlike `builder.fma`, it is not re-associated."""
    return call(b, "fma", x, y, z)


def exp(b, x):
    """eˣ within 1.2 ulp; 0 below −87.3 (f32 subnormal), +inf above 88.7, NaN for NaN."""
    n = x.type.count
    bounded = b.select(b.fcmp_ordered(">", x, fill(n, 88.8)), fill(n, 88.8), x)
    # the nearest integer in the low bits
    t = fma(b, bounded, fill(n, 1.4426950408889634), fill(n, 12582912.0))
    k = b.fsub(t, fill(n, 12582912.0))
    p = _exp_of_rest(b, bounded, k)
    # 2^k as 2^(k/2)·2^(k-k/2), because k = 128 is still finite just below the overflow
    whole = b.sub(b.bitcast(t, ir.VectorType(I32, n)), fill(n, 0x4B400000))
    low = b.ashr(whole, fill(n, 1))
    shift = fill(n, 23)  # shifts p's exponent: products of two factors could be re-associated
    first = b.bitcast(b.add(b.bitcast(p, low.type), b.shl(low, shift)), vector(n))
    rest = b.bitcast(b.shl(b.add(b.sub(whole, low), fill(n, 127)), shift), vector(n))
    value = b.fmul(first, rest)
    return b.select(b.fcmp_ordered("<", x, fill(n, -87.3)), fill(n, 0.0), value)


def exp2(b, x):
    """2ˣ within 2.1 ulp, for x < 128; 2^-126 for x < -126, NaN for NaN. 11 instructions."""
    n = x.type.count
    x = b.select(b.fcmp_ordered("<", x, fill(n, -126.0)), fill(n, -126.0), x)
    zero = fill(n, EXPONENT_ZERO)
    t = b.fadd(x, zero, flags=STRICT)
    p = _exp2_of_rest(b, b.fsub(x, b.fsub(t, zero, flags=STRICT), flags=STRICT))
    return b.fmul(p, _exponent(b, t))


def logistic_inverse(b, x):
    """1 + e⁻ˣ within 4 ulp for x ≥ −10, 21 at −88; +inf below −88.4, 1 above 17, NaN for NaN.

    12 instructions."""
    n = x.type.count
    x = b.select(b.fcmp_ordered("<", x, fill(n, -89.0)), fill(n, -89.0), x)
    x = b.select(b.fcmp_ordered(">", x, fill(n, 87.0)), fill(n, 87.0), x)
    zero, factor = fill(n, EXPONENT_ZERO), fill(n, -1.4426950408889634)
    t = fma(b, x, factor, zero)
    p = _exp2_of_rest(b, fma(b, x, factor, b.fsub(zero, t, flags=STRICT)))
    return fma(b, p, _exponent(b, t), fill(n, 1.0))


def _exp2_of_rest(b, r):
    """2ʳ, for |r| ≤ 1/2."""
    n = r.type.count
    p = fma(b, fill(n, 1.3264727e-3), r, fill(n, 9.6715128e-3))
    for c in (5.5507337e-2, 2.4022242e-1, 6.9314698e-1, 1.0):
        p = fma(b, p, r, fill(n, c))
    return p


def _exponent(b, t):
    """2^k from k + EXPONENT_ZERO."""
    n = t.type.count
    return b.bitcast(b.shl(b.bitcast(t, ir.VectorType(I32, n)), fill(n, 23)), vector(n))


def _exp_of_rest(b, x, k):
    """e^(x − k · ln 2), for |x − k · ln 2| ≤ ln 2 / 2."""
    n = x.type.count
    r = fma(b, k, fill(n, -0.693145751953125), x)
    r = fma(b, k, fill(n, -1.428606765330187e-06), r)
    p = fma(b, fill(n, 1.3930210e-3), r, fill(n, 8.3682816e-3))
    for c in (4.1665453e-2, 1.6666464e-1, 0.5, 1.0, 1.0):
        p = fma(b, p, r, fill(n, c))
    return p


def tanh(b, x):
    """tanh x within 3 ulp: 1 − 2/(e²ˣ + 1) for large |x|, an odd polynomial near 0."""
    n = x.type.count
    size = call(b, "fabs", x)
    far = b.fsub(fill(n, 1.0), b.fdiv(fill(n, 2.0), b.fadd(exp(b, b.fadd(size, size)), fill(n, 1.0))))
    s = b.fmul(x, x)
    p = fma(b, fill(n, -5.70498872745e-3), s, fill(n, 2.06390887954e-2))
    for c in (-5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = fma(b, p, s, fill(n, c))
    near = fma(b, b.fmul(p, s), size, size)
    value = b.select(b.fcmp_ordered("<", size, fill(n, 0.625)), near, far)
    return call(b, "copysign", value, x)


def tree(b, v, combine):
    """Reduction of all lanes to a scalar, pairwise in a fixed tree."""
    n = v.type.count
    while n > 1:
        n //= 2
        index = lambda start, n=n: ir.Constant(ir.VectorType(I32, n), list(range(start, start + n)))
        undefined = ir.Constant(v.type, ir.Undefined)
        v = combine(b, b.shuffle_vector(v, undefined, index(0)), b.shuffle_vector(v, undefined, index(n)))
    return b.extract_element(v, ir.Constant(I32, 0))


def trees(b, rows, combine):
    """`tree` of each of several vectors (a power of two), as the lanes of one vector."""
    n = rows[0].type.count
    while n > 1:
        n_packed = rows[0].type.count // n  # rows in a vector by now, n lanes each
        n //= 2
        paired = len(rows) > 1
        lanes = [2 * n * row + i for row in range(2 * n_packed if paired else n_packed) for i in range(n)]
        kind = ir.VectorType(I32, len(lanes))
        low, high = (ir.Constant(kind, [lane + add for lane in lanes]) for add in (0, n))
        pairs = list(zip(rows[::2], rows[1::2], strict=True)) if paired else [(r, r) for r in rows]
        rows = [combine(b, b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)) for x, y in pairs]
    return rows[0]


def maximum(b, x, y):
    """Maximum of each lane; the first where the second is NaN."""
    return b.select(b.fcmp_ordered(">", y, x), y, x)


def _emit_elements(b, pointers, count, scalars, formula, widths, nontemporal):
    stop = ir.Constant(I64, 0)
    for n in widths:
        start, stop = stop, b.and_(count, ir.Constant(I64, -n))
        entry, body, done = b.block, b.append_basic_block("elements"), b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", start, stop), body, done)
        b.position_at_end(body)
        i = b.phi(I64)
        i.add_incoming(start, entry)
        at = [b.inttoptr(b.add(p, b.shl(i, ir.Constant(I64, 2))), vector(n).as_pointer()) for p in pointers]
        values = []
        for p in at[:-1]:
            values.append(b.load(p))
            values[-1].align = 4
        stored = b.store(formula(b, values, [splat(b, s, n) for s in scalars]), at[-1])
        stored.align = 64 if nontemporal else 4
        if nontemporal:
            stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(I32, 1)]))
        next_i = b.add(i, ir.Constant(I64, n))
        i.add_incoming(next_i, b.block)
        b.cbranch(b.icmp_signed("<", next_i, stop), body, done)
        b.position_at_end(done)


def elementwise_rows(n_inputs, n_scalars, formula):
    """intrinsic f(a, begin, end): `elementwise` over rows begin…end, where the argument block `a` has
    the addresses of the inputs and of y, the length of a row, and the bits of the scalars."""

    @intrinsic
    def run(typingctx, a, begin, end):
        def codegen(ctx, b, sig, args):
            block, begin, end = args
            words = [b.load(b.gep(block, [ir.Constant(I64, i)])) for i in range(n_inputs + 2 + n_scalars)]
            n = words[n_inputs + 1]
            first = b.shl(b.mul(begin, n), ir.Constant(I64, 2))
            pointers = [b.add(word, first) for word in words[: n_inputs + 1]]
            scalars = [b.bitcast(b.trunc(word, I32), F32) for word in words[n_inputs + 2 :]]
            _emit_elements(b, pointers, b.mul(b.sub(end, begin), n), scalars, formula, (LANES, 1), False)
            return ctx.get_dummy_value()

        return types.void(types.CPointer(types.int64), types.int64, types.int64), codegen

    return run


def elementwise(n_inputs, n_scalars, formula, widths=(LANES, 1), *, nontemporal=False):
    """intrinsic f(inputs…, y, n, scalars…): y[i] = formula(b, [x[i] …], [scalar …]) for i < n.

    Addresses are int64, scalars f32; vectors have 16 lanes. y may be an input. `widths`: of
    vectors, powers of 2. `nontemporal`: y is 64-byte aligned and its stores bypass the caches."""

    # numba needs named parameters
    names = [f"x{i}" for i in range(n_inputs)] + ["y", "n"] + [f"s{i}" for i in range(n_scalars)]
    signature = types.void(*[types.int64] * (n_inputs + 2), *[types.float32] * n_scalars)

    def codegen(ctx, b, sig, args):
        pointers, count, scalars = args[: n_inputs + 1], args[n_inputs + 1], args[n_inputs + 2 :]
        _emit_elements(b, pointers, count, scalars, formula, widths, nontemporal)
        return ctx.get_dummy_value()

    scope = {"signature": signature, "codegen": codegen}
    exec(f"def run(typingctx, {', '.join(names)}): return signature, codegen", scope)
    return intrinsic(scope["run"])


copy_elements = elementwise(1, 0, lambda b, x, s: x[0])
# `builder.store_fence` has to follow
copy_nontemporal = elementwise(1, 0, lambda b, x, s: x[0], (LANES,), nontemporal=True)
add_elements = elementwise(2, 0, lambda b, x, s: b.fadd(x[0], x[1]))
scale_elements = elementwise(1, 1, lambda b, x, s: b.fmul(x[0], s[0]))
