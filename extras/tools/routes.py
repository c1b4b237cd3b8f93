"""Rows of the routes of tools that the server runs."""

from __future__ import annotations

from functools import partial

from logitless.server.routes import HERE, Route

_HANDLERS = "logitless.extras.tools.handlers."
_get, _post, _delete = (partial(Route, method) for method in ("get", "post", "delete"))

ROUTES = (
    _get("/cors-proxy", _HANDLERS + "proxy", "server", "A configured MCP server's answer (needs --ui-mcp-proxy)",
         answer="bytes", media="application/octet-stream", query="_URL", router=HERE),
    _post("/cors-proxy", _HANDLERS + "proxy", "server", "The same of a body (needs --ui-mcp-proxy)", body="()",
          answer="bytes", media="application/octet-stream", query="_URL", router=HERE),
    _delete("/cors-proxy", _HANDLERS + "proxy", "server", "End of a session: nothing is sent on", query="_URL",
            empty=200, router=HERE),
    _get("/tools", _HANDLERS + "tools", "server", "Tools that the server runs (needs --tools or MCP servers)",
         answer="list[llamacpp.ToolEntry]", router=HERE, polled=True),
    _post("/tools", _HANDLERS + "call", "server", "Run a tool (needs --tools or MCP servers)",
          body=_HANDLERS + "ToolCall", answer="llamacpp.ToolAnswer", example={"tool": "get_info"}, router=HERE),
)  # fmt: skip
