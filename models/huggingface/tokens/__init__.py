"""The vocabulary of a Hugging Face folder: tokenizer.json, tokenizer.model, and their settings."""
