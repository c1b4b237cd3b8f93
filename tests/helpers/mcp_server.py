"""MCP server for tests, made with the package mcp: sums, a search, long answers and failures.

Run as `python mcp_server.py` for standard streams, `python mcp_server.py http` for streamable HTTP on a free port,
which its first line tells."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("sums")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def search(query: str) -> str:
    """Search the web."""
    return f"Nothing is known of {query}."


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it failed\nin two lines")


@server.tool()
def environment() -> str:
    """Tell the names of variables, and the process's number."""
    return f"{os.getpid()} {' '.join(sorted(os.environ))}"


@server.tool()
def long(n: int) -> str:
    """Answer with n characters."""
    return "x" * n


def http() -> None:
    """Serve over HTTP on a free port."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        app: Any = server.streamable_http_app()
        uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])


HERE = Path(__file__)

if __name__ == "__main__":
    http() if "http" in sys.argv else server.run()
