"""The endpoints that generate: submit the job, then one JSON reply or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from server.errors import ServerFault
from server.http.context import CONTEXT, Context, error_object, json_response
from server.http.native import NativeReply
from server.http.openai import ChatReply, CompletionReply
from server.http.reply import Reply, failure, sse
from server.parse import Job
from server.parse_chat import parse_chat
from server.requests import Event, Failed, Finished, Progress, Token
from server.stream import Stream

log = logging.getLogger("logitless.http")
_SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def native_completion(request: web.Request) -> web.StreamResponse:
    """POST /completion."""
    context = request.app[CONTEXT]
    job = await context.parsed(request, context.parser.native)
    return await _run(request, context, job, NativeReply(job, context.served, context.config))


async def openai_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    context = request.app[CONTEXT]
    job = await context.parsed(request, context.parser.openai)
    return await _run(request, context, job, CompletionReply(job, context.served, context.config))


async def chat_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    context = request.app[CONTEXT]
    parser, template = context.parser, context.served.template
    job = await context.parsed(request, lambda body: parse_chat(body, parser, template))
    return await _run(request, context, job, ChatReply(job, context.served, context.config))


async def _run(request: web.Request, context: Context, job: Job, reply: Reply) -> web.StreamResponse:
    """Leaving early, for whatever reason, cancels the job: the client that goes away frees its slots."""
    async with await context.service.submit(job.requests) as stream:
        if job.options.stream:
            return await _stream(request, context, stream, reply)
        async for index, event in stream:
            reply.add(index, event)
    return json_response(reply.whole())


async def _stream(request: web.Request, context: Context, stream: Stream, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(headers=_SSE_HEADERS)
    await response.prepare(request)
    interval = reply.options.sse_ping_interval
    try:
        while events := await _next(stream, interval, response, context.config.timeout):
            text = "".join([_event_text(reply, index, event) for index, event in events])
            failed = next((event for _, event in events if isinstance(event, Failed)), None)
            if failed is not None:
                text += sse(error_object(failure(failed)))
            if text:
                await _write(response, text, context.config.timeout)
            if failed is not None:
                return response
        await _write(response, reply.ending(), context.config.timeout)
        await response.write_eof()
    except (ConnectionError, TimeoutError):
        log.debug("the client of %s went away", request.path)
        if request.transport is not None:
            request.transport.abort()
    except Exception as error:  # the reply has begun: the error can only be told in it
        log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG))
        await _write(response, sse(error_object(ServerFault("internal error"))), context.config.timeout)
    return response


async def _next(stream: Stream, interval: int, response: web.StreamResponse, timeout: float) -> list[tuple[int, Event]]:
    """The next events; a comment line goes out whenever nothing has for `interval` seconds."""
    while interval > 0:
        try:
            async with asyncio.timeout(interval):
                return await stream.batch()
        except TimeoutError:
            await _write(response, ":\n\n", timeout)
    return await stream.batch()


async def _write(response: web.StreamResponse, text: str, timeout: float) -> None:
    async with asyncio.timeout(timeout):  # a client that does not read
        await response.write(text.encode("utf-8", "replace"))


def _event_text(reply: Reply, index: int, event: Event) -> str:
    result = reply.results[index]
    if isinstance(event, Token):
        return reply.token(result, event)
    if isinstance(event, Finished):
        return reply.finish(result, event)
    if isinstance(event, Progress):
        return reply.progress(result, event)
    return ""
