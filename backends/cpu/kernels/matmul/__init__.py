"""CPU matmul: packed quantized weights, GEMM and GEMV tiles, fused GLU, mixture of experts."""
