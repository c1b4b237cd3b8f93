"""JSON tool calls: reader of {"name": "f", "arguments": {…}} in any order, with other members."""

from __future__ import annotations

import re

from logitless.models.chat.tool_calls.parser import NotACall, Parser, PlainText, Step
from logitless.models.chat.tool_calls.values import MAX_NAME, text_value, unwrapped, value

ARGUMENTS = ("arguments", "parameters")
_MAX_NESTED = 4


def name_before(p: Parser, end: str, without: str) -> Step[str]:
    """Read a name up to and including its end character; NotACall if it has a character of `without`."""
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


def closing(p: Parser, text: str) -> Step[None]:
    """Read the closing syntax of a call, or as much of it as the answer has, and brackets too many before it."""
    p.end_call()
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

        Raises NotACall at the first character that does not belong to a call."""
        try:
            is_whole = yield from self._members(0)
        except NotACall:
            self._begin_named()
            raise
        if not is_whole:
            if not self._p.at_end:
                self._begin_named()
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
        self._p.end_call()
        return True

    def _begin_named(self) -> None:
        """Begin a malformed call whose name is known, and which can be nothing else."""
        if self._name is not None and self._names is None and not self._has_begun:
            self._begin()

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
        while c and c in "\"'":
            p.back(c)
            key = yield from text_value(p)
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
        if self._name is None or (c and c in "\"'nN"):  # or an object as JSON in a string, or null
            chars: list[str] = []
            if not (yield from value(p, chars.append)):
                return False
            self._give(unwrapped("".join(chars)))
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


def _ignore(_: str) -> None:
    return None
