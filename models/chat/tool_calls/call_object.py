"""JSON tool calls: reader of {"name": "f", "arguments": {…}} in any order, with other members."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from logitless.models.chat.tool_calls.json_scan import BAD, BEFORE, DONE, JsonScan, parsed
from logitless.models.chat.tool_calls.parser import NotACall, Parser, PlainText, Step

ARGUMENTS = ("arguments", "parameters")
MAX_NAME = 256  # characters of a name that is not between quotes, or of a tag
_MAX_NESTED = 4


def name_before(p: Parser, end: str, without: str) -> Step[str]:
    """Read a name up to and including its end character; NotACall if it has a character of
    `without`."""
    name = ""
    while (c := (yield from p.next())) != end:
        if not c and not p.begins_name(name.strip()):
            raise PlainText
        if not c or c in without or len(name) > MAX_NAME:
            raise NotACall
        name += c
    if not name.strip():
        raise NotACall
    return name.strip()


def value(p: Parser, take: Callable[[str], object]) -> Step[bool]:
    """Read one JSON value after blanks and pass its characters to `take`. False: it is cut short,
    or invalid. Line breaks and tabs in strings, which models write as they are, become escapes."""
    c = yield from p.after_blanks()
    scan = JsonScan()
    while c:
        if c in "\t\n\r" and scan.in_text:
            take(json.dumps(c)[1:-1])
            c = yield from p.next()
            continue
        state = scan.feed(c)
        if state is BAD or state is BEFORE:
            p.back(c)
            return state is BEFORE
        take(c)
        if state is DONE:
            return True
        c = yield from p.next()
    return False


def text_value(p: Parser) -> Step[str | None]:
    """Read a string; None, with its text consumed, if something else follows."""
    c = yield from p.after_blanks()
    p.back(c)
    if c != '"':
        return None
    return (yield from _string(p))


def _string(p: Parser) -> Step[str | None]:
    chars: list[str] = []
    if not (yield from value(p, chars.append)):
        return None
    text = parsed("".join(chars))
    return _clean(text) if isinstance(text, str) else None


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")  # an escape may be half a surrogate pair


def closing(p: Parser, text: str) -> Step[None]:
    """Read the closing syntax of a call, or as much of it as the answer has, and brackets too many before it."""
    p.mark()
    c = yield from p.after_blanks()
    while c and c in "}]" and text[0] not in "}]":
        c = yield from p.after_blanks()
    for i, expected in enumerate(text):
        if c != expected:
            p.back(p.raw if c else "")
            return
        if i + 1 < len(text):
            c = yield from p.next()


class CallObject:
    """Reader of one call. `names`: names that make it a call; `key`: member that has the name.

    `sure`: it is a call if the answer ends before its name."""

    def __init__(
        self, p: Parser, names: frozenset[str] | None = None, key: str = "name", *, sure: bool = False
    ) -> None:
        self._p = p
        self._sure = sure or names is None or p.style.required
        self._names = names
        self._key = key
        self._name: str | None = None
        self._has_begun = False
        self._early: str | None = None  # arguments that came before the name
        self._has_arguments = False

    def read(self) -> Step[bool]:
        """Read the object, whose brace has been read. False: the answer ended in it.

        Raises NotACall at the first character that does not belong to a call.
        """
        if not (yield from self._members(0)):
            if self._p.at_end and not self._has_begun and not self._is_named():
                raise PlainText
            if not self._has_begun or not self._p.at_end:
                raise NotACall
            return False
        if self._name is None:
            raise NotACall
        if not self._has_begun:
            self._begin()
        if not self._has_arguments:
            self._p.argument("{}")
        return True

    def _is_named(self) -> bool:
        """True if the text up to the end shows that the object is a call."""
        if self._sure or self._name is not None:
            return True
        name = re.search(rf'"{self._key}"\s*(?::\s*(?:"([^"]*))?)?$', self._p.raw)
        if name is not None:
            return self._p.begins_name(name[1] or "")
        key = re.search(r'\{\s*(?:"(\w*))?$', self._p.raw) if self._p.is_cut else None
        return key is not None and self._key.startswith(key[1] or "")

    def _members(self, depth: int) -> Step[bool]:
        p = self._p
        c = yield from p.after_blanks()
        if c == "}":
            return True
        while c == '"':
            p.back(c)
            key = yield from _string(p)
            if key is None or (yield from p.after_blanks()) != ":":
                return False
            if not (yield from self._member(key, depth)):
                return False
            c = yield from p.after_blanks()
            if c == "}":
                return True
            if c != ",":
                break
            c = yield from p.after_blanks()
        p.back(c)
        return False

    def _member(self, key: str, depth: int) -> Step[bool]:
        p = self._p
        if key == self._key and self._name is None:
            name = yield from text_value(p)
            if name is None or (self._names is not None and name not in self._names):
                return False
            self._name = name
            if self._early is not None:
                self._give(self._early)
            return True
        if key in ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._arguments())
        if key == "function" and depth < _MAX_NESTED and not self._has_begun:  # OpenAI's shape
            c = yield from p.after_blanks()
            if c == "{":
                return (yield from self._members(depth + 1))
            p.back(c)
        if key == "id" and self._name is None:
            id = yield from text_value(p)
            p.written_id = id or ""
            return True if id is not None else (yield from value(p, _ignore))
        return (yield from value(p, _ignore))

    def _arguments(self) -> Step[bool]:
        p = self._p
        c = yield from p.after_blanks()
        p.back(c)
        if c in ('"', "n"):  # an object as JSON in a string; null
            chars: list[str] = []
            if not (yield from value(p, chars.append)):
                return False
            self._give(_object_text("".join(chars)))
            return True
        if self._name is None:
            chars = []
            if not (yield from value(p, chars.append)):
                return False
            self._give("".join(chars))
            return True
        self._begin()
        whole = yield from value(p, p.argument)
        p.mark()
        return whole

    def _give(self, text: str) -> None:
        if self._name is None:
            self._early = text
        else:
            self._begin()
            self._p.argument(text)
            self._p.mark()

    def _begin(self) -> None:
        assert self._name is not None
        self._p.begin(self._name)
        self._has_begun = True


def _object_text(text: str) -> str:
    """JSON text of arguments: an object in a string is unwrapped, null means no arguments."""
    inner = parsed(text)
    if inner is None:
        return "{}"
    assert isinstance(inner, str)
    scan = JsonScan()
    stripped = inner.strip()
    if stripped.startswith("{") and next((i for i, c in enumerate(stripped, 1) if scan.feed(c) != "more"), 0) == len(
        stripped
    ):
        return _clean(inner)
    return text


def _ignore(_: str) -> None:
    return None
