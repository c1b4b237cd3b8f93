"""ASGI application: the server's routes in an ASGI host (uvicorn, hypercorn, Starlette, Ray Serve).

It runs in the host's process and on its event loop; routes, guards and handlers are the aiohttp
application's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, NoReturn, cast
from urllib.parse import quote

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from logitless.server.api.context import error_response
from logitless.server.clients import LOCAL_CLIENT, HttpClient
from logitless.server.listen import LONGEST_URL, LongURL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BUFFER = 1 << 16  # bytes of a body that wait for the handler, before the host has to wait
_OF_THE_CONNECTION = frozenset(("connection", "date", "keep-alive", "transfer-encoding"))  # the host writes these


class ASGIApp:
    """The application of one model. `start` and `stop` belong to the host's lifespan: `start` raises
    an error of one line if there is nothing to serve."""

    def __init__(
        self, app: web.Application, start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
    ) -> None:
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None)
        self._start, self._stop = start, stop
        self._starting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI 3. Hosts without a lifespan start the application by their first request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._started()
            assert self._runner.server is not None
            await _Exchange(self._runner.server, scope, receive, send).run()
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003, "reason": "this server has no websockets"})
        else:
            raise NotImplementedError(f"ASGI scope {scope['type']!r}")

    async def close(self) -> None:
        """Stop; for hosts without a lifespan."""
        if self._starting is not None:
            self._starting = None
            await self._stop()
            await self._runner.cleanup()

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            try:
                await (self._started() if message["type"] == "lifespan.startup" else self.close())
            except Exception as error:
                await send({"type": f"{message['type']}.failed", "message": str(error)})
                return
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _started(self) -> None:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._setup())
        await asyncio.shield(self._starting)

    async def _setup(self) -> None:
        await self._start()
        await self._runner.setup()


async def call(server: web.Server, path: str, body: bytes, client: HttpClient, request_id: str) -> tuple[int, bytes]:
    """(status, body) of the answer to a POST of JSON, in this process and for this client, without a connection."""
    head, pieces, arrived = 0, bytearray(), [True]

    async def receive() -> Message:
        if arrived:
            arrived.clear()
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.get_running_loop().create_future()  # it never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal head
        head = message.get("status", head)
        pieces.extend(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [(b"content-length", str(len(body)).encode()), (b"x-request-id", request_id.encode())]
    scope = {"method": "POST", "path": path, "headers": headers, LOCAL_CLIENT: client}
    await _Exchange(server, scope, receive, send).run()
    return head, bytes(pieces)


class _Connection(asyncio.Transport):
    """The host's connection as handlers see it: its addresses, and `abort`."""

    def __init__(self, scope: Message, abort: Callable[[], object]) -> None:
        names = {"peername": scope.get("client"), "sockname": _address(scope.get("server"))}
        names[LOCAL_CLIENT] = scope.get(LOCAL_CLIENT)
        super().__init__({**names, "sslcontext": scope.get("scheme") == "https" or None})
        self._abort, self._closing = abort, False

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        """End the exchange; unsent data are lost."""
        self._closing = True
        self._abort()

    close = abort

    @property
    def _sendfile_compatible(self) -> NoReturn:
        raise NotImplementedError  # asyncio asks for it; aiohttp then writes files in pieces


def _address(lines: Sequence[Any] | None) -> tuple[str, int] | str:
    """The server's end of a connection as asyncio tells it. A host that tells none counts as a Unix socket, over
    which web pages are judged."""
    host, port = lines or ("", None)
    return host if port is None else (host, port)


class _Flow(BaseProtocol):
    """Flow control of a body: `reading` is set while its stream wants more."""

    def __init__(self, connection: _Connection) -> None:
        super().__init__(asyncio.get_running_loop())
        self.transport = connection
        self.reading = asyncio.Event()
        self.reading.set()

    def pause_reading(self) -> None:
        self._reading_paused = True
        self.reading.clear()

    def resume_reading(self, *_: bool, **__: bool) -> None:
        self._reading_paused = False
        self.reading.set()


