"""Chat requests: messages, tools, tool grammars."""
