"""Chat templates in a sandbox, tool calls, reasoning."""
