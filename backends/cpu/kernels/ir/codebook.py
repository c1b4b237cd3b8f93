"""Tables of 16 bytes, looked up by every byte of a vector: what quants that are places in a table stand for."""

from __future__ import annotations

from llvmlite import ir

from logitless.backends.cpu.kernels.ir.builder import I8, I32, call, each, joined, part
from logitless.backends.host import isa


def coded(b, places, codes):
    """16 i32 of four places each, 0 to 15 → their codes, bytes as they are."""
    if isa() == "plain":
        return _chosen(b, places, codes)
    name, n = {
        "avx512_vnni": ("llvm.x86.avx512.pshuf.b.512", 64),
        "avx_vnni": ("llvm.x86.avx2.pshuf.b", 32),
        "avx2": ("llvm.x86.avx2.pshuf.b", 32),
        "neon_dot": ("llvm.aarch64.neon.tbl1.v16i8", 16),
    }[isa()]
    t = ir.VectorType(I8, n)
    table, words = ir.Constant(t, [*codes] * (n // 16)), ir.VectorType(I32, n // 4)
    parts = [b.bitcast(part(b, places, i, n // 4), t) for i in range(64 // n)]
    return joined(b, [b.bitcast(call(b, name, t, [table, p]), words) for p in parts])


def _chosen(b, places, codes):
    """Without such an instruction: of each two codes that differ in a bit of their place that of the bit."""
    values = [each(_word(code)) for code in codes]
    for bit in range(4):
        ones = b.and_(b.lshr(places, each(bit)), each(0x01010101))
        mask = b.mul(ones, each(255))
        values = [b.xor(no, b.and_(mask, b.xor(no, yes))) for no, yes in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _word(byte):
    """A byte four times, as an i32."""
    word = byte * 0x01010101
    return word - (1 << 32) if word >> 31 else word
