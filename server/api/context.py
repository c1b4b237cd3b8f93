"""Request context of handlers: service, settings, body reading, JSON replies."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from logitless.engine.async_engine import AsyncEngine, LoadedModel
from logitless.engine.errors import InvalidRequest, RequestError, Unavailable, UnsupportedEncoding
from logitless.engine.stats import SchedulerStats
from logitless.engine.stream import Stream
from logitless.server.api.llamacpp.sessions import Sessions
from logitless.server.api.openai.stored_responses import StoredResponses
from logitless.server.auth import Keys
from logitless.server.config import ServerConfig
from logitless.server.protocol.completions import RequestParser
from logitless.server.protocol.fields import json_object
from logitless.server.slashes import canonical
from logitless.server.unpack import content

T = TypeVar("T")
_LARGE = 1 << 12  # bytes of a body whose parsing (tokenizing, mostly) would hold up the streams of others
# Words of bodies that may compile a grammar, or render a chat template in another process.
_SLOW = (b"grammar", b"schema", b"response_format", b"tools", b"\\u", b"messages", b"input")

KEY_HEADERS = ("X-Api-Key", "Api-Key")  # beside Authorization
CLIENT_KEY, CLIENT_ADDRESS = "X-Logitless-Key", "X-Logitless-Address"  # what a router says about its clients

STARTED = int(time.time())  # of the server, Unix time in seconds

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class RequestTimeout(RequestError):
    """408: the client did not send its request in time."""

    code = 408


class Context:
    """The application's state: one per server."""

    def __init__(self, service: AsyncEngine, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.keys = Keys(config.api_keys, config.api_key_file)
        self._parser: RequestParser | None = None
        self.sessions = Sessions()
        self.stored = StoredResponses()
        self.last_metrics = SchedulerStats()  # as /metrics told them last
        self.running: dict[str, tuple[str, Stream]] = {}  # (key, job that generates) by the id of its reply

    @property
    def served(self) -> LoadedModel:
        """The loaded model, or 503."""
        if self.service.served is None:
            raise Unavailable("Loading model")
        return self.service.served

    @property
    def writer(self) -> LoadedModel:
        """The loaded model, or 400 if it does not write."""
        if not self.served.info.generates:
            raise InvalidRequest("this model makes vectors of texts (POST /v1/embeddings), it does not write")
        return self.served

    @property
    def parser(self) -> RequestParser:
        """The parser of requests for the loaded model."""
        if self._parser is None:
            self._parser = RequestParser(
                self.served.tokenizer, self.config, self.served.info.n_ctx, self.served.adapters, self.served.vision
            )
        return self._parser

    async def parsed(self, request: web.Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """`parse` of the request's JSON body; beside the event loop when that may take long."""
        raw = await read_body(request, self.config.timeout)
        return await offload_if_large(raw, lambda: parse(json_object(raw)))


async def offload_if_large(raw: bytes, parse: Callable[[], T]) -> T:
    """The result of `parse`, which reads this body; beside the event loop when that may take long."""
    large = len(raw) >= _LARGE or any(word in raw for word in _SLOW)
    return await to_thread(parse) if large else parse()


async def read_body(request: web.Request, seconds: float) -> bytes:
    """The request's body, unpacked; or 400, 408, 413, 415."""

    async def whole() -> bytes:
        stream = content(request, request.client_max_size)
        if stream is request.content:
            return await request.read()
        return b"".join([piece async for piece in stream.iter_any()])

    try:
        return await in_time(whole(), seconds)
    except (web.RequestPayloadError, HttpProcessingError):  # garbage where chunks are promised
        raise InvalidRequest("the body does not have the form that the request's headers promise") from None


async def in_time(arriving: Awaitable[T], seconds: float) -> T:
    """The result of what the client sends; 408 where it takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await arriving
    except TimeoutError:
        raise RequestTimeout("the request did not arrive in time") from None


async def to_thread(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread while the event loop goes on. The thread is one that the process does not
    wait for when it ends, as it would for asyncio's own: a text of 60 MB takes longer than SIGTERM may."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, raised = None, None
        try:
            result = work()
        except BaseException as error:
            raised = error
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, raised)

    threading.Thread(target=run, name="to_thread", daemon=True).start()
    return await done


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)


def api_key(request: web.Request) -> str:
    """The key that the client gives, "" if none: OpenAI's header, Anthropic's, or Azure's."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    return next((request.headers[name] for name in KEY_HEADERS if name in request.headers), "")


def client_key(request: web.Request) -> str:
    """The key of the client that owns a stream. Behind a router all requests have the router's key;
    it passes on the client's.
    """
    if request.app[CONTEXT].config.behind_router:
        return request.headers.get(CLIENT_KEY, "")
    return api_key(request)


def client_address(request: web.Request) -> str:
    """The client's address."""
    behind_router = request.app[CONTEXT].config.behind_router
    return (request.headers.get(CLIENT_ADDRESS) if behind_router else request.remote) or ""


def json_response(data: object, status: int = 200) -> web.Response:
    """`data` as JSON."""
    body = encode_json(data).encode("utf-8", "replace")
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")


def error_object(error: RequestError) -> dict[str, Any]:
    """The error as llama-server and OpenAI's API show it."""
    return {"error": {"code": error.code, "message": error.message, "type": error.type, **error.extra}}


_ANTHROPICS = {  # of our types; all others have the same name there
    "exceed_context_size_error": "invalid_request_error",
    "not_supported_error": "invalid_request_error",
    "server_error": "api_error",
    "unavailable_error": "overloaded_error",
}


def anthropics_error(error: RequestError) -> dict[str, Any]:
    """The error as Anthropic's API shows it."""
    told = error_object(error)["error"]
    return {"type": "error", "error": {**told, "type": _ANTHROPICS.get(error.type, error.type)}}


def is_anthropics(request: web.BaseRequest) -> bool:
    """True if the client is one of Anthropic's API."""
    return "anthropic-version" in request.headers or "/v1/messages" in canonical(request.path)


def error_response(error: RequestError, request: web.BaseRequest | None = None) -> web.Response:
    """A refusal of a request, in the shape that its client reads."""
    shape = anthropics_error if request is not None and is_anthropics(request) else error_object
    response = json_response(shape(error), error.code)
    if error.code == 501:  # clients of OpenAI and Anthropic repeat every other 5xx
        response.headers["x-should-retry"] = "false"
    if error.code == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UnsupportedEncoding):
        response.headers["Accept-Encoding"] = "gzip, deflate"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response
