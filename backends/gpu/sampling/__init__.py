"""The sampler chain on GPUs: one work group a row, radix selection instead of sorting."""
