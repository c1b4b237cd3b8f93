"""Lowering on the CPU: graph nodes become tasks of the worker threads."""
