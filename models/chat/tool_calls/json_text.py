"""JSON text of a call's arguments: numbers and words as models write them, cut values, strings as they arrive."""

from __future__ import annotations

import ast
import json
import re
import warnings
from contextlib import suppress
from typing import NoReturn

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\\Z)?|[\[\]{}:,]|[^\s"\[\]{}:,]+', re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_OTHER_BASE = re.compile(r"[+-]?0(?:[xX][0-9a-fA-F_]+|[oO][0-7_]+|[bB][01_]+)")
_PIECE = re.compile(r'[^"\\]+|\\u[dD][89abAB]..\\u....|\\u....|\\[^u]', re.DOTALL)
_PAIR_BEGUN = re.compile(r"\\u[dD][89abAB]..(?:\\(?:u.{0,3})?)?", re.DOTALL)
_LITERALS = ("true", "false", "null")
_WORDS = {word.lower(): word.lower() for word in _LITERALS} | {"True": "true", "False": "false"}
_WORDS |= dict.fromkeys(("None", "undefined"), "null")
_WORDS |= {f"{sign}{word}": "null" for sign in ("", "+", "-") for word in ("NaN", "Infinity")}  # as JSON.stringify does


def number(text: str) -> str | None:
    """JSON of a number as JSON, JSON5 or Python write it; None: it is none, or its meaning is open (01)."""
    plain = re.sub(r"^\+(?=[\d.])|(?<=\d)_(?=\d)", "", text)
    plain = re.sub(r"\.(?=[eE]|$)", ".0", re.sub(r"^(-?)(?=\.\d)", r"\g<1>0", plain))
    if _NUMBER.fullmatch(plain):
        return plain
    with suppress(ValueError):
        return str(int(text, 0)) if _OTHER_BASE.fullmatch(text) else None
    return None


def bare(text: str) -> str:
    """JSON of a value without quotes: a word, a number, or a string of any other text."""
    known = _WORDS.get(text) or number(text)
    return json.dumps(text, ensure_ascii=False) if known is None else known


def is_begun(text: str) -> bool:
    """True if a text is the beginning of a JSON number or word."""
    return any(word.startswith(text) for word in _LITERALS) or any(_NUMBER.fullmatch(text + c) for c in ("", "0"))


def completion(text: str) -> str:
    """Shortest text that makes the beginning of a JSON value whole."""
    closing, key, last = "", False, ""
    for last in _TOKEN.findall(text):
        if last in ("{", "["):
            closing += "}" if last == "{" else "]"
        elif last in ("}", "]"):
            closing = closing[:-1]
        key = closing[-1:] == "}" and (last in ("{", ",") or (key and last[0] == '"'))
    end = ""
    if last[:1] == '"':
        inner = last[1:]
        is_closed = len(last) > 1 and re.fullmatch(r'"(?:[^"\\]|\\.)*"', last, re.DOTALL)
        if not is_closed:
            escape = re.search(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$", inner)
            end = ("\\" if escape[1] == "\\" else "0" * (6 - len(escape[1]))) if escape else ""
            end += '"'
        end += ": null" if key else ""
    elif last in ("", ":", ","):
        end = '"": null' if last == "," and key else "null"
    elif last not in ("{", "}", "[", "]"):
        word = next((word for word in _LITERALS if word.startswith(last)), "")
        end = word[len(last) :] if word else "" if _NUMBER.fullmatch(last) else "0"
    return end + closing[::-1]


class StringText:
    """Reader of a JSON string: its JSON comes in, its text comes out."""

    def __init__(self) -> None:
        self._has_begun = False
        self._open = ""  # an escape that is not whole
        self.whole = False  # the quote that ends it has come

    def feed(self, text: str) -> str:
        """More of the text."""
        text, at, out = "" if self.whole else self._open + text, 0 if self._has_begun else 1, list[str]()
        self._has_begun = self._has_begun or bool(text)
        while at < len(text) and (piece := _PIECE.match(text, at)):
            if _PAIR_BEGUN.fullmatch(text, at):
                break
            out.append(unescaped(piece[0]))
            at = piece.end()
        self.whole = self.whole or text[at : at + 1] == '"'
        self._open = text[at:]
        return "".join(out)


def parsed(text: str) -> object:
    """The value of a JSON text."""
    return json.loads(text, strict=False)


def unescaped(text: str) -> str:
    """A part of a JSON string, as text; half a surrogate pair becomes a question mark."""
    return text if text[0] != "\\" else clean(str(parsed(f'"{text}"')))


def clean(text: str) -> str:
    """The text with question marks for halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_json(text: str) -> str:
    """The text itself where it is JSON, JSON of a list or dictionary that Python writes, else a string of it."""
    text = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        literal = from_python(text) if text.startswith(("[", "{")) else None
        return json.dumps(text, ensure_ascii=False) if literal is None else literal
    return text


def from_python(text: str) -> str | None:
    """JSON of a Python literal; None: it is none."""
    # models write line breaks in strings as they are
    for literal in (text, text.replace("\n", "\\n")):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of an unknown escape
            return json.dumps(ast.literal_eval(literal), ensure_ascii=False, allow_nan=False)
    return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
