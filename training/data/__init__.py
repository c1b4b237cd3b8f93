"""Training data: rows, tokens, packed windows, sampler."""
