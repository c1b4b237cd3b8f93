"""Other dialects as chat requests: Responses, Anthropic's Messages, Ollama."""
