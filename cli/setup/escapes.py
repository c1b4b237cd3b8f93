"""Escape sequences in texts of the command line, by llama.cpp's rules (--escape)."""

from __future__ import annotations

import re
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError

_SEQUENCE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|([nrt'\"\\]))")
_BYTES = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def texts(options: SimpleNamespace, dest: str) -> list[str]:
    """The texts of a flag, with their sequences replaced unless --no-escape says otherwise."""
    flag = "--" + dest.replace("_", "-")
    return [unescaped(flag, text) if options.escape else text for text in getattr(options, dest)]


def unescaped(flag: str, text: str) -> str:
    """The text with its sequences replaced; others stay as they are. UsageError: \\xHH leave no UTF-8."""
    raw = text.encode("utf-8", "surrogateescape")
    data = _SEQUENCE.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else _BYTES.get(m[2], m[2]), raw)
    if data == raw:
        return text
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {text!r}: byte {error.start} of it is not UTF-8") from None
