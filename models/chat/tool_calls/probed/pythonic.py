"""Pythonic tool calls, f(x=1, y='a'): reader, and grammar of the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from logitless.models.chat.tool_calls.free_text import TEXT, json_string
from logitless.models.chat.tool_calls.json_text import as_json, bare, from_python
from logitless.models.chat.tool_calls.parser import Broken, NotACall, Parser, Step
from logitless.models.chat.tool_calls.probed.python_schema import literal
from logitless.models.chat.tool_calls.values import MAX_NAME
from logitless.models.grammar import json_rule, quoted
from logitless.models.grammar.json_schema import parameters_of, standalone

_OPEN, _CLOSE = "([{", ")]}"
_CLOSED = re.compile(r"""(?<!\\)(?:\\\\)*["']\s*(?:[)\]}:]|,\s*["'\w])""")


def arguments(p: Parser, name: str, id: str | None, close: str) -> Step[bool]:
    """Begin the call and read its arguments, whose opening bracket has been read, up to the closing
    one.

    The call is told as JSON, a value when it is whole. False: the answer ended in the arguments.
    `close`: the syntax after the bracket of the last call, which also ends a value with a wrong quote.
    """
    n_given = 0
    while True:
        c = yield from p.after_blanks()
        if c == ")":
            break
        if c and not n_given and (yield from _ends(p, c)):
            p.begin(name, id)
            raise Broken
        key = ""
        while c and (c == "_" or c.isalnum()) and len(key) < MAX_NAME:
            key += c
            c = yield from p.next()
        if c in (" ", "\t"):
            c = yield from p.after_blanks()
        if not c and n_given:
            return False
        if c != "=" or not key:
            raise NotACall
        if not n_given:
            p.begin(name, id)
        p.argument(f"{', ' if n_given else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        p.mark()
        n_given += 1
        text, is_whole = yield from _value(p)
        if not is_whole and text.rstrip().endswith(f"){close.strip()}"):
            text, is_whole = text.rpartition(")")[0], True
            p.back(f"){close.strip()}")
        if not is_whole and p.at_end and not p.by_model:
            return False
        p.argument(_as_json(text.strip()))
        p.mark()
        if not is_whole:
            raise Broken
        if (c := (yield from p.after_blanks())) != ",":
            p.back(c)
    if not n_given:
        p.begin(name, id)
    p.argument("}" if n_given else "{}")
    p.mark()
    return True


def _value(p: Parser) -> Step[tuple[str, bool]]:
    """(the text of a value, True) before the comma or the bracket that ends it; (the text, False) where the answer
    or the call ends first: within brackets, or within a string whose last quote is missing."""
    text, quote, depth, is_closed = "", "", 0, False
    while c := (yield from p.next()):
        if quote:
            if c == "\\":
                text += c
                c = yield from p.next()
            elif c == quote and (yield from _is_last_quote(p, depth)):
                quote = ""
            elif not is_closed and c in p.end_begins and (state := (yield from p.call_ends(c, _CLOSED))):
                is_closed = state == "closed"
                if not is_closed:
                    p.back("" if state == "cut" else c)
                    break
        elif c in "\"'":
            quote = c
        elif c in _OPEN:
            depth += 1
        elif depth and c in _CLOSE:
            depth -= 1
        elif not depth and c in ",)" and not (c == "," and text[-1:].isdigit() and (yield from _is_digit(p))):  # 1,000
            p.back(c)
            return text.strip(), True
        elif (yield from _ends(p, c)):
            return re.sub(r"\)\s*\]?\s*$", "", text), False
        text += c
    return text, False


def _ends(p: Parser, c: str) -> Step[bool]:
    """True if syntax that ends the calls begins with a character that was read, which then is not."""
    p.back(c)
    end = yield from p.trigger(p.ends)
    p.back(end)
    if not end:
        yield from p.next()
    return bool(end)


def _is_digit(p: Parser) -> Step[bool]:
    c = yield from p.next()
    p.back(c)
    return c.isdigit()


def _is_last_quote(p: Parser, depth: int) -> Step[bool]:
    """True if the quote that was read ends its string, by what follows: models write some within strings, too."""
    n_before = len(p.raw)
    c = yield from p.after_blanks()
    is_last = not c or c in ")]}" or (c in ",:" and depth > 0)
    if c == "," and not depth:  # behind it stands another argument
        c = yield from p.after_blanks()
        n = 0
        while c and (c == "_" or c.isalnum()) and n < MAX_NAME:
            n += 1
            c = yield from p.next()
        if c in (" ", "\t"):
            c = yield from p.after_blanks()
        is_last = not c or (c == "=" and n > 0) or (c == ")" and not n)
    p.back(p.raw[n_before:])
    return is_last


def _as_json(text: str) -> str:
    """A Python or JSON literal as JSON, other text as a string."""
    if text[:1] not in ("'", '"', "(", "[", "{"):
        return bare(text)
    text_as_json = as_json(text)
    if text[:1] not in ("'", '"', "(") or not text_as_json.startswith('"') or text_as_json == text:
        return text_as_json
    python = from_python(text)
    if python is not None and (text[0] == "(" or python.startswith('"')):
        return python
    return json.dumps(text[1:].removesuffix(text[0]), ensure_ascii=False) if text[0] != "(" else text_as_json


def argument_rules(function: Mapping[str, Any], i: int) -> list[str]:
    """Rules of the arguments of function number i, in the order of its properties; the first rule
    is given_i."""
    schema, properties, required = parameters_of(function)
    named = list(properties.items())
    rules = [f"given_{i}: first_{i}_0", f'first_{i}_{len(named)}: ""', f'more_{i}_{len(named)}: ""']
    for k, (name, inner) in enumerate(named):
        one = f"{quoted(name + '=')} value_{i}_{k}"
        more = f'"," " "? {one}'
        skipped = "" if name in required else f" | first_{i}_{k + 1}"
        text = function.get(TEXT)
        value = [f"value_{i}_{k}: {value_rule(inner, schema)}"] if text is None else json_string(text, f"value_{i}_{k}")
        rules += [
            *value,
            f"first_{i}_{k}: {one} more_{i}_{k + 1}{skipped}",
            f"more_{i}_{k}: {more if name in required else f'({more})?'} more_{i}_{k + 1}",
        ]
    return rules


def value_rule(schema: Any, whole: Mapping[str, Any]) -> str:
    """Rule of a value: JSON, or a Python literal."""
    rule, python = json_rule(standalone(schema, whole)), literal(schema, whole)
    return f"({rule} | {python})" if python and python != rule else rule
