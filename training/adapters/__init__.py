"""Parameter-efficient fine-tuning: options of adapters, their start, their forward pass, noise."""