class _Writer(AbstractStreamWriter):
    """A response as the messages of ASGI."""

    def __init__(self, send: Send, connection: _Connection) -> None:
        self._send, self._connection = send, connection
        self._begun = self._ended = False

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        if self._begun:
            raise ConnectionError("the response has begun already")
        self._begun = True
        pairs = [
            (name.lower().encode("ascii"), value.encode("utf-8", "surrogateescape"))
            for name, value in headers.items()
            if name.lower() not in _OF_THE_CONNECTION
        ]
        await self._put({"type": "http.response.start", "status": int(status_line.split()[1]), "headers": pairs})

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        if chunk:
            await self._body(bytes(chunk), more=True)

    async def write_eof(self, chunk: bytes = b"") -> None:
        if not self._ended:
            self._ended = True
            await self._body(bytes(chunk), more=False)

    async def drain(self) -> None:
        """No-op: `write` waits for the host."""

    def enable_chunking(self) -> None:
        """No-op: the host frames the body."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> NoReturn:
        raise NotImplementedError("responses are not compressed here")

    async def _body(self, body: bytes, *, more: bool) -> None:
        self.output_size += len(body)
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _put(self, message: Message) -> None:
        if self._connection.is_closing():
            raise ConnectionResetError("the client has left")
        await self._send(message)


class _Exchange:
    """One request and its response."""

    def __init__(self, server: web.Server, scope: Message, receive: Receive, send: Send) -> None:
        self._server, self._scope, self._receive = server, scope, receive
        self._connection = _Connection(scope, self._cancel)
        self._writer = _Writer(send, self._connection)
        self._handling: asyncio.Task[None] | None = None
        self._protocol = server()  # tells the addresses; it parses nothing here
        self._protocol.transport = self._connection
        self._flow = _Flow(self._connection)
        self._content = StreamReader(self._flow, BUFFER, loop=asyncio.get_running_loop())

    async def run(self) -> None:
        """Answer; a client that leaves cancels its handler."""
        names = {name for name, _ in self._scope["headers"]}
        if not names & {b"content-length", b"transfer-encoding"} and not self._feed(await self._receive()):
            return
        self._handling = asyncio.create_task(self._respond())
        reading = asyncio.create_task(self._read())
        try:
            await self._handling
        except asyncio.CancelledError:
            if not self._connection.is_closing():
                raise  # the host cancels, not the client
        except ConnectionError:
            pass
        finally:
            self._handling.cancel()
            reading.cancel()
            self._protocol.transport = None

    async def _respond(self) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        factory = self._server.request_factory
        request = factory(self._message(), self._content, self._protocol, self._writer, task)
        response: web.StreamResponse
        if len(self._scope["path"]) > LONGEST_URL:
            response = error_response(LongURL(f"the URL is longer than {LONGEST_URL} bytes"), request)
        else:
            try:
                response = await self._server.request_handler(request)
            except web.HTTPException as other:
                response = other
        await response.prepare(request)
        await response.write_eof()

    def _message(self) -> RawRequestMessage:
        scope = self._scope
        raw = tuple((bytes(name), bytes(value)) for name, value in scope["headers"] if name != b"expect")
        headers = CIMultiDict((n.decode("latin-1"), v.decode("utf-8", "surrogateescape")) for n, v in raw)
        chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        url = _url(scope)
        return RawRequestMessage(
            scope["method"], str(url), HttpVersion11, CIMultiDictProxy(headers), raw, False, None, False, chunked, url
        )

    async def _read(self) -> None:
        """Feed the body to its stream, then wait until the client leaves."""
        while self._feed(await self._receive()):
            await self._flow.reading.wait()
        if not self._content.is_eof():
            self._content.set_exception(ConnectionResetError("the client has left"))
        self._connection.abort()

    def _feed(self, message: Message) -> bool:
        """Take a part of the body; False: the client has left."""
        if message["type"] != "http.request":
            return False
        if not self._content.is_eof():
            self._content.feed_data(message.get("body", b""))
            if not message.get("more_body", False):
                self._content.feed_eof()
        return True

    def _cancel(self) -> None:
        if self._handling is not None:
            self._handling.cancel()


def _url(scope: Message) -> URL:
    """Path and query below the host's `root_path`, escaped as the client sent them where the host tells."""
    root = scope.get("root_path", "").rstrip("/")
    raw = scope.get("raw_path")
    path = quote(scope["path"]) if raw is None else raw.decode("latin-1").partition("?")[0]
    if root and path.startswith(f"{quote(root)}/"):
        path = path[len(quote(root)) :]
    return URL.build(path=path, query_string=scope.get("query_string", b"").decode("latin-1"), encoded=True)
