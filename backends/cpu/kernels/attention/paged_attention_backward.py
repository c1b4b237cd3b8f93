"""Gradient of paged attention. A unit is a KV head, whose cells no other unit writes."""

from __future__ import annotations

import math

import numpy as np

from logitless.backends.cpu.kernels.ir.registry import bits_f32, f16_to_f32, f32p, i32p, kernel, u16p


@kernel("attention_back")
def attention_back(dtype):
    """Gradient of paged attention, token by token.

    Scratch: weights, their gradients and the slopes of the scores, one number per position each.
    """
    half = dtype == "f16"

    def run(
        g_at, q_at, keys, values, tables, slot, pos, y_at, tokens, heads, kv_heads, size, pages, table_pages, window,
        scale_bits, cap_bits, begin, end, scratch,
    ):  # fmt: skip
        scale, cap = bits_f32(scale_bits), bits_f32(cap_bits)
        group, page_size = heads // kv_heads, size * 16
        dk_all = y_at + tokens * heads * size * 4
        dv_all = dk_all + pages * kv_heads * page_size * 4
        longest = table_pages * 16
        p, dp, slope = f32p(scratch), f32p(scratch + longest * 4), f32p(scratch + longest * 8)
        for h in range(begin, end):
            for page in range(pages):
                at = (page * kv_heads + h) * page_size * 4
                x, z = f32p(dk_all + at), f32p(dv_all + at)
                for i in range(page_size):
                    x[i] = np.float32(0)
                    z[i] = np.float32(0)
            for unit in range(tokens * group):
                t, head = unit // group, h * group + unit % group
                last = np.int64(i32p(pos)[t])
                first = max(0, last - window + 1) if window > 0 else 0
                table = i32p(tables + np.int64(i32p(slot)[t]) * table_pages * 4)
                at = (t * heads + head) * size * 4
                g, q, dq = f32p(g_at + at), f32p(q_at + at), f32p(y_at + at)
                top = np.float32(-np.inf)
                for i in range(first, last + 1):
                    begins = (np.int64(table[i // 16]) * kv_heads + h) * page_size
                    key, value = begins + i % 16, begins + i % 16 * size
                    s, d = np.float32(0), np.float32(0)
                    for j in range(size):
                        if half:
                            s += q[j] * f16_to_f32(u16p(keys)[key + j * 16])
                            d += g[j] * f16_to_f32(u16p(values)[value + j])
                        else:
                            s += q[j] * f32p(keys)[key + j * 16]
                            d += g[j] * f32p(values)[value + j]
                    s *= scale
                    slope[i] = scale
                    if cap > np.float32(0):
                        bounded = np.float32(math.tanh(np.float64(s / cap)))
                        s = cap * bounded
                        slope[i] = scale * (np.float32(1) - bounded * bounded)
                    p[i], dp[i] = s, d
                    top = max(top, s)
                total = np.float32(0)
                for i in range(first, last + 1):
                    p[i] = np.float32(math.exp(np.float64(p[i] - top)))
                    total += p[i]
                mean = np.float32(0)
                for i in range(first, last + 1):
                    p[i] /= total
                    mean += p[i] * dp[i]
                for j in range(size):
                    dq[j] = np.float32(0)
                for i in range(first, last + 1):
                    ds = p[i] * (dp[i] - mean) * slope[i]
                    begins = (np.int64(table[i // 16]) * kv_heads + h) * page_size
                    key, value = begins + i % 16, begins + i % 16 * size
                    dk, dv = f32p(dk_all), f32p(dv_all)
                    for j in range(size):
                        dq[j] += ds * (f16_to_f32(u16p(keys)[key + j * 16]) if half else f32p(keys)[key + j * 16])
                        dk[key + j * 16] += ds * q[j]
                        dv[value + j] += p[i] * g[j]

    return run


@kernel("clear_cells")
def clear_cells(layout):
    """Clear cells of an f32 cache. A unit is a cell."""
    keys = layout == "keys"

    def run(cells, cache, kv_heads, size, begin, end, scratch):
        for t in range(begin, end):
            cell = np.int64(i32p(cells)[t])
            for h in range(kv_heads):
                start = (cell // 16 * kv_heads + h) * size * 16
                at = start + cell % 16 if keys else start + cell % 16 * size
                step = 16 if keys else 1
                for j in range(size):
                    f32p(cache)[at + j * step] = np.float32(0)

    return run
