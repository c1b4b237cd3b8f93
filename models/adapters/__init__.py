"""LoRA adapters and full finetunes: files, stacked adapters of a batch, merging."""
