"""JSON scanner: finds the end of a value in a character stream, or its first invalid character (RFC 8259)."""

from __future__ import annotations

import json

MORE, DONE, BEFORE, BAD = "more", "done", "before", "bad"
"""Meaning of a character: inside the value; the last one; the first one after it; not JSON."""

MAX_DEPTH = 256
_BLANK = " \t\n\r"
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = "0123456789"
_NUMBER = {  # state → (characters, next state); a number may end in the states of _WHOLE
    "sign": (("0", "zero"), ("123456789", "int")),
    "zero": ((".", "point"), ("eE", "e")),
    "int": ((_DIGITS, "int"), (".", "point"), ("eE", "e")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), ("eE", "e")),
    "e": (("+-", "esign"), (_DIGITS, "exponent")),
    "esign": ((_DIGITS, "exponent"),),
    "exponent": ((_DIGITS, "exponent"),),
}
_WHOLE = ("zero", "int", "fraction", "exponent")


class JsonScan:
    """Scanner of one value, character by character. Nothing may follow DONE, BEFORE or BAD."""

    __slots__ = ("_hex", "_open", "_rest", "_state")

    def __init__(self) -> None:
        self._state = "value"
        self._open: list[str] = []  # the brackets that are still to be closed
        self._rest = ""  # of a literal
        self._hex = 0

    @property
    def in_text(self) -> bool:
        """True within a string, not within an escape."""
        return self._state in ("string", "key")

    @property
    def in_key(self) -> bool:
        """True within a member's key."""
        return self._state.startswith("key")

    @property
    def expects(self) -> str:
        """ "key" or "value" where one begins; "," after one; "" elsewhere."""
        state = self._state
        return (
            ","
            if state == "after" or state in _WHOLE
            else state.rpartition(" ")[2]
            if state.endswith(("value", " key"))
            else ""
        )

    @property
    def brackets(self) -> str:
        """The brackets that are still to be closed, the outermost first."""
        return "".join(self._open)

    def completion(self) -> str:
        """Shortest text that makes the value whole."""
        state = self._state
        text = '"' if self.in_text else {"value": "null", "next key": '"": null', "colon": ": null"}.get(state, "")
        if state.endswith("\\"):  # within an escape
            text = ("0" * self._hex or "\\") + '"'
        if state == "literal":
            text = self._rest
        elif state in _NUMBER and state not in _WHOLE:
            text = "0"
        if state.startswith("key"):
            text += ": null"
        return text + "".join(reversed(self._open))

    def feed(self, c: str) -> str:
        """The meaning of the next character."""
        state = self._state
        if state == "string" or state == "key":
            if c == '"':
                return self._string_ended()
            if c == "\\":
                self._state = state + "\\"
            return BAD if c < " " else MORE
        if state.endswith("\\"):
            return self._escape(c)
        if state == "literal":
            return self._literal(c)
        if state in _NUMBER:
            return self._number(c)
        if c in _BLANK:
            return MORE
        if state in ("value", "first value"):
            return self._close("]") if c == "]" and state == "first value" else self._begin(c)
        if state in ("next key", "first key"):
            if c == "}" and state == "first key":
                return self._close(c)
            self._state = "key"
            return MORE if c == '"' else BAD
        if state == "colon":
            self._state = "value"
            return MORE if c == ":" else BAD
        if c == ",":  # state "after": a member or an element has ended
            self._state = "next key" if self._open[-1] == "}" else "value"
            return MORE
        return self._close(c)

    def _begin(self, c: str) -> str:
        if c == '"':
            self._state = "string"
        elif c in "{[":
            if len(self._open) == MAX_DEPTH:
                return BAD
            self._open.append("}" if c == "{" else "]")
            self._state = "first key" if c == "{" else "first value"
        elif c == "-" or c in _DIGITS:
            self._state = "sign" if c == "-" else "zero" if c == "0" else "int"
        elif c in "tfn":
            self._state, self._rest = "literal", {"t": "rue", "f": "alse", "n": "ull"}[c]
        else:
            return BAD
        return MORE

    def _ended(self) -> str:
        self._state = "after"
        return MORE if self._open else DONE

    def _close(self, c: str) -> str:
        if not self._open or c != self._open[-1]:
            return BAD
        self._open.pop()
        return self._ended()

    def _string_ended(self) -> str:
        if self._state == "key":
            self._state = "colon"
            return MORE
        return self._ended()

    def _escape(self, c: str) -> str:
        if self._hex:
            self._hex -= 1
            ok = c in _HEX
        else:
            ok = c in '"\\/bfnrtu'
            self._hex = 4 if c == "u" else 0
        if not self._hex:
            self._state = self._state[:-1]
        return MORE if ok else BAD

    def _literal(self, c: str) -> str:
        if c != self._rest[0]:
            return BAD
        self._rest = self._rest[1:]
        return MORE if self._rest else self._ended()

    def _number(self, c: str) -> str:
        for characters, following in _NUMBER[self._state]:
            if c in characters:
                self._state = following
                return MORE
        if self._state not in _WHOLE:
            return BAD
        if not self._open:
            return BEFORE
        self._state = "after"
        return self.feed(c)


def parsed(text: str) -> object:
    """The value of a scanned text."""
    return json.loads(text, strict=False)


def is_open_escape(text: str) -> bool:
    r"""True for an incomplete escape: \, \u12, or the first half of a surrogate pair."""
    if text[0] != "\\" or text[1:2] not in ("", "u"):
        return False
    if len(text) < 6:
        return True
    rest = text[6:]
    return text[2:4].lower() in ("d8", "d9", "da", "db") and len(rest) < 6 and (rest[:2] in ("", "\\", "\\u"))


def unescaped(text: str) -> str:
    """A character or an escape of a JSON string, as text."""
    if text[:1] != "\\":
        return text
    return str(parsed(f'"{text}"')).encode("utf-8", "replace").decode("utf-8")
