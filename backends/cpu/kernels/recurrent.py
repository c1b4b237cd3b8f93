"""Recurrent layer kernels: causal convolution, linear attention (graph/ops/linear_attention.py).

`begin` (i32) is the state that row t starts from, −1 to continue from the row before. `end` is the
state to write it to (address 0: none). A state outside 0…N−1 is never written."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from logitless.backends.cpu.kernels.ir import builder as e
from logitless.backends.cpu.kernels.ir.registry import bits_f32, f32p, i32p, kernel

COLUMNS = 64  # of a unit of a convolution
WIDTH = 32  # elements of a head's values in a unit of linear attention
HALVES = range(WIDTH // 16)
UNROLL = 4  # rows of a state per loop iteration, each with sums of its own


@njit(forceinline=True)
def copy_rows(source, s_step, target, t_step, rows, n):
    """Copy rows of n elements, `step` elements apart."""
    for i in range(rows):
        x, y = f32p(source + i * s_step * 4), f32p(target + i * t_step * 4)
        for j in range(n):
            y[j] = x[j]


@njit(forceinline=True)
def input_row(x, states, state, first, t, columns, size, c0):
    """Address of input row t, at column c0, of the sequence that begins in row `first`."""
    if t >= first:
        return x + (t * columns + c0) * 4
    return states + ((state * (size - 1) + size - 1 + t - first) * columns + c0) * 4


@kernel("text_begins")
def text_begins(start_at, y_at, length, begin, end, scratch):
    """State of each row: 0 where a sample starts, −1 elsewhere. A unit is a row."""
    start, y = i32p(start_at), i32p(y_at)
    for t in range(begin, end):
        y[t] = 0 if start[t] == t % length else -1


@intrinsic
def _convolve(typingctx, x, x_step, taps, y, y_step, rows, size):
    """COLUMNS columns of y, row by row: the sum of `size` rows of x from its own on, times the
    taps.

    Steps are in bytes. A row has the same bits for any division of rows among calls."""
    parts = range(COLUMNS // 16)

    def codegen(ctx, b, sig, a):
        source, weights, out = (b.inttoptr(a[i], e.I8P) for i in (0, 2, 3))

        def row(t, _):
            own = e.at(b, source, b.mul(t, a[1]))

            def tap(j, sums):
                x_row, w = e.at(b, own, b.mul(j, a[1])), e.at(b, weights, b.mul(j, e.i64(4 * COLUMNS)))
                pairs = ([e.load(b, e.at(b, base, 64 * i), e.V16F, 4) for base in (w, x_row)] for i in parts)
                return [e.fma(b, u, v, total) for (u, v), total in zip(pairs, sums, strict=True)]

            sums = e.loop(b, e.i64(0), a[6], [e.constant(0.0)] * len(parts), tap)
            for i, total in zip(parts, sums, strict=True):
                e.store(b, total, e.at(b, e.at(b, out, b.mul(t, a[4])), 64 * i), 4)
            return []

        e.loop(b, e.i64(0), a[5], [], row)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@kernel("causal_conv")
def causal_conv(x, w_at, states, begins_at, ends_at, y_at, rows, columns, size, n_states, begin, end, scratch):
    """Causal convolution. A unit is 64 columns.

    Scratch: their weights, by tap; input rows that are not contiguous; a row of y."""
    begins, ends, taps = i32p(begins_at), i32p(ends_at), f32p(scratch)
    gathered = scratch + size * COLUMNS * 4
    y_row = gathered + size * COLUMNS * 4
    for i in range((2 * size + 1) * COLUMNS):  # columns beyond the last
        taps[i] = np.float32(0)
    for unit in range(begin, end):
        c0 = unit * COLUMNS
        n = min(COLUMNS, columns - c0)
        w = f32p(w_at + c0 * size * 4)
        for j in range(size):
            for c in range(n):
                taps[j * COLUMNS + c] = w[c * size + j]
        first, state, t = 0, 0, 0
        while t < rows:
            if begins[t] >= 0:
                first, state = t, np.int64(begins[t])
            y = y_at + (t * columns + c0) * 4
            # up to the sequence's end its rows are contiguous
            if n == COLUMNS and t - first >= size - 1:
                stop = t + 1
                while stop < rows and begins[stop] < 0:
                    stop += 1
                at = x + ((t - size + 1) * columns + c0) * 4
                _convolve(at, columns * 4, scratch, y, columns * 4, stop - t, size)
            else:
                stop = t + 1
                for j in range(size):
                    source = input_row(x, states, state, first, t - size + 1 + j, columns, size, c0)
                    copy_rows(source, 0, gathered + j * COLUMNS * 4, 0, 1, n)
                _convolve(gathered, COLUMNS * 4, scratch, y_row, 0, 1, size)
                copy_rows(y_row, 0, y, 0, 1, n)
            if ends_at != 0:
                for u in range(t, stop):
                    for j in range(size - 1 if 0 <= ends[u] < n_states else 0):
                        source = input_row(x, states, state, first, u - size + 2 + j, columns, size, c0)
                        target = states + ((np.int64(ends[u]) * (size - 1) + j) * columns + c0) * 4
                        copy_rows(source, 0, target, 0, 1, n)
            t = stop


def _sum_rows(b, count, n_sums, body):
    """Sum of body(i, n, sums) over all rows i of a state, with UNROLL separate sums (n)."""

    def unrolled(i, sums):
        totals = []
        for n in range(UNROLL):
            totals += body(b.add(i, e.i64(n)), sums[n * n_sums : (n + 1) * n_sums])
        return totals

    sums = e.loop(b, e.i64(0), count, [e.constant(0.0)] * UNROLL * n_sums, unrolled, UNROLL)
    parts = [[sums[n * n_sums + i] for n in range(UNROLL)] for i in range(n_sums)]
    return [b.fadd(b.fadd(p[0], p[1]), b.fadd(p[2], p[3])) for p in parts]


def _row(b, state, i):
    """Addresses of WIDTH columns of row i of a state."""
    return [e.at(b, state, b.add(b.mul(i, e.i64(4 * WIDTH)), e.i64(64 * h))) for h in HALVES]


def _number(b, base, i):
    return e.splat(b, e.load(b, e.at(b, base, b.mul(i, e.i64(4))), e.F32, 4))


@intrinsic
def _read_state(typingctx, s, k, recalled, size):
    """out = k · state: the recalled value of a key, (WIDTH,), from a state s (D, WIDTH)."""

    def codegen(ctx, b, sig, a):
        state, key, out = (b.inttoptr(x, e.I8P) for x in a[:3])

        def body(i, sums):
            k_i = _number(b, key, i)
            return [e.fma(b, e.load(b, p, e.V16F, 4), k_i, x) for p, x in zip(_row(b, state, i), sums, strict=True)]

        for h, x in zip(HALVES, _sum_rows(b, a[3], len(HALVES), body), strict=True):
            e.store(b, x, e.at(b, out, 64 * h), 4)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _step_function(rule, axes):
    """intrinsic of one token on WIDTH columns of a head: updates the state s (D, WIDTH), y = q · s.

    `recalled` holds key · s on entry and k_next · s on return, for the key that the rule reads; k and k_next of
    the delta rule are times the decays of rows. `decays` is the address of one number (2 `axes`), of one a row (3)
    or of one an element (4), `beta` that of the rate; of the bonus's sum; of the key that is written.
    """
    reads = rule != "sum"

    def step(typingctx, s, k, q, v, y, recalled, k_next, size, decays, beta, scale):
        def codegen(ctx, b, sig, a):
            state, key, query, value, out, recall, next_k = (b.inttoptr(x, e.I8P) for x in a[:7])
            factors, betas = (b.inttoptr(x, e.I8P) for x in a[8:10])
            scaled = e.splat(b, a[10])
            decay = _number(b, factors, e.i64(0)) if axes == 2 else None

            def decay_row(i, p):
                """Each half of row i of the state, at p, times its decay."""
                rows = [e.load(b, part, e.V16F, 4) for part in p]
                if axes == 2:
                    return [b.fmul(decay, row) for row in rows]
                own = [_number(b, factors, i)] * len(rows) if axes == 3 else None
                own = own or [e.load(b, part, e.V16F, 4) for part in _row(b, factors, i)]
                return [b.fmul(factor, row) for factor, row in zip(own, rows, strict=True)]

            def half(base, h):
                return e.load(b, e.at(b, base, 64 * h), e.V16F, 4)

            residual = [half(value, h) for h in HALVES]
            memory = [half(recall, h) for h in HALVES] if reads else []
            if rule == "delta":
                known = memory if axes > 2 else [b.fmul(decay, x) for x in memory]
                residual = [b.fsub(x, y) for x, y in zip(residual, known, strict=True)]
            if rule == "bonus":
                own = _number(b, betas, e.i64(0))
                for h, x, y in zip(HALVES, residual, memory, strict=True):
                    e.store(b, b.fmul(scaled, e.fma(b, own, x, y)), e.at(b, out, 64 * h), 4)
            elif rule != "keys":
                rate = _number(b, betas, e.i64(0))
                residual = [b.fmul(rate, x) for x in residual]
            queries = ([] if rule == "bonus" else [query]) + ([next_k] if reads else [])

            def body(i, sums):
                numbers = [_number(b, base, i) for base in (key, *queries)]
                totals, places = [[] for _ in queries], _row(b, state, i)
                written = _number(b, betas, i) if rule == "keys" else None
                for h, p, old in zip(HALVES, places, decay_row(i, places), strict=True):
                    new = e.fma(b, numbers[0], residual[h], old)
                    new = new if written is None else e.fma(b, written, memory[h], new)
                    e.store(b, new, p, 4)
                    for q, column_sums in enumerate(totals):
                        column_sums.append(e.fma(b, new, numbers[1 + q], sums[q * len(HALVES) + h]))
                return [total for column_sums in totals for total in column_sums]

            sums = _sum_rows(b, a[7], len(queries) * len(HALVES), body)
            for h in HALVES:
                if rule != "bonus":
                    e.store(b, b.fmul(scaled, sums[h]), e.at(b, out, 64 * h), 4)
                if reads:
                    e.store(b, sums[len(sums) - len(HALVES) + h], e.at(b, recall, 64 * h), 4)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 10, types.float32), codegen

    return intrinsic(step)


@njit(forceinline=True)
def _scaled_key(k, decays, out, size):
    """A key times the decays of the rows of the state."""
    x, f, y = f32p(k), f32p(decays), f32p(out)
    for i in range(size):
        y[i] = x[i] * f[i]


@njit(forceinline=True)
def key_head(h, heads, k_heads, grouped):
    """KV head of head h."""
    return h // (heads // k_heads) if grouped else h % k_heads


@njit(forceinline=True)
def _bonus(q, k, beta, out, size):
    """Σ q · beta · k, in UNROLL sums."""
    x, y, z, total = f32p(q), f32p(k), f32p(beta), f32p(out)
    for j in range(UNROLL):
        total[j] = np.float32(0)
    for i in range(0, size, UNROLL):
        for j in range(UNROLL):
            total[j] += x[i + j] * z[i + j] * y[i + j]
    total[0] = (total[0] + total[1]) + (total[2] + total[3])


@kernel("linear_attention")
def linear_attention(rule, n_axes):
    """Linear attention by a rule: sum, delta, bonus, keys (the op's betas). A unit is WIDTH columns of a head.

    Scratch: the state, a row each of v, y and the recalled value, a key or a bonus, decays of elements."""
    axes = int(n_axes)
    step, reads, scaled = _step_function(rule, axes), rule != "sum", rule == "delta" and axes == 3
    bonus, two_keys = rule == "bonus", rule == "keys"

    @njit(forceinline=True)
    def key_read(q_at, k_at, decay_at, beta_at, row, key, size, out):
        """Address of the key that head `row` of a token reads, of D numbers; `key`: its q and k."""
        if two_keys:
            return beta_at + row * 2 * size * 4
        if scaled:
            _scaled_key(k_at + key, decay_at + row * size * 4, out, size)
            return out
        return q_at + key if bonus else k_at + key

    def run(
        q_at, k_at, v_at, decay_at, beta_at, states_at, begins_at, ends_at, y_at, rows, heads, k_heads, size, width,
        scale_bits, grouped, n_states, begin, end, scratch,
    ):  # fmt: skip
        scale = bits_f32(scale_bits)
        begins, ends = i32p(begins_at), i32p(ends_at)
        parts = (width + WIDTH - 1) // WIDTH
        v_row = scratch + size * WIDTH * 4
        y_row = v_row + WIDTH * 4
        recalled = y_row + WIDTH * 4
        other = recalled + WIDTH * 4
        element_decays = other + size * 4
        for i in range(size * WIDTH if axes == 4 else 0):
            f32p(element_decays)[i] = np.float32(0)
        for i in range((size + 1) * WIDTH):  # columns beyond the last stay zero
            f32p(scratch)[i] = np.float32(0)
        for unit in range(begin, end):
            h, c0 = unit // parts, unit % parts * WIDTH
            n, k_head = min(WIDTH, width - c0), key_head(h, heads, k_heads, grouped)
            place = states_at + (h * size * width + c0) * 4  # this unit's part of the first state
            for t in range(rows):
                i, key = t * heads + h, (t * k_heads + k_head) * size * 4
                if begins[t] >= 0:
                    copy_rows(place + np.int64(begins[t]) * heads * size * width * 4, width, scratch, WIDTH, size, n)
                    if reads:
                        first = key_read(q_at, k_at, decay_at, beta_at, i, key, size, other)
                        _read_state(scratch, first, recalled, size)
                copy_rows(v_at + (i * width + c0) * 4, 0, v_row, 0, 1, n)
                next_key, decays, beta = k_at, decay_at + i * 4, beta_at + i * 4
                if reads:
                    ahead = 1 if t + 1 < rows else 0
                    next_row, next_place = i + ahead * heads, key + ahead * k_heads * size * 4
                    next_key = key_read(q_at, k_at, decay_at, beta_at, next_row, next_place, size, other)
                if bonus:
                    beta = other
                    _bonus(q_at + key, k_at + key, beta_at + i * size * 4, other, size)
                if two_keys:
                    beta = beta_at + (2 * i + 1) * size * 4
                if axes == 3:
                    decays = decay_at + i * size * 4
                if axes == 4:
                    decays = element_decays
                    copy_rows(decay_at + (i * size * width + c0) * 4, width, element_decays, WIDTH, size, n)
                step(scratch, k_at + key, q_at + key, v_row, y_row, recalled, next_key, size, decays, beta, scale)
                copy_rows(y_row, 0, y_at + (i * width + c0) * 4, 0, 1, n)
                if ends_at != 0 and 0 <= ends[t] < n_states:
                    copy_rows(scratch, WIDTH, place + np.int64(ends[t]) * heads * size * width * 4, width, size, n)

    return run
