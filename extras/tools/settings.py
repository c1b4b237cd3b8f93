"""Tools of a server, as its settings have them: the interface by which the core enters this extra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from logitless.extras.tools.config import ToolConfig

if TYPE_CHECKING:
    from aiohttp import web

    from logitless.frontend.dialects.responses import ResponsesBody
    from logitless.server.api.context import Context
    from logitless.server.auth import ApiKeys
    from logitless.server.config import ServerConfig


@dataclass(frozen=True, slots=True)
class ToolSettings(ToolConfig):
    """The tools that a server runs (logitless.server.server_tools.ServerTools)."""

    def add_to(self, app: web.Application, config: ServerConfig, keys: ApiKeys) -> None:
        """Give an application its tools, from its start to its end."""
        if self or self.proxy:
            from logitless.extras.tools.handlers import add_tools

            add_tools(app, self, keys, eager=not config.behind_router)

    def runs(self, response: ResponsesBody) -> bool:
        """True for a response with tools of an MCP server, or a web search."""
        from logitless.extras.tools.mcp.choice import is_mcp, is_search

        tools = response.tools or () if self.servers else ()
        return any(is_mcp(tool) or (self.web_search and is_search(tool)) for tool in tools)

    async def respond(
        self, request: web.Request, context: Context, response: ResponsesBody, body: dict[str, Any]
    ) -> web.StreamResponse:
        """Answer /v1/responses: generations and calls by turns."""
        from logitless.extras.tools.response_turns import run_with_tools

        return await run_with_tools(request, context, self, response, body)
