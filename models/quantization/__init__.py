"""Quantize, dequantize, and requantize types without kernels."""
