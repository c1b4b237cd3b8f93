"""Hugging Face folders (config.json, safetensors, tokenizer.json), read as if they were GGUF files."""
