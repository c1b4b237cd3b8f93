"""Generation over HTTP: a job goes to the engine, its reply is one JSON object or a stream of events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial

from aiohttp import web

from logitless.engine.errors import InvalidRequest, ServerFault
from logitless.engine.requests import BATCH_PRIORITY, CompletionRequest, Event, Failed, Finished, Progress, Token
from logitless.engine.stream import Delivery, Stream, event_weight
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.encoding import PIECE, json_pieces
from logitless.frontend.replies.reply import Reply, failure
from logitless.frontend.workers import compute
from logitless.server.api.context import CONTEXT, client_key, client_of, json_response, raw_json_response
from logitless.server.api.llamacpp.sessions import StreamSession
from logitless.server.clients import CLIENT
from logitless.server.observing.record import RECORD
from logitless.server.observing.tracing import TRACE

log = logging.getLogger("logitless.http")
CONVERSATION = "X-Conversation-Id"
EVENTS = "text/event-stream"
HEAVY = 1 << 10  # log-probabilities of events that are written beside the event loop
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # of streams


def user_of(request: web.Request, job: GenerationJob) -> str:
    """Whom a generation counts for: the user that the request names, of this client."""
    return f"{client_of(request)} {job.params.safety_identifier}"


async def run(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Leaving early cancels the request: a client that disconnects frees its slots. Only a stream
    whose request has X-Conversation-Id goes on, to be found again (logitless.server.api.llamacpp.resume)."""
    context = request.app[CONTEXT]
    _ = context.writer
    is_events = reply.content_type == EVENTS
    if reply.params.stream and CONVERSATION in request.headers and is_events:
        session = await begin_session(request, reply, request.headers[CONVERSATION])
        return await send(request, session.read(0), -1)
    if reply.params.stream:
        requests, user = await _prepared(request, reply)
        async with await context.service.submit(requests, user, _delivery(reply)) as stream:
            ping_interval = reply.params.sse_ping_interval if is_events else -1
            return await send(request, _stream_data(request, stream, reply), ping_interval, reply.content_type)
    async with collected(request, reply):
        if reply.is_large:
            return await send_json(request, reply.whole)
        return json_response(reply.whole())


async def send_json(request: web.Request, make: Callable[[], object]) -> web.StreamResponse:
    """An answer that takes long to make: in pieces, as the client reads them, where it is large."""
    client = client_of(request)
    pieces = await compute(lambda: json_pieces(make()), client)

    async def rest() -> AsyncGenerator[bytes, None]:
        yield first
        while piece := await compute(partial(next, pieces, b""), client):
            yield piece

    first = await compute(partial(next, pieces, b""), client)
    if len(first) < PIECE:
        return raw_json_response(first)
    return await send(request, rest(), -1, "application/json; charset=utf-8")


async def _prepared(request: web.Request, reply: Reply) -> tuple[Sequence[CompletionRequest], str]:
    """The job's requests, with the client's cache salt and priority, and whom they count for."""
    context, job, record = request.app[CONTEXT], reply.job, request[RECORD]
    record.generates(reply.model, len(job.requests), job.best_of)
    record.skipped_tools = job.skipped_tools
    if (trace := request.get(TRACE)) is not None:
        has_tools = job.style.calls is not None
        trace.generates(job.requests[0], reply, n=job.n, stream=job.params.stream, has_tools=has_tools)
    if context.config.log_prompts_dir:
        await context.keep_prompts(request, [each.text_ids for each in job.requests[:: job.best_of]])
    client, shared = request[CLIENT], context.config.cache_shared
    requests: Sequence[CompletionRequest] = job.requests
    if client.salt or any(r.cache_salt for r in requests):
        requests = [replace(r, cache_salt=client.cache_salt(r.cache_salt, shared)) for r in requests]
    if client.batch:
        requests = [replace(r, priority=BATCH_PRIORITY) for r in requests]
    return requests, user_of(request, job)


@contextmanager
def _running(request: web.Request, stream: Stream, reply: Reply) -> Iterator[None]:
    """Registration of a reply's stream, by which `control` finds it."""
    running = request.app[CONTEXT].running
    running[reply.id] = client_key(request), stream
    try:
        yield
    finally:
        del running[reply.id]


def _delivery(reply: Reply, *, whole: bool = False) -> Delivery:
    return Delivery(whole, reply.most_logprobs, reply.keeps_logprobs)


@asynccontextmanager
async def collected(request: web.Request, reply: Reply) -> AsyncIterator[None]:
    """Have the job done and give its results to the reply, whose log-probabilities have their room while
    the block runs."""
    requests, user = await _prepared(request, reply)
    service = request.app[CONTEXT].service
    async with service.begin(requests, user, _delivery(reply, whole=True)) as stream:
        with _running(request, stream, reply):
            try:
                while events := await stream.batch():
                    request[RECORD].take(events)
                    for index, event in events:
                        reply.add(index, event)
            finally:
                request[RECORD].take(stream.latest.copy().items())  # of a request that is aborted
        yield


