"""Toolbox: all tools of a server, listed and called by name, a bounded number at a time.

Each MCP server has bounds of its own, so one that hangs takes no room of the others."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web
from msgspec import Struct

from logitless.server.tools.declared import tool
from logitless.server.tools.files import file_tools
from logitless.server.tools.folder import Folder
from logitless.server.tools.mcp_server import McpServer
from logitless.server.tools.settings import ToolSettings
from logitless.server.tools.shell import Runtime, shell_tool
from logitless.server.tools.tool import Answer, Tool, ToolError

log = logging.getLogger("logitless.tools")
AT_ONCE = 8  # calls of a server, or of the built-in tools; more are refused


class GetInfo(Struct, frozen=True, kw_only=True):
    """Tell the operating system and the working folder."""


class Toolbox:
    """The tools of one server: its own, and those of its MCP servers, which a failing one does not hold up."""

    def __init__(self, settings: ToolSettings) -> None:
        self._own = _own_tools(settings)
        self.servers = {each.name: McpServer(each) for each in settings.servers}
        self._running: Counter[str] = Counter()  # calls by server

    async def live(self, _: web.Application, *, eager: bool = True) -> AsyncIterator[None]:
        """While the application runs: connect the servers (`eager`: before somebody asks), and end them at the end."""
        starting = asyncio.gather(*(self.of_server(name) for name in self.servers if eager))
        yield
        starting.cancel()
        await asyncio.gather(starting, *(server.close() for server in self.servers.values()), return_exceptions=True)

    async def tools(self) -> dict[str, Tool]:
        """All tools by name; of two with one name, the first."""
        listed = await asyncio.gather(*(self.of_server(name) for name in self.servers))
        found = dict(self._own)
        for tools in listed:
            for each in tools:
                found.setdefault(each.name, each)
        return found

    async def of_server(self, name: str) -> tuple[Tool, ...]:
        """The tools of one MCP server; none where it is down, which the log has told."""
        try:
            return await self.servers[name].tools()
        except ToolError as error:
            log.debug("%s", error)
            return ()

    @property
    def urls(self) -> dict[str, str]:
        """Addresses of the MCP servers by name, "" for commands."""
        return {name: server.settings.url for name, server in self.servers.items()}

    async def find(self, name: str) -> Tool | None:
        """The tool of this name."""
        return self._own.get(name) or (await self.tools()).get(name)

    async def call(self, tool: Tool, arguments: Mapping[str, Any], client: str) -> Answer:
        """The result of a call; {error} where it failed."""
        if self._running[tool.server] >= AT_ONCE:
            return {"error": f"{AT_ONCE} calls of {tool.server or 'the built-in tools'} run already: try again later"}
        self._running[tool.server] += 1
        try:
            return await tool.call(arguments, client)
        except ToolError as error:
            return {"error": str(error)}
        finally:
            self._running[tool.server] -= 1


def _own_tools(settings: ToolSettings) -> dict[str, Tool]:
    if not settings.built_in:
        return {}
    folder = Folder(settings.folder)
    runtime = Runtime.parse(settings.runtime) if settings.runtime else None

    def info(_: GetInfo) -> Answer:
        return {"os": f"{platform.system()} {platform.release()} {platform.machine()}", "cwd": os.fspath(folder.root)}

    own = (*file_tools(folder), shell_tool(folder, runtime), tool("get_info", "Get runtime info", GetInfo, info))
    by_name = {each.name: each for each in own}
    return {name: by_name[name] for name in settings.built_in}
