"""Extras: folders beside the core, which it enters by their hooks only (logitless.hooks) and runs without."""
