"""Dialects, translated to chat requests: Responses, Anthropic's Messages, Ollama."""
