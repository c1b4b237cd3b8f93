"""Body decompression (Content-Encoding: gzip, deflate), bounded in size.

aiohttp by itself decompresses a body as it arrives: on the event loop, before the key is judged,
and even if no handler reads it. Connections here keep bodies as they come (RAW_BODIES). A handler
that reads a body, which it does after its key was judged, asks for the body's `content`."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, Final

from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol

from logitless.engine.errors import InvalidRequest, TooLarge, UnsupportedEncoding

RAW_BODIES: Final[dict[str, Any]] = {"auto_decompress": False}  # a setting of aiohttp's connections
PIECE = 1 << 18  # bytes that are unpacked at once
_WINDOW = 1 << 12  # compressed bytes that zlib gets at once; it copies the bytes that it does not need yet
_GZIP, _ZLIB, _DEFLATE = 31, 15, -15  # zlib's wbits
_MEMBERS = 1 << 14  # of a gzip body: beginning one takes time, and it may be empty
_CODINGS = {"gzip": (_GZIP, _MEMBERS), "x-gzip": (_GZIP, _MEMBERS), "deflate": (_ZLIB, 1)}


def content(request: web.Request, limit: int) -> StreamReader:
    """The request's body, decompressed; a body without Content-Encoding is the stream as it is.

    UnsupportedEncoding: neither gzip nor deflate. Reading a decompressed body raises TooLarge
    beyond `limit` bytes, and InvalidRequest if it is not of the header's encoding."""
    items = ",".join(request.headers.getall("Content-Encoding", ()))
    codings = [name for part in items.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not codings:
        return request.content
    if len(codings) > 1 or codings[0] not in _CODINGS:
        raise UnsupportedEncoding(f"header 'Content-Encoding': must be gzip or deflate, not {items[:64]!r}")
    return Unpacked(request.content, codings[0], limit)


class Inflate:
    """A zlib stream, or the members of a gzip file, in pieces of PIECE bytes."""

    def __init__(self, coding: str) -> None:
        self._wbits, self._n_left = _CODINGS[coding]
        self._stream: Any = None  # zlib's object; None between two members
        self._raw, self._window = memoryview(b""), b""  # not unpacked yet
        self._full = False  # zlib may hold bytes for which the last piece had no room

    @property
    def hungry(self) -> bool:
        """All that was fed is unpacked."""
        return not (self._window or self._raw or self._full)

    @property
    def complete(self) -> bool:
        """No member has begun that has not ended."""
        return self._stream is None

    def feed(self, raw: bytes) -> None:
        """The next part of the body, when `hungry`."""
        self._raw = memoryview(raw)

    def piece(self) -> bytes:
        """The next PIECE bytes, or less when `hungry`. zlib.error: garbage, or too many members."""
        out = bytearray()
        while not self.hungry and (room := PIECE - len(out)):
            if not self._window:
                self._window, self._raw = bytes(self._raw[:_WINDOW]), self._raw[_WINDOW:]
            if self._stream is None:
                self._stream = self._begin()
            unpacked = self._stream.decompress(self._window, room)
            out += unpacked
            if self._stream.eof:
                self._window, self._stream, self._full = self._stream.unused_data, None, False
            else:
                self._window, self._full = self._stream.unconsumed_tail, len(unpacked) == room
        return bytes(out)

    def _begin(self) -> Any:
        """A `deflate` body may lack zlib's header, whose first byte has 8 in its low half."""
        if not self._n_left:
            raise zlib.error("more behind the end")
        self._n_left -= 1
        bare = self._wbits == _ZLIB and self._window[0] & 15 != 8
        return zlib.decompressobj(_DEFLATE if bare else self._wbits)


class Unpacked(StreamReader):
    """A stream's decompressed content. A thread beside the event loop decompresses the next piece
    when the last one has been read."""

    def __init__(self, packed: StreamReader, coding: str, limit: int) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(BaseProtocol(loop), PIECE, loop=loop)  # its own: only `packed` may pause the connection
        self._packed, self._coding, self._limit = packed, coding, limit
        self._inflate = Inflate(coding)

    async def _wait(self, func_name: str) -> None:
        """StreamReader's, called when nothing is left to read: adds a piece, or the end."""
        piece = b""
        while not piece:
            if self._inflate.hungry:
                raw = await self._packed.read(PIECE)
                if not raw:
                    return self._end()
                self._inflate.feed(raw)
            try:
                piece = await asyncio.to_thread(self._inflate.piece)
            except zlib.error:
                raise self._broken() from None
            if max(self._packed.total_bytes, self.total_bytes + len(piece)) > self._limit:
                raise TooLarge(f"the request is larger than {self._limit} bytes")
        self.feed_data(piece)
        return None

    def _end(self) -> None:
        if not self._inflate.complete:
            raise self._broken()
        self.feed_eof()

    def _broken(self) -> InvalidRequest:
        return InvalidRequest(f"the body is not {self._coding}, as the header 'Content-Encoding' says")
