"""Tools that the server runs where its flags allow them: its own ones, and those of MCP servers."""
