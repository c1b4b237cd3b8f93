"""Hyper-parameters of a model, read and checked from GGUF metadata."""
