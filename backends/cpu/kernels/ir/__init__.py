"""LLVM IR helpers for kernels: vector math, integer dot products, bf16, the kernel registry."""
