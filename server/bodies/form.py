"""Multipart forms, whole or as they arrive, of few parts with short headers.

A form's parts and headers are counted, so that reading it holds up nobody."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote

from aiohttp import StreamReader, web

from logitless.engine.errors import InvalidRequest
from logitless.frontend.fields import MAX_FORM_TEXT

FORM: Final = "multipart/form-data"
MAX_PARTS: Final = 100
MAX_HEAD: Final = 1 << 13  # bytes of a part's headers, and before the first part
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_HEADER = re.compile(rb"^content-disposition:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_VALUE = re.compile(r';[ \t]*([\w*-]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_ESCAPED = re.compile(r'\\(["\\])')
_LINE = re.compile(rb"[ \t]*\r\n")


class FormPart(NamedTuple):
    """Headers of a part. `name`: None for a part without; `filename`: None for a part that is no file."""

    name: str | None
    filename: str | None


def is_form(request: web.BaseRequest) -> bool:
    return request.content_type == FORM


def form_fields(content_type: str, body: bytes | bytearray) -> dict[str, bytes]:
    """The contents of a form's parts by name, the last of each name. InvalidRequest: the body is no form.

    `content_type`: the header with the boundary."""
    mark = _boundary(content_type)
    at = 0 if body.startswith(mark) else _next(body, mark, 0)
    fields: dict[str, bytes] = {}
    for _ in range(MAX_PARTS + 1):
        at += len(mark)
        if body[at : at + 2] == b"--":
            return fields
        line = _LINE.match(body, at)
        end = body.find(b"\r\n\r\n", at, at + MAX_HEAD)
        if line is None or end < 0:
            raise _broken("a part of it has no headers")
        name = _part(bytes(body[line.end() : end])).name
        start, at = end + 4, _next(body, mark, end + 2)
        if name is not None:
            fields[name] = bytes(body[start : at - 2])
    raise _too_many()


def form_texts(content_type: str, body: bytes | bytearray) -> dict[str, str]:
    """The parts of a form that are short texts."""
    fields = form_fields(content_type, body)
    return {name: raw.decode("utf-8", "replace") for name, raw in fields.items() if len(raw) <= MAX_FORM_TEXT}


class FormParts:
    """The parts of a form that arrives. InvalidRequest of both methods: it is none."""

    def __init__(self, content_type: str, stream: StreamReader) -> None:
        """`content_type`: the header, which has the boundary."""
        self._boundary = b"\r\n" + _boundary(content_type)
        self._stream, self._ahead = stream, bytearray(b"\r\n")  # what has come; the first boundary may begin the body
        self._n = 0

    async def next(self) -> FormPart | None:
        """The next part, behind what is left of the one before; None behind the last."""
        n_skipped = 0
        while piece := await self.piece():
            n_skipped += len(piece)
            if not self._n and n_skipped > MAX_HEAD:
                raise _broken(f"its first boundary is not within {MAX_HEAD} bytes")
        del self._ahead[: len(self._boundary)]
        while len(self._ahead) < 2:
            await self._more()
        if self._ahead.startswith(b"--"):
            return None
        if self._n == MAX_PARTS:
            raise _too_many()
        self._n += 1
        while (end := self._ahead.find(b"\r\n\r\n", 0, MAX_HEAD)) < 0 and len(self._ahead) < MAX_HEAD:
            await self._more()
        line = _LINE.match(self._ahead)
        if line is None or end < 0:
            raise _broken("a part of it has no headers")
        part = _part(bytes(self._ahead[line.end() : end]))
        del self._ahead[: end + 2]
        while len(self._ahead) < len(self._boundary):
            await self._more()
        if not self._ahead.startswith(self._boundary):  # else the part is empty: its last line break is the boundary's
            del self._ahead[:2]
        return part

    async def piece(self) -> bytes:
        """The next bytes of the part; none at its end."""
        while (end := self._ahead.find(self._boundary)) < 0:
            end = len(self._ahead) - len(self._boundary) + 1
            if end > 0:
                break
            await self._more()
        piece = bytes(self._ahead[:end])
        del self._ahead[:end]
        return piece

    async def _more(self) -> None:
        data = await self._stream.readany()
        if not data:
            raise _broken("it does not end with its boundary")
        self._ahead += data


def _boundary(content_type: str) -> bytes:
    """The boundary's line without what ends it."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise _broken("its header has no boundary")
    return b"--" + (boundary[1] or boundary[2]).encode("utf-8", "replace")


def _part(head: bytes) -> FormPart:
    """Parse the headers of a part."""
    header = _HEADER.search(head)
    values: dict[str, str] = {}
    for value in _VALUE.finditer(header[1].decode("utf-8", "replace")) if header is not None else ():
        text = value[3] if value[2] is None else _ESCAPED.sub(r"\1", value[2])
        values.setdefault(value[1].lower(), text)
    _, _, encoded = values.get("filename*", "").partition("''")
    return FormPart(values.get("name"), unquote(encoded) or values.get("filename"))


def _next(body: bytes | bytearray, mark: bytes, start: int) -> int:
    """The place of the next boundary at the begin of a line."""
    at = body.find(b"\r\n" + mark, start)
    if at < 0:
        raise _broken("it does not end with its boundary")
    return at + 2


def _too_many() -> InvalidRequest:
    return _broken(f"it has more than {MAX_PARTS} parts")


def _broken(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a multipart form: {reason}")
