"""GGUF files: parsing, metadata, writing."""
