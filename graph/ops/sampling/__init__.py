"""Sampler chain as ops: llama.cpp's samplers, sampled token ids, log-probabilities."""
