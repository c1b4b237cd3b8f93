"""Toolbox: all tools of a server, listed and called by name, a bounded number at a time.

Each MCP server has bounds of its own, so one that hangs takes no room of the others."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web
from msgspec import Struct

from logitless.extras.tools.built_in.declared import tool
from logitless.extras.tools.built_in.files import file_tools
from logitless.extras.tools.built_in.folder import Folder
from logitless.extras.tools.built_in.shell import Runtime, shell_tool
from logitless.extras.tools.config import ToolConfig
from logitless.extras.tools.mcp.server import McpServer
from logitless.extras.tools.server_tool import Answer, Say, ServerTool, ToolError

log = logging.getLogger("logitless.tools")
AT_ONCE = 8  # calls of a server, or of the built-in tools; more wait
STOP_SECONDS = 2.0  # from a stop to the end of all calls and servers


_STOPS = "the server is shutting down"


class GetInfo(Struct, frozen=True, kw_only=True):
    """Tell the operating system and the working folder."""


class Toolbox:
    """The tools of one server: its own, and those of its MCP servers, which a failing one does not hold up."""

    def __init__(self, settings: ToolConfig) -> None:
        self._settings = settings
        self._own = _own_tools(settings)
        self.servers = {each.name: McpServer(each) for each in settings.servers}
        self._room = {name: asyncio.Semaphore(AT_ONCE) for name in ("", *self.servers)}
        self._running: set[asyncio.Task[Answer]] = set()
        self._stopping = False

    async def live(self, _: web.Application, *, eager: bool = True) -> AsyncIterator[None]:
        """While the application runs: connect the servers (`eager`: before somebody asks), and end them at the end."""
        starting = asyncio.gather(*(self.of_server(name) for name in self.servers if eager))
        yield
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await self.stop()

    async def stop(self) -> None:
        """End all calls, which answer that the server stops, and all servers."""
        self._stopping = True
        for task in self._running:
            task.cancel()
        ending = (*self._running, *(server.close() for server in self.servers.values()))
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*ending, return_exceptions=True)

    async def tools(self) -> dict[str, ServerTool]:
        """All tools by name; of two with one name, the first."""
        listed = await asyncio.gather(*(self.of_server(name) for name in self.servers))
        result = dict(self._own)
        for tools in listed:
            for each in tools:
                result.setdefault(each.name, each)
        return result

    async def of_server(self, name: str) -> tuple[ServerTool, ...]:
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

    async def find(self, name: str) -> ServerTool | None:
        """The tool of this name."""
        return self._own.get(name) or (await self.tools()).get(name)

    def elsewhere(self, name: str, folder: str, runtime: str) -> ServerTool | None:
        """The built-in tool of this name in a folder below its own ("": its own), and in one of the server's
        containers ("": the first). ToolError: there is none of them."""
        allowed = self._settings.runtimes or ("none",)
        if runtime and runtime not in allowed:
            raise ToolError(f"runtime {runtime[:80]!r} is none of --tools-runtime, which are {', '.join(allowed)}")
        tools = _own_tools(self._settings, folder, runtime) if name in self._own else {}
        return tools.get(name)

    async def call(self, tool: ServerTool, arguments: Mapping[str, Any], client: str, say: Say | None = None) -> Answer:
        """The result of a call, once there is room for it; {error} where it failed. `say` gets what a command
        writes as it comes."""
        async with self._room[tool.server]:
            if self._stopping:
                return {"error": _STOPS}
            work = tool.call(arguments, client) if say is None or tool.live is None else tool.live(arguments, say)
            task = asyncio.ensure_future(work)
            self._running.add(task)
            try:
                return await task
            except ToolError as error:
                return {"error": str(error)}
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
                return {"error": _STOPS}
            finally:
                self._running.discard(task)


def _own_tools(settings: ToolConfig, within: str = "", runtime: str = "") -> dict[str, ServerTool]:
    """The built-in tools. `within`: the folder from which paths and commands begin, below the settings' one."""
    if not settings.built_in:
        return {}
    folder = Folder(settings.folder, within)
    container = runtime.removeprefix("none") or next(iter(settings.runtimes), "")
    runs_in = Runtime.parse(container) if container else None

    def info(_: GetInfo) -> Answer:
        return {"os": f"{platform.system()} {platform.release()} {platform.machine()}", "cwd": os.fspath(folder.cwd)}

    own = (*file_tools(folder), shell_tool(folder, runs_in), tool("get_info", "Get runtime info", GetInfo, info))
    by_name = {each.name: each for each in own}
    return {name: by_name[name] for name in settings.built_in}
