"""Tools that the server runs: files, a shell, MCP servers, and the turns of a response that calls them."""
