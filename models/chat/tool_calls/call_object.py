"""JSON tool calls: reader of {"name": "f", "arguments": {…}} in any order, with other members."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

from logitless.models.chat.tool_calls.json_scan import BAD, BEFORE, DONE, JsonScan, parsed
from logitless.models.chat.tool_calls.parser import BLANK, Broken, NotACall, Parser, PlainText, Step

ARGUMENTS = ("arguments", "parameters")
_HEX = frozenset("0123456789abcdefABCDEF")
_LETTERS = string.ascii_letters + "_$"
_WORD_BEGIN = frozenset(_LETTERS)
_WORD_END = frozenset(",:]}[{<>\"'\n")
_AFTER_COMMA = {"}": frozenset(_LETTERS + "\"'}]"), "]": frozenset(_LETTERS + string.digits + "-\"'[{]}")}
_WORDS = {word.lower(): word.lower() for word in ("true", "false", "null")}
_WORDS |= {"True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null", "undefined": "null"}
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
    """Read one JSON value after blanks and pass it to `take`. False: it is cut short.

    What models write and JSON has not becomes JSON: Python's quotes and words, line breaks and quotes
    within strings, bare words, commas and brackets too many or too few. NotACall: it is none even so."""
    c = yield from p.after_blanks()
    scan, quote = JsonScan(), ""
    while c:
        text = c
        if scan.in_text:
            if c == "\\":
                text = yield from _escape(p)
            elif c in "\"'":
                is_end = c == quote and (not scan.brackets or (yield from _ends_text(p, scan)))
                text = '"' if is_end else "'" if c == "'" else '\\"'
            elif c < " ":
                text = json.dumps(c)[1:-1]
        elif scan.expects in ("key", "value") and c in "\"'":
            text, quote = '"', c
        elif scan.expects in ("key", "value") and c in _WORD_BEGIN:
            p.back(c)
            word, is_whole = yield from _word(p)
            text = (word if scan.expects == "value" else "") if not is_whole else _word_as_json(word, scan.expects)
        elif c in "]}" and scan.expects:
            n = scan.brackets.rfind(c)
            text = scan.brackets[n:][::-1] if n >= 0 else "" if scan.brackets else c
        elif c == "," and scan.expects == "," and scan.brackets:
            following = yield from _following(p)
            if not following:  # no member follows the comma
                if p.is_cut:  # at a limit: the comma says that the member before it is whole
                    take(c)
                yield from p.after_blanks()
                return False
            if following not in _AFTER_COMMA[scan.brackets[-1:]]:
                raise NotACall
            text = "" if following in "]}" else c
        for each in text:
            state = scan.feed(each)
            if state is BEFORE:
                p.back(c)
                return True
            if state is BAD:
                raise NotACall
            take(each)
            if state is DONE:
                return True
        c = yield from p.next()
    return False


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


def _ends_text(p: Parser, scan: JsonScan) -> Step[bool]:
    """True if the quote that was read ends its string, by what follows: models write some within strings, too."""
    is_key = scan.in_key
    read, c = yield from _blanks(p)
    read += c
    is_last = not c or c in (":" if is_key else "]}")
    if c == "," and not is_key:
        blanks, c = yield from _blanks(p)
        read += blanks + c
        is_last = not c or c in ("\"'}" if scan.brackets[-1] == "}" else _AFTER_COMMA["]"])
    p.back(read)
    return is_last


def _escape(p: Parser) -> Step[str]:
    """An escape, whose backslash has been read, as JSON has it; a backslash that begins none is doubled."""
    c = yield from p.next()
    if not c:
        return "\\"
    if c == "u":
        digits = ""
        while len(digits) < 4 and (d := (yield from p.next())):
            if d not in _HEX:
                p.back(d)
                return "\\\\u" + digits
            digits += d
        return "\\u" + digits
    if c in '"\\/bfnrt':
        return "\\" + c
    if c < " ":
        return json.dumps(c)[1:-1]
    return "'" if c == "'" else "\\\\" + c


def _word(p: Parser) -> Step[tuple[str, bool]]:
    """(a bare word or text, True) before what ends it; (its beginning, False) where the answer ends."""
    word = ""
    while (c := (yield from p.next())) and c not in _WORD_END:
        word += c
        if len(word) > MAX_NAME:
            raise NotACall
    p.back(c)
    return word.rstrip(), bool(c)


def _word_as_json(word: str, kind: str) -> str:
    known = _WORDS.get(word) if kind == "value" else None
    return json.dumps(word, ensure_ascii=False) if known is None else known


def call_list(p: Parser, names: frozenset[str] | None = None, key: str = "name", *, closes: bool = True) -> Step[bool]:
    """Read the calls of an array, whose bracket has been read. False: the array is cut short."""
    n_calls = p.n_calls
    while (c := (yield from p.after_blanks())) == "{":
        try:
            if not (yield from CallObject(p, names, key, sure=True).read()):
                return False
        except NotACall as error:
            raise (Broken if p.n_calls > n_calls else type(error)) from error
        while (c := (yield from p.after_blanks())) == "}":
            pass
        if c == "{":  # without a comma
            p.back(c)
        elif c not in (",", ";"):
            p.back("" if c == "]" else c)
            return c == "]" or not closes
    if c == "]" and p.n_calls > n_calls:  # after a comma too many
        return True
    raise NotACall


def text_value(p: Parser) -> Step[str | None]:
    """Read a string; None, with its text consumed, if something else follows."""
    c = yield from p.after_blanks()
    p.back(c)
    if not c or c not in "\"'":
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

        Raises NotACall at the first character that does not belong to a call.
        """
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
        if c and c in "\"'nN":  # an object as JSON in a string; null
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
