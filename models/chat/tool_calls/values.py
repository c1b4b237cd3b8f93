"""Values of a call's arguments as JSON.

One reader each of JSON, of what models write in its place, and of Gemma's notation."""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from logitless.models.chat.tool_calls.json_text import as_json, bare, clean, is_begun, parsed
from logitless.models.chat.tool_calls.parser import BLANK, Broken, NotACall, Parser, Step

Take = Callable[[str], object]

MAX_NAME = 256  # characters of a name that is not between quotes, or of a tag
_MAX_DEPTH = 256
_MAX_MARKED = 64  # levels in Gemma's notation
_KEY, _COLON, _VALUE, _COMMA = "key", ":", "value", ","
_HEX = frozenset("0123456789abcdefABCDEF")
_WORD_END = frozenset(",]}[{<>\"'\n")
_KEYS = frozenset(string.ascii_letters + "_$\"'")
_VALUES = frozenset(string.ascii_letters + string.digits + "-+.\"'[{(")
_CLOSED = re.compile(r"""(?<!\\)(?:\\\\)*["']\s*(?:[)\]}:]|,\s*["'{\[\w-])""")
_AS_JSON = {")": "]"}  # of a tuple


def value(p: Parser, take: Take, mark: str = "") -> Step[bool]:
    """Read one value after blanks and pass it to `take` as JSON. False: it is cut short.

    What models write and JSON has not becomes JSON: Python's quotes, words and numbers, line breaks and quotes
    within strings, bare words, commas and brackets too many or too few. NotACall: it is none even so.
    `mark`: Gemma's mark around texts, whose keys are bare; then blanks are not told."""
    return _Value(p, take, mark).read()


def arguments(p: Parser, name: str, id: str | None) -> Step[bool]:
    """Begin a call as Python writes one, f(x=1), and read its arguments, whose bracket has been read.

    False: they are cut short. NotACall: they have no names."""
    c = yield from p.after_blanks()
    p.back(c)
    end = yield from p.trigger(p.ends)
    p.back(end)
    if c != ")" and not end and not (yield from _begins_argument(p)):
        raise NotACall
    p.begin(name, id)
    return (yield from _Value(p, p.argument, is_call=True).read())


