"""Kernel compiler: numba's front end, LLVM, linked code that is cached per processor."""
