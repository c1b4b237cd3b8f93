"""OpenAI's /v1/audio: the text of a sound, whole, as plain text, or as a stream."""

from __future__ import annotations

from aiohttp import web

from logitless.engine.errors import InvalidRequest
from logitless.frontend.dialects.transcriptions import TRANSCRIBE, TRANSLATE, parse_spoken
from logitless.frontend.replies.transcriptions import SpokenReply
from logitless.server.api.context import CONTEXT
from logitless.server.api.generate import collected, run
from logitless.server.bodies.form import form_fields, is_form


async def transcriptions(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/transcriptions: the text of a sound in its own language."""
    return await _answer(request, TRANSCRIBE)


async def translations(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/translations: the text of a sound in English."""
    return await _answer(request, TRANSLATE)


async def _answer(request: web.Request, task: str) -> web.StreamResponse:
    context = request.app[CONTEXT]
    _ = context.writer
    if not is_form(request):
        raise InvalidRequest("the body must be a multipart form with the fields 'file' and 'model'")
    parser, kind = context.parser_for(request), request.headers["Content-Type"]
    spoken = await context.parsed_value(
        request, lambda raw: parse_spoken(form_fields(kind, raw), parser, task), slow=True
    )
    reply = SpokenReply(spoken, context.served, context.config)
    if spoken.response_format != "text":
        return await run(request, reply)
    async with collected(request, reply):
        return web.Response(text=reply.text())
