"""Body reader: bounded in bytes and time, within memory that all bodies share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final, TypeVar

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from logitless.engine.errors import InvalidRequest, RequestError, TooLarge, Unavailable
from logitless.server.bodies.unpack import content

T = TypeVar("T")
SMALL: Final = 1 << 16  # bytes of a body that always has room
SHARE: Final = 4  # of the largest bodies have room together
STRIDE, STRIDE_SECONDS = 1 << 17, 30.0  # so many bytes of a body have so many seconds to arrive


class RequestTimeout(RequestError):
    """408: the client did not send its request in time."""

    code = 408


class Bodies:
    """Room for the bodies that arrive, wait to be parsed or are passed on. A client has as much as is
    free beside its own: half of the room if it is alone, a third if another one takes as much."""

    def __init__(self, largest: int, timeout: float) -> None:
        """`largest`: bytes of one body; `timeout`: seconds of all of it to arrive."""
        self._largest, self._timeout = largest, timeout
        self._free = SHARE * largest
        self._taken: Counter[str] = Counter()  # by client

    def read(self, request: web.Request, client: str) -> AbstractAsyncContextManager[bytearray]:
        """The request's body, unpacked; it has its room while the block runs. Or 400, 408, 413, 415, 503."""
        return _Reading(self, request, client)

    async def fill(self, body: bytearray, request: web.Request, client: str) -> None:
        """Read the request's body into `body`, which takes room."""
        if (request.content_length or 0) > self._largest:
            raise self._too_large()
        stream = request.content
        if "Content-Encoding" in request.headers:
            stream = content(request, self._largest)
        if stream.is_eof() and stream.total_bytes <= min(SMALL, self._largest):  # it came with the request's head
            while not stream.at_eof():
                body += stream.read_nowait()
            self._take(client, len(body))
        else:
            await in_time(self._fill(body, stream, client), self._timeout)

    def leave(self, n: int, client: str) -> None:
        """Give the room of n bytes back."""
        self._take(client, -n)

    async def _fill(self, body: bytearray, stream: StreamReader, client: str) -> None:
        while await in_time(self._fill_stride(body, stream, client), STRIDE_SECONDS):
            pass

    async def _fill_stride(self, body: bytearray, stream: StreamReader, client: str) -> bool:
        """The next STRIDE bytes; False if the body has ended."""
        end = len(body) + STRIDE
        while len(body) < end:
            piece = await stream.readany()
            if not piece:
                return False
            n = len(body) + len(piece)
            if n > self._largest:
                raise self._too_large()
            if n > SMALL:
                self._judge(client, len(piece))
            self._take(client, len(piece))
            body += piece
        return True

    @contextmanager
    def more(self, client: str) -> Iterator[Callable[[int], None]]:
        """Room for what a request names, while the block runs: the function takes so many bytes of
        it, or raises 503."""
        n = 0

        def take(nbytes: int) -> None:
            nonlocal n
            self._judge(client, nbytes)
            self._take(client, nbytes)
            n += nbytes

        try:
            yield take
        finally:
            self._take(client, -n)

    def _judge(self, client: str, nbytes: int) -> None:
        if self._taken[client] + nbytes > self._free:
            raise Unavailable("too many large requests arrive at once")

    def _take(self, client: str, nbytes: int) -> None:
        self._free -= nbytes
        self._taken[client] += nbytes
        if not self._taken[client]:
            del self._taken[client]

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the request is larger than {self._largest} bytes")


class _Reading:
    """Context manager of Bodies.read; contextlib's would take longer than the reading."""

    __slots__ = ("_bodies", "_body", "_client", "_n", "_request")

    def __init__(self, bodies: Bodies, request: web.Request, client: str) -> None:
        self._bodies, self._request, self._client, self._body, self._n = bodies, request, client, bytearray(), 0

    async def __aenter__(self) -> bytearray:
        try:
            await self._bodies.fill(self._body, self._request, self._client)
        except BaseException as error:
            self._bodies.leave(len(self._body), self._client)
            if isinstance(error, web.RequestPayloadError | HttpProcessingError):  # garbage where chunks are promised
                reason = "the body does not have the form that the request's headers promise"
                raise InvalidRequest(reason) from None
            raise
        self._n = len(self._body)  # who has read it may clear it
        return self._body

    async def __aexit__(self, *_: object) -> None:
        self._bodies.leave(self._n, self._client)


async def in_time(arriving: Awaitable[T], seconds: float) -> T:
    """The client's body; 408 where it takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await arriving
    except TimeoutError:
        raise RequestTimeout("the request did not arrive in time") from None


BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)
