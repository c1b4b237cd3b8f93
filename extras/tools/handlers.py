"""llama-server's endpoints of tools that the server runs: a list, and calls. Without their flags they are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from msgspec import Struct

from logitless.engine.errors import Forbidden, NotFound
from logitless.engine.sampling.params import Param
from logitless.extras.tools.config import ToolConfig
from logitless.extras.tools.mcp.proxy import pass_through
from logitless.extras.tools.server_tool import Answer, Say, ServerTool, ToolError, result_text
from logitless.extras.tools.toolbox import Toolbox
from logitless.frontend.answers.llamacpp import ToolEntry, ToolPermissions
from logitless.frontend.fields import bad_request, read
from logitless.frontend.replies.encoding import sse
from logitless.server.api.context import client_of, json_response
from logitless.server.auth import ApiKeys
from logitless.server.bodies.json_body import json_object
from logitless.server.bodies.room import BODIES
from logitless.server.clients import CLIENT
from logitless.server.listen import ENDINGS
from logitless.server.origins import is_local

TOOLBOX: web.AppKey[Toolbox] = web.AppKey("toolbox", Toolbox)
_KEYS: web.AppKey[ApiKeys] = web.AppKey("keys of tools", ApiKeys)
_PROXY: web.AppKey[ToolConfig] = web.AppKey("settings of the proxy", ToolConfig)
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_FLAGS = "--tools, --mcp-servers-config"


class ToolCall(Struct, frozen=True, kw_only=True):
    """POST /tools."""

    tool: Annotated[str, Param("name of the tool")]
    params: Annotated[Mapping[str, Any], Param("its arguments")] = {}
    stream: Annotated[
        bool, Param("the output of a command as it comes: events of chunks, then one that it is done")
    ] = False


def add_tools(app: web.Application, settings: ToolConfig, keys: ApiKeys, *, eager: bool) -> None:
    """Give an application its tools, from its start to its end. `eager`: MCP servers are connected before somebody
    asks."""
    app[_KEYS], app[_PROXY] = keys, settings
    if settings:
        app[TOOLBOX] = Toolbox(settings)
        endings: list[Callable[[], Awaitable[None]]] = [app[TOOLBOX].stop]
        app[ENDINGS] = endings
        app.cleanup_ctx.append(partial(app[TOOLBOX].live, eager=eager))


async def tools(request: web.Request) -> web.Response:
    """GET /tools: the tools, with their declarations."""
    listed = await toolbox_of(request).tools()
    return json_response([_entry(tool) for tool in listed.values()])


async def call(request: web.Request) -> web.StreamResponse:
    """POST /tools: the result of one call. X-Tool-Cwd and X-Tool-Runtime choose the folder and the container of a
    built-in tool, among those of --tools-folder and --tools-runtime."""
    toolbox, client = toolbox_of(request), client_of(request)
    async with request.app[BODIES].read(request, client) as body:
        params = read(ToolCall, json_object(body))
    place = request.headers.get("X-Tool-Cwd", ""), request.headers.get("X-Tool-Runtime", "")
    try:
        tool = toolbox.elsewhere(params.tool, *place) if any(place) else None
    except ToolError as error:
        bad_request("X-Tool-Cwd" if place[0] else "X-Tool-Runtime", f"{error} (--tools-folder, --tools-runtime)")
    tool = tool or await toolbox.find(params.tool)
    if tool is None:
        raise NotFound(f"there is no tool {params.tool[:64]!r}")
    if not params.stream:
        return json_response(await toolbox.call(tool, params.params, client))
    return await _streamed(request, tool, partial(toolbox.call, tool, params.params, client))


async def _streamed(
    request: web.Request, tool: ServerTool, work: Callable[[Say], Coroutine[Any, Any, Answer]]
) -> web.StreamResponse:
    """The events of a call: {chunk} of its output, and {done}, with `error` where it failed."""
    response = web.StreamResponse(headers=_STREAM)
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    task = asyncio.create_task(work(pieces.put_nowait))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        await response.prepare(request)
        while (piece := await pieces.get()) is not None:
            await response.write(sse({"chunk": piece}))
        answer = await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    error = answer.get("error")
    if error is None and tool.live is None:
        await response.write(sse({"chunk": result_text(answer)}))
    await response.write(sse({"done": True} if error is None else {"done": True, "error": error}))
    await response.write_eof()
    return response


async def proxy(request: web.Request) -> web.StreamResponse:
    """llama-server's proxy for pages, to the addresses of the configured MCP servers and nowhere else."""
    settings = request.app.get(_PROXY)
    if settings is None or not settings.proxy:
        raise Forbidden("this server fetches nothing for pages (--ui-mcp-proxy)")
    if request.app.get(TOOLBOX) is None:
        raise Forbidden("there is no MCP server that pages may reach (--mcp-servers-config)")
    toolbox = toolbox_of(request)
    if not request[CLIENT].runs_tools:
        raise Forbidden("this needs the admin key")
    url = request.query.get("url", "")
    server = next((each.settings for each in toolbox.servers.values() if url and each.settings.url == url), None)
    if server is None:
        raise Forbidden(f"the address {url[:200]!r} is none of a configured MCP server")
    if request.method == "DELETE":  # the end of a session
        return web.Response()
    async with request.app[BODIES].read(request, client_of(request)) as body:
        return await pass_through(request, server, body)


def toolbox_of(request: web.Request) -> Toolbox:
    """The tools that this client may have called. Forbidden: none at all."""
    toolbox = request.app.get(TOOLBOX)
    if toolbox is None:
        raise Forbidden(f"this server runs no tools ({_FLAGS})")
    if not request.app[_KEYS] and not is_local(request):
        raise Forbidden("without an API key tools run for this machine only (--api-key)")
    return toolbox


def _entry(tool: ServerTool) -> ToolEntry:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return ToolEntry(
        display_name=tool.title,
        tool=tool.name,
        type=tool.kind,
        permissions=ToolPermissions(tool.writes),
        uses_cwd=tool.kind == "server",
        definition={"type": "function", "function": function},
    )
