"""llama-server's endpoints: completion, slots, LoRA, tokenize, resumable streams."""
