"""Ollama's API of a router, with the models that its clients create."""
