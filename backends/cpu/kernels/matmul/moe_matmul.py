"""Mixture-of-experts kernels (graph/ops/moe.py defines `order`).

The rows of an expert are contiguous, a panel of activations (layout.py) of their own. They meet the
expert's weights, whole groups of one packed matrix of all experts, in the tiles of
packed_matmul.py. The number of an expert's rows is known only at run time, so the kernel of each
tile takes the experts whose number of rows suits it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from logitless.backends.cpu.kernels.gather import block_decoder, float_reader
from logitless.backends.cpu.kernels.ir.registry import f32p, i32p, kernel
from logitless.backends.cpu.kernels.ir.scalar_math import exp_exact
from logitless.backends.cpu.kernels.matmul.layout import ACT_BLOCK, LAYOUTS
from logitless.backends.cpu.kernels.matmul.packed_matmul import packed_strips
from logitless.backends.cpu.kernels.matmul.quantize_activations import row_quantizer

INFINITY = np.float32(np.inf)


@kernel("top_experts")
def top_experts(logits_at, ids_at, size, n, begin, end, scratch):
    """Top-k experts. A unit is a row. NaN counts as −inf."""
    for t in range(begin, end):
        logits, ids = f32p(logits_at + t * size * 4), i32p(ids_at + t * n * 4)
        # the previous choice: the next is below it, or equal and behind it
        previous, previous_id = INFINITY, np.int64(-1)
        for j in range(n):
            best, best_id = -INFINITY, np.int64(-1)
            for i in range(size):
                value = logits[i]
                value = value if value == value else -INFINITY
                eligible = value < previous or (value == previous and i > previous_id)
                if eligible and (best_id < 0 or value > best):
                    best, best_id = value, i
            ids[j] = best_id
            previous, previous_id = best, best_id


@kernel("expert_weights")
def expert_weights(logits_at, ids_at, y_at, size, n, begin, end, scratch):
    """Router softmax over the chosen. A unit is a row."""
    for t in range(begin, end):
        logits, ids, y = f32p(logits_at + t * size * 4), i32p(ids_at + t * n * 4), f32p(y_at + t * n * 4)
        top, total = logits[ids[0]], np.float32(0)
        for j in range(1, n):
            top = max(top, logits[ids[j]])
        for j in range(n):
            y[j] = exp_exact(logits[ids[j]] - top)
            total += y[j]
        for j in range(n):
            y[j] /= total


@kernel("expert_gather")
def expert_gather(x_at, ids_at, y_at, size, n, begin, end, scratch):
    """Values at the chosen experts. A unit is a row."""
    for t in range(begin, end):
        x, ids, y = f32p(x_at + t * size * 4), i32p(ids_at + t * n * 4), f32p(y_at + t * n * 4)
        for j in range(n):
            y[j] = x[ids[j]]


@kernel("expert_scatter")
def expert_scatter(x_at, ids_at, y_at, n, size, begin, end, scratch):
    """Inverse of `expert_gather`. A unit is a row."""
    for t in range(begin, end):
        x, ids, y = f32p(x_at + t * n * 4), i32p(ids_at + t * n * 4), f32p(y_at + t * size * 4)
        for i in range(size):
            y[i] = np.float32(0)
        for j in range(n):
            y[ids[j]] = x[j]


@kernel("expert_order")
def expert_order(ids_at, order_at, rows, n, begin, end, scratch):
    """Counting sort of rows by expert. One unit.

    Scratch: a number per expert, and one more.
    """
    ids, starts = i32p(ids_at), i32p(scratch)
    places, place_of, experts = i32p(order_at), i32p(order_at + rows * 4), i32p(order_at + 2 * rows * 4)
    for i in range(n + 1):
        starts[i] = 0
    for r in range(rows):
        starts[ids[r] + 1] += 1
    for i in range(n):
        starts[i + 1] += starts[i]
    for r in range(rows):
        expert = ids[r]
        at = starts[expert]
        starts[expert] = at + 1
        places[at], place_of[r], experts[at] = r, at, expert


@njit(forceinline=True)
def expert_end(experts, place, rows):
    """End of the rows of the expert at this position."""
    end = place + 1
    while end < rows and experts[end] == experts[place]:
        end += 1
    return end


@njit(forceinline=True)
def panel_at(order, place, rows, per_row):
    """Begin and number of the rows of the expert at this position, and the position's row in x.

    R over x's rows is `per_row`, or 0 where x is sorted already.
    """
    experts, begin = i32p(order + 2 * rows * 4), place
    while begin > 0 and experts[begin - 1] == experts[place]:
        begin -= 1
    row = i32p(order)[place] // per_row if per_row > 0 else place
    return begin, expert_end(experts, place, rows) - begin, row


@kernel("expert_rows")
def expert_rows(x_at, order_at, y_at, k, per_row, begin, end, scratch):
    """Gather rows by expert. A unit is a position."""
    for place in range(begin, end):
        x, y = f32p(x_at + i32p(order_at)[place] // per_row * k * 4), f32p(y_at + place * k * 4)
        for i in range(k):
            y[i] = x[i]


@kernel("expert_sum")
def expert_sum(y_at, weights_at, order_at, out_at, rows, per_row, n, begin, end, scratch):
    """Weighted sum of the experts' results y (R, N): out (T, N).

    A unit is a row of out.
    """
    places, weights = i32p(order_at + rows * 4), f32p(weights_at)
    for t in range(begin, end):
        out = f32p(out_at + t * n * 4)
        for j in range(per_row):
            weight, y = weights[t * per_row + j], f32p(y_at + places[t * per_row + j] * n * 4)
            if j == 0:
                for i in range(n):
                    out[i] = weight * y[i]
            else:
                for i in range(n):
                    out[i] += weight * y[i]


def panel_packer(pack_row, x_nbytes, y_nbytes):
    """Kernel that packs rows into the panels of their experts with `pack_row(x, y, stride, count)`.

    per_row: R over x's rows (0: x is sorted already). A row has `count` blocks, of `x_nbytes` in x
    and `y_nbytes` in y. A unit is a position.
    """

    def run(x_at, order_at, y_at, rows, count, per_row, begin, end, scratch):
        for place in range(begin, end):
            first, panel, row = panel_at(order_at, place, rows, per_row)
            y = y_at + (first * count + place - first) * y_nbytes
            pack_row(x_at + row * count * x_nbytes, y, panel * y_nbytes, count)

    return run


@kernel("quantize_experts")
def quantize_experts(group):
    """Quantised activations by expert (`panel_packer`), in blocks of 32."""
    return panel_packer(row_quantizer(int(group)), 128, ACT_BLOCK)


@njit(forceinline=True)
def scatter_k(x, y, stride, count):
    """Copy `count` elements to places `stride` bytes apart."""
    numbers, out = f32p(x), f32p(y)
    for i in range(count):
        out[i * (stride // 4)] = numbers[i]


@kernel("pack_experts")
def pack_experts():
    """f32 activations by expert (`panel_packer`), element by element."""
    return panel_packer(scatter_k, 4, 4)


@kernel("expert_linear")
def expert_linear(dtype, shape, variant=""):
    """GEMM of each expert's rows. Scratch: as for `linear` with few rows.

    It takes experts of min_rows to max_rows rows; `count`: blocks or k. A unit is one of `units`
    equal parts of the strips of all these experts, in order. `variant` "bf16": activations are bf16
    like the weights, and a k is a pair.
    """
    mt, nt = (int(s) for s in shape.split("x"))
    run_strips = packed_strips(dtype, mt, nt, variant)
    x_nbytes = ACT_BLOCK if LAYOUTS[dtype].block > 1 else 4

    def run(
        w_at, x_at, y_at, order_at, rows, n, count, k_block, group_nbytes, units, min_rows, max_rows,
        begin, end, scratch,
    ):  # fmt: skip
        experts = i32p(order_at + 2 * rows * 4)
        strips, expert_nbytes = (n // 16 + nt - 1) // nt, n // 16 * group_nbytes
        work, place = np.int64(0), np.int64(0)
        while place < rows:
            after = expert_end(experts, place, rows)
            work += strips if min_rows <= after - place <= max_rows else 0
            place = after
        first, last = work * begin // units, work * end // units
        at, place = np.int64(0), np.int64(0)  # strips and rows before this expert's
        while place < rows and at < last:
            after = expert_end(experts, place, rows)
            if min_rows <= after - place <= max_rows:
                s0, s1 = max(first - at, 0), min(last - at, strips)
                if s0 < s1:
                    w, x = w_at + experts[place] * expert_nbytes, x_at + place * count * x_nbytes
                    y = y_at + place * n * 4
                    run_strips(w, x, y, after - place, n, count, k_block, group_nbytes, 0, s0, s1, scratch, 0)
                at += strips
            place = after

    return run


@kernel("expert_matmul")
def expert_matmul(dtype):
    """Gradient of the experts' input: x (R, N) to y (R, K).

    A unit is 32 columns of y. Scratch: 32 floats.
    """
    layout = LAYOUTS[dtype]
    quantised = layout.block > 1
    decode = block_decoder(layout) if quantised else None
    get = None if quantised else float_reader(dtype)

    def run(x_at, w_at, y_at, order_at, rows, n, k, group_nbytes, begin, end, scratch):
        experts, part = i32p(order_at + 2 * rows * 4), f32p(scratch)
        for block in range(begin, end):
            columns = min(32, k - 32 * block)
            place = np.int64(0)
            while place < rows:
                after = expert_end(experts, place, rows)
                for i in range(n):
                    row = experts[place] * n + i
                    if quantised:
                        decode(w_at + row // 16 * group_nbytes, row % 16, block, 0, 8, scratch)
                    else:
                        for c in range(columns):
                            part[c] = get(w_at + row // 16 * group_nbytes, block * 32 + c, row % 16)
                    for r in range(place, after):
                        x, y = f32p(x_at)[r * n + i], f32p(y_at + (r * k + block * 32) * 4)
                        for c in range(columns):
                            y[c] = x * part[c] + (y[c] if i > 0 else np.float32(0))
                place = after

    return run


# -- weights that training changes: f32, as in the graph


@kernel("plain_expert_linear")
def plain_expert_linear(x_at, w_at, y_at, order_at, rows, n, k, begin, end, scratch):
    """Rows times their experts' weights: x (R, K), w (n · N, K), y (R, N). A unit is a position."""
    experts = i32p(order_at + 2 * rows * 4)
    for place in range(begin, end):
        x, y = f32p(x_at + place * k * 4), f32p(y_at + place * n * 4)
        for i in range(n):
            w, total = f32p(w_at + (experts[place] * n + i) * k * 4), np.float32(0)
            for j in range(k):
                total += x[j] * w[j]
            y[i] = total


