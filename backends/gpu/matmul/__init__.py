"""GPU matmul: packed weights, integer dot products, cooperative matrices, split-K, experts."""
