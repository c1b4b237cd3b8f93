"""The endpoints that generate: submit the job, then one JSON reply or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from aiohttp import web

from server.errors import NotSupported, ServerFault
from server.http.chat import ChatReply
from server.http.context import CONTEXT, Context, beside, json_response
from server.http.native import NativeReply
from server.http.openai import CompletionReply
from server.http.reply import Reply, failure
from server.http.verify import VerifyReply
from server.parse import Job
from server.parse_chat import parse_chat
from server.parse_infill import parse_infill
from server.parse_verify import parse_verify, slot_to_continue
from server.requests import Event, Failed, Finished, Progress, Token
from server.slot_actions import tokens_of
from server.stream import Stream

log = logging.getLogger("logitless.http")
_SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def native_completion(request: web.Request) -> web.StreamResponse:
    """POST /completion."""
    context = request.app[CONTEXT]
    job = await context.parsed(request, context.parser.native)
    return await run(request, context, job, NativeReply(job, context.served, context.config))


async def infill(request: web.Request) -> web.StreamResponse:
    """POST /infill."""
    context = request.app[CONTEXT]
    parser = context.parser
    job = await context.parsed(request, lambda body: parse_infill(body, parser))
    return await run(request, context, job, NativeReply(job, context.served, context.config))


async def openai_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    context = request.app[CONTEXT]
    job = await context.parsed(request, context.parser.openai)
    return await run(request, context, job, CompletionReply(job, context.served, context.config))


async def chat_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    context = request.app[CONTEXT]
    parser, template = context.parser, context.served.template
    job = await context.parsed(request, lambda body: parse_chat(body, parser, template))
    return await run(request, context, job, ChatReply(job, context.served, context.config))


def client_of(request: web.Request, job: Job) -> str:
    """Whom a request counts for when clients take turns: the user that it names, of this key or address."""
    key = request.headers.get("Authorization") or request.headers.get("X-Api-Key") or request.remote or ""
    return f"{key} {job.options.user}"


async def verify(request: web.Request) -> web.StreamResponse:
    """POST /v1/verify: how far the model agrees with a draft, and the token that it would choose next."""
    context = request.app[CONTEXT]
    parser = context.parser
    id = await context.parsed(request, lambda body: slot_to_continue(body, context.config))
    known = None if id is None else await context.service.ask(lambda scheduler: tokens_of(scheduler, id))
    job = await context.parsed(request, lambda body: parse_verify(body, parser, known))
    return await run(request, context, job, VerifyReply(job, context.served, context.config))


async def run(request: web.Request, context: Context, job: Job, reply: Reply) -> web.StreamResponse:
    """Leaving early, for whatever reason, cancels the job: the client that goes away frees its slots."""
    if not context.served.info.generates:
        raise NotSupported("this model makes vectors of texts (POST /v1/embeddings), it does not write")
    async with await context.service.submit(job.requests, client_of(request, job)) as stream:
        context.running[reply.id] = stream
        try:
            if job.options.stream:
                return await _stream(request, context, stream, reply)
            async for index, event in stream:
                reply.add(index, event)
        finally:
            del context.running[reply.id]
    if reply.is_large:
        return await beside(lambda: json_response(reply.whole()))
    return json_response(reply.whole())


async def _stream(request: web.Request, context: Context, stream: Stream, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(headers=_SSE_HEADERS)
    await response.prepare(request)
    timeout = context.config.timeout
    writer = _Writer(response)
    attendant = asyncio.create_task(_attend(request, writer, reply.options.sse_ping_interval, timeout))
    try:
        while events := await stream.batch():
            text = "".join([_event_text(reply, index, event) for index, event in events])
            failed = next((event for _, event in events if isinstance(event, Failed)), None)
            if failed is not None:
                text += reply.failed(failure(failed))
            if text:
                await writer.write(text)
            if failed is not None:
                return response
        await writer.write(reply.ending())
        await response.write_eof()
    except ConnectionError:
        log.debug("the client of %s went away", request.path)
    except Exception as error:  # the reply has begun: the error can only be told in it
        log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG))
        with suppress(ConnectionError):
            await writer.write(reply.failed(ServerFault("internal error")))
    finally:
        attendant.cancel()
    return response


class _Writer:
    """Writes to a stream and remembers when, so that the hot path needs no timers of its own."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self.n_writes = 0
        self.since: float | None = None  # the write in progress waits for the client since then

    async def write(self, text: str) -> None:
        """Send text; waits while the client does not read."""
        self.n_writes += 1
        self.since = time.monotonic()
        await self._response.write(text.encode("utf-8", "replace"))
        self.since = None


async def _attend(request: web.Request, writer: _Writer, interval: int, timeout: float) -> None:
    """Keep a silent stream alive with comment lines; drop a client that does not read for too long."""
    n_writes = -1
    while request.transport is not None:
        await asyncio.sleep(interval if interval > 0 else timeout)
        if writer.since is not None:
            if time.monotonic() - writer.since >= timeout:
                request.transport.abort()
        elif writer.n_writes == n_writes and interval > 0:
            with suppress(ConnectionError):
                await writer.write(":\n\n")
        n_writes = writer.n_writes


def _event_text(reply: Reply, index: int, event: Event) -> str:
    result = reply.results[index]
    if isinstance(event, Token):
        return reply.token(result, event)
    if isinstance(event, Finished):
        return reply.finish(result, event)
    if isinstance(event, Progress):
        return reply.progress(result, event)
    return ""
