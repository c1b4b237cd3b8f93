"""Pythonic tool calls, f(x=1, y='a'): reader, and grammar of the arguments."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from logitless.models.chat.tool_calls.call_object import MAX_NAME
from logitless.models.chat.tool_calls.free_text import TEXT, json_string
from logitless.models.chat.tool_calls.parser import NotACall, Parser, Step
from logitless.models.chat.tool_calls.tagged import as_json
from logitless.models.grammar import json_rule, quoted
from logitless.models.grammar.json_schema import parameters_of, standalone

_OPEN, _CLOSE = "([{", ")]}"
_PLAIN = frozenset(("type", "description", "title", "default", "examples"))
_STRING = r"/'([^'\\]|\\['\"\\nt])*'/"


def arguments(p: Parser, name: str, id: str | None) -> Step[bool]:
    """Begin the call and read its arguments, whose opening bracket has been read, up to the closing
    one.

    The call is told as JSON, a value when it is whole. False: the answer ended in the arguments.
    """
    n_given = 0
    while True:
        c = yield from p.after_blanks()
        if c == ")":
            break
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
        text = yield from _value(p)
        if text is None:
            return False
        p.argument(_as_json(text))
        p.mark()
        if (c := (yield from p.after_blanks())) != ",":
            p.back(c)
    if not n_given:
        p.begin(name, id)
    p.argument("}" if n_given else "{}")
    p.mark()
    return True


def _value(p: Parser) -> Step[str | None]:
    """The text of a value, before the comma or the bracket that ends it; None where the answer ends
    first."""
    text, quote, depth = "", "", 0
    while c := (yield from p.next()):
        if quote:
            if c == "\\":
                text += c
                c = yield from p.next()
            elif c == quote:
                quote = ""
        elif c in "\"'":
            quote = c
        elif c in _OPEN:
            depth += 1
        elif depth and c in _CLOSE:
            depth -= 1
        elif not depth and c in ",)":
            p.back(c)
            return text.strip()
        text += c
    return None


def _as_json(text: str) -> str:
    """A Python or JSON literal as JSON, other text as a string."""
    text_as_json = as_json(text)
    if text[:1] not in ("'", '"', "[", "{", "(") or not text_as_json.startswith('"') or text.startswith('"'):
        return text_as_json
    # models write line breaks in strings as they are
    for literal in (text, text.replace("\n", "\\n")):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.dumps(ast.literal_eval(literal), ensure_ascii=False, allow_nan=False)
    return text_as_json


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
        value = (
            [f"value_{i}_{k}: {_value_rule(inner, schema)}"] if text is None else json_string(text, f"value_{i}_{k}")
        )
        rules += [
            *value,
            f"first_{i}_{k}: {one} more_{i}_{k + 1}{skipped}",
            f"more_{i}_{k}: {more if name in required else f'({more})?'} more_{i}_{k + 1}",
        ]
    return rules


def _value_rule(schema: Any, whole: Mapping[str, Any]) -> str:
    """Rule of a value: JSON, and Python's words for booleans and its strings."""
    rules = [json_rule(standalone(schema, whole))]
    if isinstance(schema, dict):
        choices: Sequence[Any] = schema["enum"] if isinstance(schema.get("enum"), list) else ()
        rules += [quoted(repr(choice)) for choice in choices if isinstance(choice, str | bool)]
        if schema.get("type") == "boolean" and not choices:
            rules += ['"True"', '"False"']
        if schema.get("type") == "string" and set(schema) <= _PLAIN:
            rules.append(_STRING)
    return "(" + " | ".join(rules) + ")" if len(rules) > 1 else rules[0]
