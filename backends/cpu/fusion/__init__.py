"""Fusion on the CPU: matmuls of the same activations, quantization of activations, packed weights."""
