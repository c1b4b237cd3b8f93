"""Built-in tools: files below a folder, and a shell."""
