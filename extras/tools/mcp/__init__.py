"""MCP servers: connections, restarts, the proxy for pages, and their tools in a request."""
