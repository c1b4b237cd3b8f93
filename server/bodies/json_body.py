"""JSON bodies, bounded in nesting, number of values, and time on the event loop.

Python's parser in C lets no other thread run before it has read the whole text: five million keys
take seconds. It reads what takes it milliseconds. A text with more is counted first; its values
are then read one by one by json's parser in Python, between which other threads run."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from json import JSONDecoder, decoder, scanner
from typing import Any, Final, NoReturn

import numpy as np

from logitless.engine.errors import InvalidRequest, TooLarge
from logitless.frontend.fields import article
from logitless.frontend.workers import check

MAX_DEPTH: Final = 256  # what is told again, rendered or compiled costs some calls a level, of Python's 1000
MAX_VALUES: Final = (1 << 20) + (1 << 12)  # of one body: a million token ids, and what is around them
_QUICK = 1 << 16  # texts, arrays and objects, or eight times the numbers, that the parser in C reads in some 60 ms
_PIECE = 1 << 20  # bytes that are counted at once; even, for pairs of backslashes
_LARGE = 1 << 22  # bytes of a body whose texts are measured before they are made
_WIDENED = 1 << 16  # bytes of such a text
MAX_TEXT_BYTES: Final = 96 << 20
_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+"', re.DOTALL)
_WIDE = re.compile(r"[^\x00-\x7f]+")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def json_object(raw: bytes | bytearray) -> dict[str, Any]:
    """A request's body that must be an object, or 400."""
    body = json_value(raw)
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {article(body)}")
    return body


def json_value(raw: bytes | bytearray) -> object:
    """A request's body, or 400; 413 beyond MAX_VALUES. Stricter than Python: UTF-8 only, no NaN or
    Infinity, no lone surrogates. A byte order mark is skipped."""
    n_brackets = raw.count(b"[") + raw.count(b"{")
    quick = len(raw) <= _QUICK or raw.count(b'"') // 2 + n_brackets + raw.count(b",") // 8 <= _QUICK
    if not quick and _n_values(raw) > MAX_VALUES:
        raise TooLarge(f"the body has more than {MAX_VALUES} values")
    _check_texts(raw)
    try:
        body = (_QUICK_DECODER if quick else _patient_decoder()).decode(_text(raw))
        if _SURROGATE.search(raw):
            for text in json.JSONEncoder(ensure_ascii=False).iterencode(body):
                text.encode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise InvalidRequest("the body has a surrogate escape without its partner") from None
    except RecursionError:
        raise _nested() from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if n_brackets > MAX_DEPTH and _is_deep(body):
        raise _nested()
    parsed: object = body
    return parsed


def _text(raw: bytes | bytearray) -> str:
    """The body as text, without a byte order mark. In a large one rare characters beyond ASCII are escaped:
    one of them would make each other character take four bytes."""
    if len(raw) <= _LARGE or raw.isascii() or not _is_sparse(raw):
        return raw.decode("utf-8-sig" if raw.startswith(codecs.BOM_UTF8) else "utf-8")
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    pieces = []
    try:
        for piece in _pieces(raw):
            text = decode(piece)
            pieces.append(text if text.isascii() else _WIDE.sub(lambda wide: json.dumps(wide[0])[1:-1], text))
        decode(b"", True)
    except UnicodeDecodeError:
        return raw.decode()  # raises it with its place in the body
    return "".join(pieces)


def _pieces(raw: bytes | bytearray) -> Iterator[bytes]:
    view = memoryview(raw)
    for start in range(0, len(raw), _PIECE):
        check()
        yield bytes(view[start : start + _PIECE])


def _is_sparse(raw: bytes | bytearray) -> bool:
    """True if few bytes are beyond ASCII."""
    return 16 * sum(int(np.count_nonzero(np.frombuffer(piece, np.int8) < 0)) for piece in _pieces(raw)) < len(raw)


def _check_texts(raw: bytes | bytearray) -> None:
    """TooLarge: the texts of a large body would take more than MAX_TEXT_BYTES, because characters beyond
    ASCII widen all others of their text to two or four bytes."""
    if len(raw) <= _LARGE or (raw.isascii() and b"\\u" not in raw):
        return
    size = 0
    for n, text in enumerate(_STRING.finditer(raw)):
        if n % 4096 == 0:
            check()
        start, end = text.span()
        if end - start > _WIDENED:
            part = bytes(memoryview(raw)[start:end])
            if not part.isascii() or b"\\u" in part:
                astral = b"\\ud" in part or b"\\uD" in part or max(part) >= 0xF0
                size += (4 if astral else 2) * _n_characters(part)
                if size > MAX_TEXT_BYTES:
                    raise TooLarge(f"the texts of the body take more than {MAX_TEXT_BYTES} bytes")


def _n_characters(text: bytes) -> int:
    """Characters of UTF-8 with JSON's escapes, about."""
    n_continued = int(np.count_nonzero(np.frombuffer(text, np.int8) < -64))
    return len(text) - n_continued - 5 * text.count(b"\\u")


def _n_values(raw: bytes | bytearray) -> int:
    """Values of a JSON text, at least: the commas and opening brackets that are in no string. The count
    stops beyond MAX_VALUES."""
    n, inside, start = 0, 0, 0
    view = memoryview(raw)
    while start < len(raw) and n <= MAX_VALUES:
        check()
        piece = bytes(view[start : start + _PIECE])
        cut = len(piece.rstrip(b"\\"))
        if (len(piece) - cut) % 2 and cut:  # the escape ends in the next piece
            piece = piece[:-1]
        start += len(piece)
        bare = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        if bare.size:
            quoted = (np.cumsum(bare == ord('"'), dtype=np.int32) + inside) & 1
            marks = (bare == ord(",")) | (bare == ord("[")) | (bare == ord("{"))
            n += int(np.count_nonzero(marks & (quoted == 0)))
            inside = int(quoted[-1])
    return n


def _patient_decoder() -> Any:
    """json's parser in Python, which ends when the client leaves."""

    def checked(read: Any) -> Any:
        def read_one(*args: Any) -> Any:
            check()
            return read(*args)

        return read_one

    patient: Any = JSONDecoder(parse_constant=_no_constant, parse_int=checked(int), parse_float=checked(float))
    patient.parse_string = checked(decoder.scanstring)  # type: ignore[attr-defined]
    patient.scan_once = scanner.py_make_scanner(patient)  # type: ignore[attr-defined]
    return patient


def _is_deep(value: object) -> bool:
    """True if arrays and objects are nested more than MAX_DEPTH deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [v for v in level if isinstance(v, list | dict)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True


def _nested() -> InvalidRequest:
    return InvalidRequest("the body is nested too deeply")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_QUICK_DECODER = JSONDecoder(parse_constant=_no_constant)
