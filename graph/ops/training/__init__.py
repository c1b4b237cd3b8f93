"""Training ops: losses and the optimizer step."""
