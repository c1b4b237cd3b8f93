"""Weights: expected tensors, loading, placement on devices, fingerprint."""
