"""Synthetic models with random weights, for benchmarks and tests."""
