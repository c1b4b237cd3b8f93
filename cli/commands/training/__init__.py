"""`finetune`, `train`, `export-lora` and `example`."""
