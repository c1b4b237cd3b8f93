"""Acting on a chat completion that is running."""

from __future__ import annotations

from aiohttp import web

from logitless.engine.errors import NotFound
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.protocol.fields import Fields, refuse


async def control(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/control: {"id": …, "action": "reasoning_end"} ends the reasoning of a completion that
    was asked for with `reasoning_control`."""
    context = request.app[CONTEXT]

    def parse(body: dict[str, object]) -> str:
        fields = Fields(body)
        if fields.text("action") != "reasoning_end":
            refuse("action", "must be reasoning_end")
        if not fields.text("id"):
            refuse("id", "is required")
        return fields.text("id")

    id = await context.parsed(request, parse)
    stream = context.running.get(id)
    if stream is None:
        raise NotFound(f"no completion with id {id[:64]!r} is running")
    return json_response({"id": id, "success": await context.service.end_reasoning(stream)})
