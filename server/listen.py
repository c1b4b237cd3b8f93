"""HTTP listener: answers requests on the configured addresses until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from logitless.engine.errors import InvalidRequest, RequestError, ServerFault
from logitless.server.api.context import error_response
from logitless.server.bodies.unpack import RAW_BODIES
from logitless.server.config import ServerConfig
from logitless.server.observing.record import log_refused
from logitless.server.slashes import canonical
from logitless.server.sockets import BACKLOG, address, bind, close, remove_files

log = logging.getLogger("logitless.http")
HEAD_BYTES = 100  # of a request, whose path tells the shape of errors
LONGEST_URL = 8192  # bytes; not aiohttp's limit of headers, which raises the same error
IDLE_SECONDS = 75.0  # a connection may wait for a request, or for the rest of its head
QUIET_SECONDS = 1.0  # between two lines that tell that no connection can be accepted
END_SECONDS = 12.0  # of an orderly end after a signal; a router waits for its children
LINGER_BYTES, LINGER_SECONDS = 64 << 20, 5.0  # bounds of draining a body after the answer


_METHODS = (b"POST /", b"GET /", b"DELETE /", b"HEAD /", b"OPTIONS /", b"PUT /", b"PATCH /")
_PATH = re.compile(rb"[A-Z]+ (/[!-\x22\x24-\x3e@-~]*)")  # without a query


class ExpectationFailed(RequestError):
    """417: the client waits for more than a server can promise."""

    code = 417


class LongHeader(RequestError):
    """431: a header is longer than aiohttp takes, or there are too many."""

    code = 431


class LongURL(RequestError):
    """414: the URL is longer than LONGEST_URL."""

    code = 414


class Protocol(web.RequestHandler):
    """aiohttp's connection. Requests that aiohttp refuses before a middleware sees them get error
    objects, and the rest of a body is drained within bounds after the answer."""

    __slots__ = ("_head",)

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, logger: logging.Logger) -> None:
        super().__init__(
            manager,
            loop=loop,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # none
            lingering_time=0,  # `_linger` does
            keepalive_timeout=IDLE_SECONDS,
            max_line_size=LONGEST_URL,
            **RAW_BODIES,
        )
        self._head = b""  # the beginning of the last request

    def data_received(self, data: bytes) -> None:
        if data.startswith(_METHODS):
            self._head = data[:HEAD_BYTES]
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and refuses where an answer has begun
        log_refused(status)
        if request.method == "UNKNOWN" and (path := _PATH.match(self._head)):  # aiohttp's, of what it cannot read
            request = request.clone(rel_url=canonical(path[1].decode()))  # whose error it is
        response = error_response(_refusal(status, exc, message), request)
        response.headers["Server"] = "logitless"
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):
            log_refused(ExpectationFailed.code)
            resp = error_response(ExpectationFailed("header 'Expect': can only be 100-continue"), request)
        body = request.content
        if not body.is_eof() and ("Upgrade" in request.headers or (request.content_length or 0) > LINGER_BYTES):
            resp.force_close()  # aiohttp's parser stops for an upgrade, or the drain will not do
        resp, gone = await super().finish_response(request, resp, start_time)
        if not gone and not body.is_eof():
            await _linger(body)
        return resp, gone


def _refusal(status: int, error: BaseException | None, message: str | None) -> RequestError:
    """The error of a request that aiohttp's parser refuses, or whose handler has failed."""
    if isinstance(error, LineTooLong) and str(error.args[1]) == str(LONGEST_URL):
        return LongURL(f"the URL is longer than {LONGEST_URL} bytes")
    if isinstance(error, LineTooLong):
        return LongHeader("a header is longer than 8190 bytes")
    if status < 500:
        reason = " ".join((message or "").split())[:200].removesuffix(":")
        return InvalidRequest(f"this is no HTTP request: {reason}")
    return ServerFault("internal error")


async def _linger(body: StreamReader) -> None:
    """Drain the body of an answered request, as raw bytes. A client that still sends would get a
    reset instead of the answer if the connection closed at once. The caller closes it if the body
    has not ended within LINGER_BYTES and LINGER_SECONDS."""
    n = 0
    with suppress(OSError, RuntimeError, web.RequestPayloadError, HttpProcessingError):  # late, gone, or broken
        async with asyncio.timeout(LINGER_SECONDS):
            while not body.is_eof() and n < LINGER_BYTES:
                n += len(await body.readany())


@contextmanager
def _telling_of_full_tables(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """One line a second where the process has no file descriptors left. asyncio would log a traceback
    for each connection that waits, again and again."""
    before, told_at = loop.get_exception_handler(), -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        if context.get("message") == "socket.accept() out of system resource":
            if loop.time() - told_at >= QUIET_SECONDS:
                told_at = loop.time()
                log.warning("no connection can be accepted: %s", context["exception"].strerror)
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)


