"""MCP server of the configuration: its tools and calls, and its restarts after it died or hung."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from logitless.extras.tools.config import McpSettings
from logitless.extras.tools.server_tool import Answer, ServerTool, ToolError, cut, plain
from logitless.frontend.workers import to_thread

if TYPE_CHECKING:
    from logitless.extras.tools.mcp.link import McpLink

log = logging.getLogger("logitless.tools")
START_SECONDS = 20.0
MAX_TOOLS, MAX_PAGES = 128, 16  # of a server
MAX_RESULT = 64 << 10  # characters
LONGEST_PAUSE = 60.0  # seconds from a failure to the next start
MAX_HANGS = 2  # calls in a row that had no answer in time, until the server is started anew


def _import_link() -> None:
    """Import the module of connections, which takes a while, beside the event loop."""


class McpServer:
    """One server, started at its first use and again after it ended, each time later. Raises ToolError."""

    def __init__(self, settings: McpSettings) -> None:
        self.settings = settings
        self._link: McpLink | None = None
        self._tools: tuple[ServerTool, ...] | None = None
        self._starting = asyncio.Lock()
        self._failures = self._hangs = 0
        self._reason, self._not_before = "", 0.0

    async def tools(self) -> tuple[ServerTool, ...]:
        """Its tools, by names that no other server's have."""
        link = await self._connected()
        if self._tools is None:
            listed = await self._call_link(link, "list", START_SECONDS)
            self._tools = tuple(self._tool(each) for each in listed)
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any], client: str) -> Answer:
        """Call a tool by its own name."""
        link = await self._connected()
        result = await self._call_link(link, "call", self.settings.seconds, name, dict(arguments))
        self._failures = 0
        text = cut(_text(result), MAX_RESULT)
        if result.is_error:
            raise ToolError(text or "the tool failed")
        return plain(text)

    async def close(self) -> None:
        """End it."""
        if self._link is not None:
            await self._link.close()

    async def _connected(self) -> McpLink:
        async with self._starting:
            if self._link is not None and not self._link.ended:
                return self._link
            if self._link is not None:
                await self._give_up(self._link, "it ended")
            if (wait := self._not_before - monotonic()) > 0:
                raise self._down(f"; it is started again in {wait:.0f} s")
            await to_thread(_import_link)
            from logitless.extras.tools.mcp.link import McpLink

            link = McpLink(self.settings, START_SECONDS, self._forget)
            self._tools, self._hangs = None, 0
            try:
                await link.client()
            except ConnectionError as error:
                await self._failed(link, str(error))
                raise self._down() from None
            except asyncio.CancelledError:
                await link.close()
                raise
            self._link = link
            log.info("MCP server %s: connected", self.settings.name)
            return self._link

    async def _call_link(self, link: McpLink, what: str, seconds: float, *args: Any) -> Any:
        """The answer of a request; what a server does to it is told as ToolError."""
        try:
            async with asyncio.timeout(seconds):
                client = await link.client()
                answer = await (client.call_tool(*args) if what == "call" else _listed(client))
        except TimeoutError:
            self._hangs += 1
            if self._hangs >= MAX_HANGS:
                async with self._starting:
                    await self._give_up(link, "it answers no more")
            raise ToolError(f"MCP server {self.settings.name!r} did not answer within {seconds:g} s") from None
        except Exception as error:
            if link.ended:
                async with self._starting:
                    await self._give_up(link, str(error))
                raise self._down() from None
            raise ToolError(f"MCP server {self.settings.name!r}: {error or type(error).__name__}") from None
        self._hangs = 0
        return answer

    async def _give_up(self, link: McpLink, reason: str) -> None:
        """End a connection, unless another call has done so."""
        if self._link is link:
            self._link = None
            await self._failed(link, reason)

    async def _failed(self, link: McpLink, reason: str) -> None:
        """Close a connection that failed; the next may begin after a pause that doubles each time."""
        self._failures += 1
        self._reason = link.reason or reason
        self._not_before = monotonic() + (min(LONGEST_PAUSE, 2.0 ** (self._failures - 2)) if self._failures > 1 else 0)
        log.warning("MCP server %s failed: %s", self.settings.name, self._reason)
        await link.close()

    def _down(self, more: str = "") -> ToolError:
        return ToolError(f"MCP server {self.settings.name!r} is down: {self._reason}{more}")

    def _forget(self) -> None:
        self._tools = None

    def _tool(self, listed: Any) -> ServerTool:
        name, server = listed.name, self.settings.name
        hints = listed.annotations.model_dump(by_alias=True, exclude_none=True) if listed.annotations else {}
        return ServerTool(
            name=re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}_{name}")[:64],
            title=listed.title or name,
            description=cut(listed.description or "", 4096),
            parameters=listed.input_schema or {"type": "object"},
            call=partial(self.call, name),
            kind="mcp",
            writes=not hints.get("readOnlyHint", False),
            server=server,
            bare=name,
            hints=hints,
        )


async def _listed(client: Any) -> list[Any]:
    """All tools, page by page."""
    result: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        result += page.tools
        cursor = page.next_cursor
        if not cursor or len(result) >= MAX_TOOLS:
            break
    return result[:MAX_TOOLS]


def _text(result: Any) -> str:
    """A result as a model reads it: texts as they are, others by their kind."""
    parts = []
    for part in result.content:
        if part.type == "text":
            parts.append(part.text)
        elif part.type == "resource" and hasattr(part.resource, "text"):
            parts.append(part.resource.text)
        elif part.type == "resource_link":
            parts.append(str(part.uri))
        else:
            mime = getattr(part, "mime_type", None) or part.type
            parts.append(f"[{mime}, {len(getattr(part, 'data', ''))} characters of base64]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
