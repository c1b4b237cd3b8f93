"""Ollama's API over the same engine."""
