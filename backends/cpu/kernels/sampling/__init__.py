"""The sampler chain on the CPU: candidates, samplers, log-probabilities."""
