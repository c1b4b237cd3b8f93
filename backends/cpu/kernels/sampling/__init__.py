"""Sampler chain on the CPU: candidates, samplers, log-probabilities."""
