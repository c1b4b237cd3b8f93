"""Observability: request ids, access lines, prompt files, start block, metrics."""
