"""Interface of the tools that a server runs, which an extra has."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from aiohttp import web

from logitless.frontend.dialects.responses import ResponsesBody


class ServerTools(Protocol):
    """Tools of one server: its own, and those of MCP servers."""

    def __bool__(self) -> bool:
        """True where there are some."""

    def add_to(self, app: web.Application, config: Any, keys: Any) -> None:
        """Give an application its tools, from its start to its end."""

    def runs(self, response: ResponsesBody) -> bool:
        """True for a response whose tools the server calls."""

    def respond(
        self, request: web.Request, context: Any, response: ResponsesBody, body: dict[str, Any]
    ) -> Awaitable[web.StreamResponse]:
        """Answer /v1/responses, with the calls of its tools."""
