"""CPU kernels: serial functions over independent units, in numba's Python or LLVM IR."""