@kernel("plain_expert_matmul")
def plain_expert_matmul():
    """Gradient of the rows: x (R, N), w (n · N, K), y (R, K). A unit is a position; its products are
    summed in order, so that zeros among x change no bit.
    """

    def run(x_at, w_at, y_at, order_at, rows, n, k, begin, end, scratch):
        experts = i32p(order_at + 2 * rows * 4)
        for place in range(begin, end):
            x, y = f32p(x_at + place * n * 4), f32p(y_at + place * k * 4)
            for j in range(k):
                y[j] = np.float32(0)
            for i in range(n):
                w, factor = f32p(w_at + (experts[place] * n + i) * k * 4), x[i]
                for j in range(k):
                    y[j] += factor * w[j]

    run.fastmath = False
    return run


@kernel("expert_products")
def expert_products(a_at, b_at, order_at, out_at, rows, m, k, blocks, begin, end, scratch):
    """Gradient of the experts' weights: a (R, M), b (R, K), out (n · M, K).

    A unit is 16 rows of an expert's part of out, of `blocks`; zero where no row has chosen it.
    """
    experts = i32p(order_at + 2 * rows * 4)
    for unit in range(begin, end):
        expert, column = unit // blocks, unit % blocks * 16
        width = min(16, m - column)
        out = out_at + (expert * m + column) * k * 4
        first, last = np.int64(0), rows  # the expert's first position lies between
        while first < last:
            middle = (first + last) // 2
            if experts[middle] < expert:
                first = middle + 1
            else:
                last = middle
        for j in range(width * k):
            f32p(out)[j] = np.float32(0)
        while first < rows and experts[first] == expert:
            b, factors = f32p(b_at + first * k * 4), f32p(a_at + (first * m + column) * 4)
            for c in range(width):
                factor, y = factors[c], f32p(out + c * k * 4)
                for j in range(k):
                    y[j] += factor * b[j]
            first += 1
