"""CPU backend: lowers graph nodes to native kernels and runs them on a pool of worker threads."""
