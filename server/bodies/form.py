"""Multipart forms: the fields of a body that has arrived, by their names."""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from logitless.engine.errors import InvalidRequest

FORM: Final = "multipart/form-data"
MAX_PARTS: Final = 100
MAX_TEXT: Final = 1 << 16  # bytes of a field that is no file
MAX_HEAD: Final = 1 << 13  # bytes of a part's headers
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'content-disposition:[^\r\n]*?;[ \t]*name=(?:"([^"\r\n]*)"|([^\s;"]+))', re.IGNORECASE)
_LINE = re.compile(rb"[ \t]*\r\n")


def is_form(request: web.BaseRequest) -> bool:
    return request.content_type == FORM


def form_fields(content_type: str, body: bytes | bytearray) -> dict[str, bytes]:
    """The contents of a form's parts by name, the last of each name. InvalidRequest: the body is no form.

    `content_type`: the header with the boundary.
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise _broken("its header has no boundary")
    mark = b"--" + (boundary[1] or boundary[2]).encode("utf-8", "replace")
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
        name = _NAME.search(body, line.end(), end)
        start, at = end + 4, _next(body, mark, end + 2)
        if name is not None:
            fields[(name[1] or name[2] or b"").decode("utf-8", "replace")] = bytes(body[start : at - 2])
    raise _broken(f"it has more than {MAX_PARTS} parts")


def form_texts(content_type: str, body: bytes | bytearray) -> dict[str, str]:
    """The parts of a form that are short texts."""
    fields = form_fields(content_type, body)
    return {name: raw.decode("utf-8", "replace") for name, raw in fields.items() if len(raw) <= MAX_TEXT}


def _next(body: bytes | bytearray, mark: bytes, start: int) -> int:
    """The place of the next boundary at the begin of a line."""
    at = body.find(b"\r\n" + mark, start)
    if at < 0:
        raise _broken("it does not end with its boundary")
    return at + 2


def _broken(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a multipart form: {reason}")