async def generated(request: web.Request, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The server-sent events of one generation among several of a reply; a failure is raised."""
    requests, user = await _prepared(request, reply)
    async with request.app[CONTEXT].service.begin(requests, user, _delivery(reply)) as stream:
        with _running(request, stream, reply):
            while events := await stream.batch():
                request[RECORD].take(events)
                for index, event in events:
                    if isinstance(event, Failed):
                        raise failure(event)
                    if _is_heavy(reply, [(index, event)]):
                        yield await compute(partial(_event_data, reply, index, event), client_of(request))
                    else:
                        yield _event_data(reply, index, event)


async def begin_session(
    request: web.Request,
    reply: Reply,
    name: str,
    around: Callable[[AsyncGenerator[bytes, None]], AsyncGenerator[bytes, None]] | None = None,
) -> StreamSession:
    """A session that goes on without its client. `around` wraps the events of one that ends only by itself."""
    if not name or len(name) > 256 or not name.isprintable():
        raise InvalidRequest(f"{CONVERSATION} must be 1 to 256 printable characters")
    context, place = request.app[CONTEXT], (client_key(request), name)
    session = context.sessions.open(place, lasting=around is not None)
    try:
        requests, user = await _prepared(request, reply)
        stream = await context.service.submit(requests, user, _delivery(reply))
    except BaseException:
        if context.sessions.find(place) is session:
            context.sessions.drop(place)
        raise

    lines = _stream_data(request, stream, reply)
    session.begin(stream, lines if around is None else around(lines), reply.params.sse_ping_interval)
    return session


async def _stream_data(request: web.Request, stream: Stream, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a stream."""
    record = request[RECORD]
    with _running(request, stream, reply):
        try:
            while events := await stream.batch():
                record.take(events)
                if _is_heavy(reply, events):
                    data = await compute(partial(_events_data, reply, events), client_of(request))
                else:
                    data = _events_data(reply, events)
                failed = next((event for _, event in events if isinstance(event, Failed)), None)
                if failed is not None:
                    data += reply.failed(failure(failed))
                if data:
                    yield data
                if failed is not None:
                    return
            yield reply.ending()
        except Exception as error:  # the reply has begun: the error can only be told in it
            log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG))
            yield reply.failed(ServerFault("internal error"))


async def send(
    request: web.Request, data: AsyncGenerator[bytes, None], ping_interval: int, content_type: str = EVENTS
) -> web.StreamResponse:
    """Send a stream as it comes."""
    response = web.StreamResponse(headers={"Content-Type": content_type, **_HEADERS})
    async with aclosing(data):
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        writer = _Writer(response)
        attendant = asyncio.create_task(_attend(request, writer, ping_interval, request.app[CONTEXT].config.timeout))
        try:
            async for piece in data:
                await writer.write(piece)
            await response.write_eof()
        except ConnectionError:
            log.debug("the client of %s went away", request.rel_url.raw_path)
            if request.transport is not None:  # it is too slow for the buffer: let it know
                request.transport.abort()
        finally:
            attendant.cancel()
    return response


class _Writer:
    """Writes to a stream and remembers when, so that the hot path needs no timers of its own."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self.n_writes = 0
        self.since: float | None = None  # the write in progress waits for the client since then

    async def write(self, data: bytes) -> None:
        """Send data; waits while the client does not read."""
        self.n_writes += 1
        self.since = time.monotonic()
        await self._response.write(data)
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
                await writer.write(b":\n\n")
        n_writes = writer.n_writes


def _is_heavy(reply: Reply, events: list[tuple[int, Event]]) -> bool:
    """True if the log-probabilities of these events take long to write."""
    if reply.job.top is None:
        return False
    if reply.keeps_logprobs and any(isinstance(event, Finished) for _, event in events):
        return True
    of_prompt = any(isinstance(event, Token) and event.prompt_probs for _, event in events)
    return of_prompt or sum([event_weight(event) for _, event in events]) > HEAVY


def _events_data(reply: Reply, events: list[tuple[int, Event]]) -> bytes:
    return b"".join([_event_data(reply, index, event) for index, event in events])


def _event_data(reply: Reply, index: int, event: Event) -> bytes:
    result = reply.results[index]
    if isinstance(event, Token):
        return reply.token(result, event)
    if isinstance(event, Finished):
        return reply.finish(result, event)
    if isinstance(event, Progress):
        return reply.progress(result, event)
    return b""
