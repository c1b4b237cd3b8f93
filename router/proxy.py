"""Proxy of the router: passes a request to a child and streams its answer back."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import time
from contextlib import suppress

import aiohttp
from aiohttp import web
from yarl import URL

from logitless.engine.errors import BadGateway, RequestError
from logitless.frontend.replies.encoding import error_object, sse
from logitless.router.process import ServerProcess
from logitless.server.api.context import CLIENT_ADDRESS, CLIENT_KEY, KEY_HEADERS, api_key
from logitless.server.api.generate import CONVERSATION
from logitless.server.bodies.room import SMALL
from logitless.server.clients import CLIENT, OWNER, RIGHTS, SALT, HttpClient
from logitless.server.observing.record import RECORD, REQUEST_ID
from logitless.server.observing.tracing import TRACE

log = logging.getLogger("logitless.router")
_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "expect"),
    )
)
_TRACE = ("traceparent", "tracestate")
_OURS = frozenset(
    (
        *("authorization", *(name.lower() for name in KEY_HEADERS), "origin", "accept-encoding", "content-encoding"),
        *(name.lower() for name in (CLIENT_KEY, CLIENT_ADDRESS, OWNER, RIGHTS, SALT, REQUEST_ID)),
    )
)
NOT_BACK = frozenset((*_HOP, "server", "date", "vary", REQUEST_ID.lower(), "request-id"))
# nor CORS headers, which are the router's
OUTLIVES: web.RequestKey[str] = web.RequestKey("outlives", str)  # name of the stream that goes on without its client
POLL = 1.0  # seconds between two looks at a stream without a reader
LOST = "the model's server ended while it answered; ask again and it is started again"


ENDING = 1.0  # seconds within which a connection breaks whose child was ending when it got the request
_ONCE = ("/v1/fine_tuning/", "/v1/batches", "/v1/messages/batches", "/tools", "/cors-proxy")  # may leave a trace


class Unconnected(BadGateway):
    """The child no longer listens: it has not seen the request, or was ending when it came."""


async def ask(
    session: aiohttp.ClientSession, request: web.Request, child: ServerProcess, path: str, body: bytes | bytearray
) -> aiohttp.ClientResponse:
    """The head of the child's answer. When the client leaves, the task is cancelled, and with it the request to the
    child. BadGateway: the child is gone; Unconnected: it never got the request, or was ending."""
    began = time.monotonic()
    headers = passed_headers(request) | {"Authorization": f"Bearer {child.key}"}
    try:
        url = URL(child.url + path, encoded=True)  # unchanged: the guard did not check a normalised path
        data = io.BytesIO(body) if len(body) > SMALL else body or None  # a large one is written in pieces
        return await session.request(request.method, url, headers=headers, data=data, allow_redirects=False)
    except aiohttp.ClientConnectorError:
        raise Unconnected(LOST) from None
    except (aiohttp.ClientError, OSError) as error:
        is_early = time.monotonic() - began < ENDING and isinstance(error, aiohttp.ServerConnectionError | OSError)
        if is_early and (request.method in ("GET", "HEAD") or not path.startswith(_ONCE)):
            raise Unconnected(LOST) from None
        log.warning("a model's server did not answer: %s", type(error).__name__)
        raise BadGateway(LOST) from None


async def stream_over(session: aiohttp.ClientSession, request: web.Request, child: ServerProcess) -> None:
    """Wait for the end of a request that goes on without its client (X-Conversation-Id, or in the background)."""
    body = json.dumps({"conversation_ids": [request[OUTLIVES]]}).encode()
    with suppress(RequestError, aiohttp.ClientError, OSError, ValueError):  # the child is gone, and its streams with it
        while True:
            async with await ask(session, request, child, "/v1/streams/lookup", body) as answer:
                if answer.status != 200 or all(stream["is_done"] for stream in await answer.json()):
                    return
            await asyncio.sleep(POLL)


def passed_headers(request: web.Request) -> dict[str, str]:
    """The request's headers for a server behind this one, with those that say whom it is for."""
    gone = _HOP | _OURS
    headers = {name: value for name, value in request.headers.items() if name.lower() not in gone}
    key = api_key(request)
    headers[CLIENT_KEY] = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest() if key else ""
    headers[CLIENT_ADDRESS] = request.remote or ""
    if OUTLIVES in request:
        headers[CONVERSATION] = request[OUTLIVES]
    if RECORD in request:
        headers[REQUEST_ID] = request[RECORD].id
    if (trace := request.get(TRACE)) is not None:  # the client's go on where this server traces nothing
        headers = {name: value for name, value in headers.items() if name.lower() not in _TRACE} | trace.headers
    client: HttpClient = request.get(CLIENT) or HttpClient()
    return headers | client.headers()


async def pass_back(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Stream the answer to the client."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in NOT_BACK and not name.lower().startswith("access-control-"):
            response.headers.add(name, value)
    response.content_length = answer.content_length
    await response.prepare(request)
    streams = RECORD in request and answer.content_type == "text/event-stream"
    try:
        async for piece in answer.content.iter_any():
            if streams:
                request[RECORD].answers()
            await response.write(piece)
        await response.write_eof()
    except (aiohttp.ClientError, TimeoutError):
        await _broken(request, response)
    except ConnectionError:
        log.debug("the client of %s went away", request.rel_url.raw_path)
    return response


async def _broken(request: web.Request, response: web.StreamResponse) -> None:
    """The child ended within an answer: an event stream gets an error event, others are cut off."""
    log.warning("a model's server ended in the middle of an answer")
    with suppress(ConnectionError):
        if response.content_type == "text/event-stream":
            lost: RequestError = BadGateway(LOST)
            await response.write(sse(error_object(lost)))
            await response.write_eof()
        elif request.transport is not None:
            request.transport.abort()
