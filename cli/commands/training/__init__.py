"""`logitless finetune`, `train` and `export-lora`."""
