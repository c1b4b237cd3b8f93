"""Sampler chain on GPUs: one work group a row, radix selection instead of sorting."""
