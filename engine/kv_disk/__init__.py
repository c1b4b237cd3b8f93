"""Prompt cache on disk: files of KV blocks that leave host memory, and the hashes that find them."""