class _Value:
    def __init__(self, p: Parser, take: Take, mark: str = "", *, is_call: bool = False) -> None:
        self._p, self._take, self._mark, self._is_call = p, take, mark, is_call
        self._stack = ")" if is_call else ""  # the brackets that close what is open, the innermost last
        self._closing = f"]}}{self._stack}"
        self._expects, self._is_first = _KEY if is_call else _VALUE, is_call  # the first of an object or array
        self._is_spaced = bool(mark) or is_call  # blanks are not the model's
        self._key: list[str] = []  # then told with its colon

    def read(self) -> Step[bool]:
        p = self._p
        if self._is_call:
            self._take("{")
        c = yield from p.after_blanks()
        while c:
            colon = ":"
            if self._is_call and self._stack == ")":
                colon = "="
                if self._expects == _VALUE and c in ",)":  # templates without quotes write an empty text so
                    self._take('""')
                    self._expects = _COMMA
            if c in BLANK:
                if not self._is_spaced:
                    self._take(c)
            elif self._expects in (_KEY, _VALUE) and (quote := (yield from _quote(p, c, self._mark, self._is_call))):
                if not (yield from self._string(quote)):
                    return False
            elif c in "{[" and self._expects == _VALUE:
                self._open(c)
            elif c in self._closing:
                self._close(c)
            elif c == colon and self._expects == _COLON:
                self._take("".join(self._key) + (": " if self._is_spaced else ":"))
                self._key.clear()
                self._expects, self._is_first = _VALUE, False
            elif c == "," and self._expects == _COMMA:
                if not (yield from self._comma()):
                    return False
            elif c == "(" and self._is_call and self._expects == _VALUE:
                self._open(c)
            elif self._expects in (_KEY, _VALUE) and c not in ",:<>":
                if not (yield from self._bare(c, colon)):
                    return False
            else:
                p.back(c)
                raise NotACall
            if self._expects == _COMMA and not self._stack:
                return True
            c = yield from p.next()
        return False

    def _tell(self, text: str) -> None:
        (self._key.append if self._is_spaced and self._expects == _KEY else self._take)(text)

    def _string(self, quote: str) -> Step[bool]:
        is_key, stack = self._expects == _KEY, "" if self._mark else self._stack
        self._tell('"')
        if not (yield from _text(self._p, self._tell, quote, stack, is_key)):
            return False
        self._tell('"')
        self._expects = _COLON if is_key else _COMMA
        return True

    def _open(self, c: str) -> None:
        if len(self._stack) == (_MAX_MARKED if self._mark else _MAX_DEPTH):
            raise NotACall
        self._take("[" if c == "(" else c)
        self._stack += {"{": "}", "[": "]", "(": ")"}[c]
        self._expects, self._is_first = (_KEY if c == "{" else _VALUE), True

    def _close(self, c: str) -> None:
        if not self._stack:
            raise NotACall
        if c in self._stack:  # else it is one too many
            if self._expects == _COLON or (self._expects == _VALUE and not self._is_first):
                raise NotACall
            n = self._stack.rfind(c)
            text = "".join(_AS_JSON.get(bracket, bracket) for bracket in self._stack[n:][::-1])
            self._take(text[:-1] + "}" if self._is_call and n == 0 else text)
            self._stack, self._expects = self._stack[:n], _COMMA

    def _comma(self) -> Step[bool]:
        """Read what follows a comma up to its first character. False: nothing does."""
        p, in_object = self._p, self._stack[-1] == "}" or (self._is_call and self._stack == ")")
        following = yield from _following(p)
        if not following:
            if p.is_cut and not self._is_spaced:  # at a limit: the comma says that the member before it is whole
                self._take(",")
            yield from p.after_blanks()
            return False
        if following in self._closing:
            return True
        if following not in (_KEYS if in_object else _VALUES) and not self._mark:
            raise NotACall
        self._expects, self._is_first = (_KEY if in_object else _VALUE), False
        self._tell(", " if self._is_spaced else ",")
        return True

    def _bare(self, c: str, colon: str) -> Step[bool]:
        """Read a word or number that begins with a character. False: the answer ends in it."""
        is_value, p = self._expects == _VALUE, self._p
        stops = frozenset(",)]}") if self._is_call else frozenset(',]}[{<"') if self._mark else _WORD_END
        word, is_whole = yield from _word(
            p, c, stops if is_value else _WORD_END | {colon}, self._is_call, is_value and self._stack[-1:] in "})"
        )
        if is_value and self._mark and is_whole and (yield from _following(p)) in ("[", "{", "<"):
            raise NotACall
        if is_whole or (is_value and p.by_model and word and not is_begun(word)):
            self._tell(bare(word) if is_value else json.dumps(word, ensure_ascii=False))
            self._expects = _COMMA if is_value else _COLON
        elif is_value and is_begun(word):
            self._take(word)
        return is_whole


def _begins_argument(p: Parser) -> Step[bool]:
    """True if a name and an equals sign follow. Nothing is read."""
    n, start = 0, len(p.raw)
    while (c := (yield from p.next())) and (c == "_" or c.isalnum()) and n < MAX_NAME:
        n += 1
    if c in (" ", "\t"):
        c = yield from p.after_blanks()
    p.back(p.raw[start:])
    return c == "=" and n > 0


def _quote(p: Parser, c: str, mark: str, is_python: bool) -> Step[str]:
    """The quote that begins with this character; "": it is none."""
    if c in "\"'":
        return c * 3 if is_python and (yield from p.literal(c * 2)) else c
    if not mark or c != mark[0]:
        return ""
    p.back(c)
    if (yield from p.literal(mark)):
        return mark
    if p.rest is not None and mark.startswith(p.rest):
        yield from drop(p)
        return ""
    yield from p.next()
    raise NotACall


def _text(p: Parser, tell: Take, quote: str, stack: str, is_key: bool) -> Step[bool]:
    """Read a text up to and with its last quote. Broken: the call ends before that."""
    closed = re.compile(re.escape(quote)) if len(quote) > 1 else _CLOSED
    ends = p.end_begins
    run = without(f"\"'\\{quote[0]}{ends}")
    is_closed = False  # the last quote is certain to come
    while c := (yield from p.run(run, tell)):
        if not is_closed and c in ends and (end := (yield from p.call_ends(c, closed))):
            is_closed = end == "closed"
            if end == "open":
                p.back(c)
                raise Broken
            if end == "cut":
                return (yield from drop(p))
        if c == quote[0]:
            if len(quote) == 1:
                if not stack or (yield from _ends_text(p, stack, is_key)):
                    return True
            elif (yield from p.literal(quote[1:])):
                return True
            elif p.rest is not None and quote[1:].startswith(p.rest):
                return (yield from drop(p))
        if c == "\\" and quote[0] in "\"'":
            tell((yield from _escape(p, stack)))
        else:
            tell(c if c == "'" else json.dumps(c, ensure_ascii=False)[1:-1])
    return False


