"""Skinny GEMM: f32 operands read in place, because packing would cost more than the product.

`skinny_gemm:n`, `skinny_gemm:k`: A (M, K) times B (N, K) or (K, N), with few columns or a short K.
`skinny_split_k`: A (K, M) transposed times B (K, N), with few rows or columns and a long K that is
split into parts with a result each. Every result is one chain of fused multiply-adds over (its part
of) k, as in gemm.py.
"""

from __future__ import annotations

from logitless.backends.cpu.kernels.ir.registry import kernel
from logitless.backends.cpu.kernels.matmul.gemm import pack_b
from logitless.backends.cpu.kernels.matmul.gemm_tile import KC, MT, NR, compute_strided_tile

ROWS, COLUMNS = 4 * MT, NR  # of a block of `skinny_split_k`


@kernel("skinny_gemm")
def skinny_gemm(b_layout):
    """GEMM with few columns or a short K: A (M, K) to C (M, N), `block` rows a unit.

    Scratch: a strip of B, NR·KC floats.
    """

    def of_n(a_at, b_at, c_at, m, n, k, block, begin, end, scratch):
        for k0 in range(0, k, KC):
            steps = min(KC, k - k0)
            fresh = 1 if k0 == 0 else 0
            for c in range(0, n, NR):
                columns = min(NR, n - c)
                pack_b(b_at + (c * k + k0) * 4, k * 4, columns, steps, scratch)
                for r in range(begin * block, min(m, end * block), MT):
                    x, y, rows = a_at + (r * k + k0) * 4, c_at + (r * n + c) * 4, min(MT, m - r)
                    compute_strided_tile(x, k * 4, 4, scratch, NR * 4, y, n * 4, steps, fresh, rows, columns)

    def of_k(a_at, b_at, c_at, m, n, k, block, begin, end, scratch):
        for k0 in range(0, k, KC):
            steps = min(KC, k - k0)
            fresh = 1 if k0 == 0 else 0
            for r in range(begin * block, min(m, end * block), MT):
                for c in range(0, n, NR):  # rows of C are written in order: they may be new pages
                    x, y, rows = a_at + (r * k + k0) * 4, c_at + (r * n + c) * 4, min(MT, m - r)
                    z, columns = b_at + (k0 * n + c) * 4, min(NR, n - c)
                    compute_strided_tile(x, k * 4, 4, z, n * 4, y, n * 4, steps, fresh, rows, columns)

    return of_n if b_layout == "n" else of_k


@kernel("skinny_split_k")
def skinny_split_k(a_at, b_at, c_at, k, m, n, part_steps, begin, end, scratch):
    """Transposed GEMM with split K: A (K, M), B (K, N), C (parts, M, N), part_steps of K a part.

    A unit is a block of C.
    """
    across, down = (n + COLUMNS - 1) // COLUMNS, (m + ROWS - 1) // ROWS
    for unit in range(begin, end):
        part, r0, c0 = unit // (across * down), unit // across % down * ROWS, unit % across * COLUMNS
        k0 = part * part_steps
        steps = min(part_steps, k - k0)
        for c in range(c0, min(n, c0 + COLUMNS), NR):
            columns = min(NR, n - c)
            for r in range(r0, min(m, r0 + ROWS), MT):
                x, z = a_at + (k0 * m + r) * 4, b_at + (k0 * n + c) * 4
                y, rows = c_at + ((part * m + r) * n + c) * 4, min(MT, m - r)
                compute_strided_tile(x, 4, m * 4, z, n * 4, y, n * 4, steps, 1, rows, columns)
