"""Lowering on the CPU: graph nodes become tasks of the worker threads."""

from logitless.backends.cpu.lowering import (  # noqa: F401  (each registers the rules of its ops)
    attention,
    elementwise,
    experts,
    linear,
    recurrent,
    sampling,
    slicing,
    training,
)