# what is ended together with the model's work: running calls of tools
ENDINGS: web.AppKey[list[Callable[[], Awaitable[None]]]] = web.AppKey("endings")


@asynccontextmanager
async def accepting(
    app: web.Application, config: ServerConfig, stop: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[list[socket.socket]]:
    """Answer requests while the block runs; gives the listening sockets.

    `stop` is awaited when no new connection is accepted any more, before the open ones are closed.
    Raises OSError if an address cannot be bound."""
    protocol = log.getChild("protocol")
    protocol.setLevel(logging.CRITICAL)  # it would quote malformed requests, which may have a prompt
    runner = web.AppRunner(app, handler_cancellation=True, handle_signals=False, shutdown_timeout=0.5)
    await runner.setup()
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    connection = partial(Protocol, server, loop=loop, logger=protocol)
    telling = ExitStack()
    telling.enter_context(_telling_of_full_tables(loop))
    bound: list[socket.socket] = []
    servers: list[asyncio.Server] = []
    try:
        bound = bind(config.host, config.port, reuse_port=config.reuse_port)
        for sock in bound:
            create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            servers.append(await create(connection, sock=sock, ssl=config.tls, backlog=BACKLOG))
        yield bound
    finally:
        remove_files(bound)
        for listening in servers:
            listening.close()
        close(bound)
        await asyncio.gather(*(end() for end in (*([] if stop is None else [stop]), *app.get(ENDINGS, ()))))
        await runner.cleanup()
        telling.close()


async def listen(
    app: web.Application,
    config: ServerConfig,
    running: Callable[[str], Coroutine[Any, Any, None]],
    stop: Callable[[], Awaitable[None]],
) -> None:
    """Answer requests until SIGTERM or SIGINT, or until `running(address)` ends, whose error is raised then.

    `stop`: see `accepting`."""
    signalled = asyncio.Event()
    stopping = asyncio.create_task(signalled.wait())
    ending: asyncio.Task[None] | None = None
    try:
        with _signals(signalled.set, partial(reload, config)):
            async with accepting(app, config, stop) as sockets:
                where = ", ".join(address(sock, tls=config.tls is not None) for sock in sockets)
                log.info("listening on %s", where, extra={"fields": {"address": where}})
                ending = asyncio.create_task(running(where))
                await asyncio.wait([stopping, ending], return_when=asyncio.FIRST_COMPLETED)
                if ending.done():
                    ending.result()
                log.info("shutting down")
    finally:
        for task in filter(None, (stopping, ending)):
            task.cancel()


@contextmanager
def _signals(stop: Callable[[], object], hang_up: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop` on the event loop, SIGHUP calls `hang_up`, while the block runs.

    A thread reads them from a socket of its own: asyncio's is full while its loop is behind, and then
    loses signals. A second signal ends the process at once, and so does the thread when the block
    has not ended END_SECONDS after the first. In a thread other than the main one there are none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    ours, wakeup = socket.socketpair()
    wakeup.setblocking(False)

    def read() -> None:
        with ours:
            while arrived := ours.recv(64):
                for number in arrived:
                    if number not in numbers:
                        continue  # a signal of somebody else
                    if number not in numbers[:2]:
                        loop.call_soon_threadsafe(hang_up)
                    elif ours.gettimeout() is not None:
                        log.warning("ended by a second signal")
                        os._exit(128 + number)
                    else:
                        ours.settimeout(END_SECONDS)
                        loop.call_soon_threadsafe(stop)

    def watch() -> None:
        try:
            with suppress(RuntimeError):  # the loop is closed
                read()
        except TimeoutError:
            log.error("the server did not end within %g seconds: ended by force", END_SECONDS)
            os._exit(1)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    other = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        current = signal.set_wakeup_fd(-1)
        with suppress(OSError, ValueError):  # of another server, which has ended
            signal.set_wakeup_fd(other if current == wakeup.fileno() else current)
        wakeup.close()


def reload(config: ServerConfig) -> None:
    """Read the certificate and its key again, for new connections. The old ones stay where they are no pair."""
    if config.tls is None or not all(config.tls_files):
        log.info("SIGHUP: no certificate to read again; a key file is read whenever it changes")
        return
    certificate, key = config.tls_files
    try:
        type(config.tls)(config.tls.protocol).load_cert_chain(certificate, key, password="")
        config.tls.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        log.warning("SIGHUP: the certificate stays as it was: %s: %s", certificate, reason)
    else:
        log.info("SIGHUP: the certificate was read again")
