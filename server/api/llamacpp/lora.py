"""GET and POST /lora-adapters, as llama-server has them."""

from __future__ import annotations

from aiohttp import web

from logitless.engine.errors import InvalidRequest
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.llamacpp import Adapter, Done
from logitless.frontend.fields import read
from logitless.frontend.lora import Scales, lora_scales
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.bodies.json_body import json_value


async def adapters(request: web.Request) -> web.Response:
    """GET: every adapter with the scale that requests get which do not say."""
    known = request.app[CONTEXT].served.adapters
    return json_response(
        [
            Adapter(
                id=entry.id,
                path=entry.path,
                scale=entry.scale,
                task_name=entry.metadata.get("task_name", ""),
                prompt_prefix=entry.metadata.get("prompt_prefix", ""),
                model=entry.name or UNSET,
            )
            for entry in (known.entries if known is not None else ())
            if not (entry.whole or entry.removed)
        ]
    )


async def set_scales(request: web.Request) -> web.Response:
    """POST: the scales from now on; adapters that are not listed get 0."""
    context = request.app[CONTEXT]
    known = context.served.adapters

    def parse(raw: bytearray) -> dict[int, float]:
        body = json_value(raw) if raw.strip() else []
        if not isinstance(body, list):
            raise InvalidRequest("the body must be an array of {id, scale}")
        return lora_scales(read(Scales, {"body": body}).body, known, "body")

    scales = await context.parsed_value(request, parse)
    if known is not None:
        await context.service.ask(lambda _: known.set_scales(scales), wakes=False)
    return json_response(Done())