def drop(p: Parser) -> Step[bool]:
    """Drop the piece of a mark in which the answer ended; returns False."""
    while (yield from p.next()):
        pass
    return False


@cache
def without(special: str) -> re.Pattern[str]:
    """Matches text without these characters and control characters."""
    return re.compile(rf"[^\x00-\x1f{re.escape(special)}]+")


def _following(p: Parser) -> Step[str]:
    """The next character that is no blank, which stays unread."""
    blanks, c = yield from _blanks(p)
    p.back(blanks + c)
    return c


def _blanks(p: Parser) -> Step[tuple[str, str]]:
    """(blanks, the character after them)."""
    blanks = ""
    while (c := (yield from p.next())) and c in BLANK:
        blanks += c
    return blanks, c


def _ends_text(p: Parser, stack: str, is_key: bool) -> Step[bool]:
    """True if the quote that was read ends its string, by what follows: models write some within strings, too."""
    read, c = yield from _blanks(p)
    p.back(c)
    end = yield from p.trigger(p.ends)
    p.back(end)
    if end:
        p.back(read)
        return True
    read += yield from p.next()
    if stack[0] == ")":  # Python's
        is_last = not c or c in ")]}" or (c in ",:" and len(stack) > 1)
        if c == "," and len(stack) == 1:
            blanks, c = yield from _blanks(p)
            p.back(c)
            is_last = c in ("", ")") or (yield from _begins_argument(p))
            read += blanks
        p.back(read)
        return is_last
    is_last = not c or c in (":" if is_key else "]}")
    if c == "," and not is_key:
        blanks, c = yield from _blanks(p)
        read += blanks + c
        is_last = not c or (c in "\"'}" if stack[-1] == "}" else c in _VALUES or c in "]}")
    p.back(read)
    return is_last


def _escape(p: Parser, stack: str) -> Step[str]:
    """An escape, whose backslash has been read, as JSON has it; a backslash that begins none is doubled."""
    c = yield from p.next()
    if not c:
        return "\\"
    n_digits = 4 if c == "u" else {"x": 2, "U": 8}.get(c, 0) if stack[:1] == ")" else 0  # Python's
    if n_digits:
        digits = ""
        while len(digits) < n_digits and (d := (yield from p.next())):
            if d not in _HEX:
                p.back(d)
                return f"\\\\{c}{digits}"
            digits += d
        if c == "U" and len(digits) == 8 and int(digits, 16) <= sys.maxunicode:
            return json.dumps(chr(int(digits, 16)))[1:-1]
        return f"\\u{digits.rjust(n_digits + 2, '0')}" if c == "x" else f"\\u{digits[-4:]}"
    if c in '"\\/bfnrt':
        return "\\" + c
    if c < " ":
        return json.dumps(c)[1:-1]
    return "'" if c == "'" else "\\\\" + c


def _word(p: Parser, c: str, stops: frozenset[str], is_python: bool, in_object: bool) -> Step[tuple[str, bool]]:
    """(a bare word or number that begins with a character, True) before one of `stops`; (its beginning, False) where
    the answer ends. Brackets within it are balanced in Python; in an object a comma may be within digits (1,000)."""
    word, depth = "", 0
    while c and (depth or c not in stops):
        word += c
        depth += (c in "([{") - (c in ")]}") if is_python else 0
        if len(word) > MAX_NAME:
            raise NotACall
        c = yield from p.next()
        if c == "," and in_object and word[-1:].isdigit():
            digit = yield from p.next()
            if digit.isdigit():
                word, c = f"{word},", digit
            else:
                p.back(digit)
        if is_python and c and c in p.end_begins:
            p.back(c)
            end = yield from p.trigger(p.ends)
            p.back(end)
            if end:
                return word.strip(), True
            c = yield from p.next()
    p.back(c)
    return word.strip(), bool(c)


def text_value(p: Parser) -> Step[str | None]:
    """Read a string; None, with its text consumed, if something else follows, or the answer ends in it."""
    c = yield from p.after_blanks()
    p.back(c)
    if not c or c not in "\"'":
        return None
    chars: list[str] = []
    if not (yield from value(p, chars.append)):
        return None
    text = parsed("".join(chars))
    return clean(text) if isinstance(text, str) else None


def unwrapped(text: str) -> str:
    """JSON of arguments that are no object: an object in a string is unwrapped, nothing means no arguments, text
    that is no JSON is a string."""
    text = as_json(text)
    inner = parsed(text)
    if isinstance(inner, str) and inner.strip():
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(inner), dict):
                return clean(inner)
    return text if inner not in (None, "") else "{}"
