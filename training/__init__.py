"""Training: data, training step, LoRA and full finetunes, optimizer schedule, trainer,
checkpoints."""
