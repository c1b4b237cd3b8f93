"""Training: data, methods, training step, LoRA, optimizer, trainer, checkpoints."""
