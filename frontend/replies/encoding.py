"""Encoding of replies: JSON whole or in pieces, server-sent events, errors in the shape of each API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar, cast

from msgspec import Raw, to_builtins
from msgspec.json import Encoder, decode
from msgspec.structs import replace

from logitless.engine.errors import RequestError
from logitless.frontend.answers.errors import AnthropicError, Error, ErrorDetail, OllamaError

T = TypeVar("T")
PIECE = 1 << 18  # bytes
_PLACE = b"\0"  # of a lazy list: JSON has no such byte


class LazyList(Generic[T]):
    """A JSON array whose items are made when they are written, so that they need not fit in memory together."""

    __slots__ = ("_items",)

    def __init__(self, items: Callable[[], Iterator[T]]) -> None:
        """`items()`: the items, from the first on."""
        self._items = items

    def __iter__(self) -> Iterator[T]:
        return self._items()

    def __add__(self, rest: Iterable[T]) -> LazyList[T]:
        return LazyList(lambda: chain(self, rest))


def lazy(items: Callable[[], Iterator[T]]) -> list[T]:
    """A LazyList, as the type of an answer's field."""
    return cast("list[T]", LazyList(items))


class _Lazy(Exception):
    """The data have a LazyList."""


def _refuse_lazy(value: object) -> None:
    raise _Lazy if isinstance(value, LazyList) else TypeError(f"no JSON: {type(value).__name__}")


_encode = Encoder(enc_hook=_refuse_lazy).encode


def encode_json(data: object) -> bytes:
    """JSON of structs, dicts and plain values. NaN and infinities are null; a lone surrogate becomes "?"."""
    try:
        return _encode(data)
    except UnicodeEncodeError:
        return json.dumps(plain(data), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    except _Lazy:
        return b"".join(json_pieces(data))


def _plain(value: object) -> object:
    return decode(value) if isinstance(value, Raw) else list(cast("LazyList[object]", value))


def plain(data: object) -> Any:
    """`data` as dicts, lists and plain values."""
    return to_builtins(data, enc_hook=_plain)


def json_pieces(data: object) -> Iterator[bytes]:
    """encode_json(data) in pieces of about PIECE bytes, as far as its size lies in lists that are lazy."""
    lists: list[LazyList[Any]] = []

    def place(value: object) -> Raw:
        if not isinstance(value, LazyList):
            raise TypeError(f"no JSON: {type(value).__name__}")
        lists.append(value)
        return Raw(_PLACE)

    try:
        frame = Encoder(enc_hook=place).encode(data)
    except UnicodeEncodeError:  # of the frame
        yield encode_json(plain(data))
        return
    first, *rests = frame.split(_PLACE)
    piece = bytearray(first)
    for items, rest in zip(lists, rests, strict=True):
        between = b"["
        for item in items:
            piece += between
            between = b","
            for part in (memoryview(item),) if isinstance(item, Raw) else json_pieces(item):
                piece += part
                if len(piece) >= PIECE:
                    yield bytes(piece)
                    piece.clear()
        piece += (b"[]" if between == b"[" else b"]") + rest
    yield bytes(piece)


def sse(data: object, event: str = "") -> bytes:
    """One server-sent event, with its name if it has one."""
    named = f"event: {event}\n".encode() if event else b""
    return b"%bdata: %b\n\n" % (named, encode_json(data))


def error_object(error: RequestError) -> Error:
    """The error as llama-server and OpenAI's API show it."""
    return Error(ErrorDetail(code=error.code, message=error.message, type=error.type, **error.extra))


_ANTHROPICS = {  # of our types; all others have the same name there
    "exceed_context_size_error": "invalid_request_error",
    "not_supported_error": "invalid_request_error",
    "server_error": "api_error",
    "unavailable_error": "overloaded_error",
}


def anthropics_error(error: RequestError) -> AnthropicError:
    """The error as Anthropic's API shows it."""
    return AnthropicError(error=replace(error_object(error).error, type=_ANTHROPICS.get(error.type, error.type)))


def ollamas_error(error: RequestError) -> OllamaError:
    """The error as Ollama's API shows it."""
    return OllamaError(error.message)
