"""Row reductions as vector IR: sums and maxima of a formula over a row, in a fixed order."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir import math as m

WIDTHS = (64, 16, 8, 1)  # lanes of the main loop and of the remainders


def reduced(n_inputs, n_scalars, formula, combine, start):
    """intrinsic f(inputs…, n, scalars…) → f32: reduction over i < n of formula(b, [x[i] …], [s …]).

    Addresses are int64, scalars f32. `combine(b, u, v)` of two vectors; `start` is its neutral
    element."""

    def emit(b, args):
        pointers, count, scalars = args[:n_inputs], args[n_inputs], args[n_inputs + 1 :]
        total = ir.Constant(e.F32, start)
        done = ir.Constant(e.I64, 0)
        for n in WIDTHS:
            stop = b.and_(count, ir.Constant(e.I64, -n))
            entry, body, after = b.block, b.append_basic_block("reduce"), b.append_basic_block("reduced")
            b.cbranch(b.icmp_signed("<", done, stop), body, after)
            b.position_at_end(body)
            i, acc = b.phi(e.I64), b.phi(m.vector(n))
            i.add_incoming(done, entry)
            acc.add_incoming(m.fill(n, start), entry)
            values = []
            for p in pointers:
                at = b.inttoptr(b.add(p, b.shl(i, ir.Constant(e.I64, 2))), m.vector(n).as_pointer())
                values.append(b.load(at))
                values[-1].align = 4
            new = combine(b, acc, formula(b, values, [e.splat(b, s, n) for s in scalars]))
            next_i = b.add(i, ir.Constant(e.I64, n))
            i.add_incoming(next_i, b.block)
            acc.add_incoming(new, b.block)
            body_end = b.block
            b.cbranch(b.icmp_signed("<", next_i, stop), body, after)
            b.position_at_end(after)
            partial = b.phi(m.vector(n))
            partial.add_incoming(m.fill(n, start), entry)
            partial.add_incoming(new, body_end)
            one = ir.VectorType(e.F32, 1)
            pair = [
                b.insert_element(ir.Constant(one, ir.Undefined), x, ir.Constant(e.I32, 0))
                for x in (total, m.tree(b, partial, combine))
            ]
            total = b.extract_element(combine(b, *pair), ir.Constant(e.I32, 0))
            done = stop
        return total

    # numba needs named parameters
    names = [f"x{i}" for i in range(n_inputs)] + ["n"] + [f"s{i}" for i in range(n_scalars)]
    signature = types.float32(*[types.int64] * (n_inputs + 1), *[types.float32] * n_scalars)

    def codegen(ctx, b, sig, args):
        return emit(b, args)

    scope = {"signature": signature, "codegen": codegen}
    exec(f"def run(typingctx, {', '.join(names)}): return signature, codegen", scope)
    return intrinsic(scope["run"])


def plus(b, u, v):
    return b.fadd(u, v)


row_sum = reduced(1, 0, lambda b, x, s: x[0], plus, 0.0)
row_dot = reduced(2, 0, lambda b, x, s: b.fmul(x[0], x[1]), plus, 0.0)
row_max = reduced(1, 0, lambda b, x, s: x[0], m.maximum, float("-inf"))
row_exp_sum = reduced(1, 1, lambda b, x, s: m.exp(b, b.fsub(x[0], s[0])), plus, 0.0)
