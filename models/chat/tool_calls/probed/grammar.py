"""Grammar of calls by a template's markers, and of values between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from logitless.models.chat.tool_calls.free_text import TEXT, json_string
from logitless.models.chat.tool_calls.probed.markers import ID, JSON, KEY, NUMBER, PYTHON, TAGGED, TYPE, Markers
from logitless.models.chat.tool_calls.probed.python_schema import any_rules, literal
from logitless.models.chat.tool_calls.probed.tagged import CDATA, CDATA_END
from logitless.models.grammar import in_regex, json_rule, quoted
from logitless.models.grammar.json_schema.prepare import parameters_of
from logitless.models.grammar.json_schema.walk import standalone
from logitless.models.grammar.lark import lark_rules

_PIECE = re.compile(rf"[ \t\r]*\n\s*|[{NUMBER}{ID}]|[^\n{NUMBER}{ID}]*[^\s{NUMBER}{ID}]|\s+")
_JSON_PIECE = re.compile(r'"[^"]*"|[{}:,\[\]]|[^\s"{}:,\[\]]+')
_OUTER_PIECE = re.compile(r"\[[A-Z_]+\]|<[^<>]+>|\w+\[|[^\s\[\],;<]+|[\[\],;<]")
_ID_PUNCTUATION = "_.:-"


def rules_of_calls(
    m: Markers, functions: Sequence[Mapping[str, Any]], parallel: bool, restart: str = "", n_letters: int = 9
) -> list[str]:
    """Rules of `calls` to these functions, whose arguments are the rules args_0, …, with W for blanks.

    `restart`: a text that may come first; `n_letters`: of an id behind `m.id_mark`."""
    rules = [*any_rules()] if m.style in (PYTHON, TAGGED) else []
    if m.style == TAGGED and m.cdata:
        rules += ["text: text_bare | text_within", _text("text_bare", m.value_end, "", CDATA)]
        rules.append(_text("text_within", CDATA_END + m.value_end, CDATA))
    elif m.style == TAGGED and KEY not in m.value_end:
        rules.append(_text("text", m.value_end))
    rule, between = (_spaced, " W? ") if m.style == JSON else (syntax_rule, " ")
    middle = quoted(m.middle) if m.middle.startswith("\n") else rule(m.middle)  # it ends the name
    id = f"({quoted(m.id_mark)} /[a-zA-Z0-9]{{{n_letters}}}/)?" if m.id_mark else ""
    for i, function in enumerate(functions):
        name = function["name"]
        named = quoted(json.dumps(name, ensure_ascii=False) if m.style == JSON else name)
        arguments = f"args_{i}"
        if m.style == TAGGED:
            arguments, values = _parameters(m, function, i)
            rules += values
        elif m.style == PYTHON:
            rules += _python_arguments(function, i)
            arguments = f'given_{i} ")"'
        parts = (rule(m.head), named, id, middle, arguments, _tail(m.tail), rule(m.end))
        rules.append(f"call_{i}: {between.join(part for part in parts if part)}")
    more = f"({between.join(part for part in (rule(m.separator + m.begin), 'call') if part)})*" if parallel else ""
    if parallel and m.style == JSON:
        more = f"(W? {more[1:]}"
    whole = (rule(m.section + m.begin), "call", f"{more} {rule(m.section_end)}".strip())
    again = f"{quoted(restart)}? " if restart else ""
    rules.append(f"calls: {again}{between.join(part for part in whole if part)}")
    return [*rules, f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]


def _spaced(text: str) -> str:
    """Lark of a marker around JSON, with blanks between its parts."""
    parts = _JSON_PIECE if text.lstrip().startswith(("{", ",", "}")) else _OUTER_PIECE
    return " W? ".join(syntax_rule(piece) for piece in parts.findall(text))


def syntax_rule(text: str) -> str:
    """Lark of a marker, whose line breaks and placeholders may vary."""
    parts = []
    pieces = _PIECE.findall(text)
    for piece, following in zip(pieces, [*pieces[1:], " "], strict=False):
        if piece == NUMBER:
            parts.append("/[0-9]{1,4}/")
        elif piece == ID:  # up to the marker behind it
            parts.append(f"/[a-zA-Z0-9{_ID_PUNCTUATION.replace(following[0], '')}]{{1,64}}/")
        else:
            parts.append(quoted(piece) if piece.strip() or "\n" not in piece else f"({quoted(piece)})?")
    return " ".join(parts)


def _python_arguments(function: Mapping[str, Any], i: int) -> list[str]:
    """Rules of the arguments of function number i, in the order of its properties; the first rule is given_i."""
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


def _tail(text: str) -> str:
    """Lark of an object's end, in which the id may be missing: few models write one."""
    if (id := re.search(rf',\s*"\w+":\s*"{ID}"', text)) is None:
        return _spaced(text)
    parts = (_spaced(text[: id.start()]), f"({_spaced(id[0])})?", _spaced(text[id.end() :]))
    return " W? ".join(part for part in parts if part)


def _text(rule: str, end: str, begin: str = "", not_begin: str = "") -> str:
    """Rule of a text up to and with `end`."""
    other = f" & ~/{in_regex(not_begin)}(?s:.*)/" if not_begin else ""
    return f"{rule}[lazy]: /{in_regex(begin)}(?s:.*){_line_breaks(in_regex(end))}/{other}"


def _line_breaks(regex: str) -> str:
    return regex.replace("\\\n", "\n").replace("\n", "\\n")


def tagged_value(schema: Any, whole: Mapping[str, Any], end: str, text: str = "text") -> str:
    """Rule of a value and the text `end` after it: strings are written without quotes, others as
    JSON or as Python does. Its grammar has any_rules().

    `text`: the rule of a string and `end`."""
    ends = quoted(end)
    if isinstance(schema, dict) and schema.get("type") == "string":
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(map(quoted, choices))}) {ends}"
        return text
    kind = schema.get("type") if isinstance(schema, dict) else None
    rule = value_rule if kind in ("object", "array", "boolean", "null") else _json_rule
    return f"{rule(schema, whole)} {ends}"


def _json_rule(schema: Any, whole: Mapping[str, Any]) -> str:
    return json_rule(standalone(schema, whole))


def tagged_rules(
    function: Mapping[str, Any], name: str, schema: Any, whole: Mapping[str, Any], end: str, text: str = "text"
) -> list[str]:
    """Rules of the value of a function's parameter and the text `end` after it; the first is `name`."""
    if (grammar := function.get(TEXT)) is not None:
        return lark_rules(grammar, name, end=end)
    return [f"{name}: {tagged_value(schema, whole, end, text)}"]


def _type_names(schema: Any) -> tuple[str, ...]:
    """JavaScript's names of the types that a value which is no text may have."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str):
        return ("number" if kind == "integer" else kind,)
    return ("number", "boolean", "null", "object", "array", "string")


def _parameters(m: Markers, function: Mapping[str, Any], i: int) -> tuple[str, list[str]]:
    """Lark of a call's tagged parameters, and the rules that it names."""
    schema, properties, required = parameters_of(function)
    rules, parts = [], []
    gap = syntax_rule(m.gap)
    for k, (name, inner) in enumerate(properties.items()):
        end, text = m.value_end.replace(KEY, name), "text"
        if KEY in m.value_end:
            text = f"text_{i}_{k}"
            rules.append(_text(text, end))
        rules += tagged_rules(function, f"value_{i}_{k}", inner, schema, end, text)
        is_text = function.get(TEXT) is not None or (isinstance(inner, dict) and inner.get("type") == "string")
        before, typed, after = m.key_end.partition(TYPE)
        kind = m.types[0] if is_text else m.types[1]
        key_end = quoted(f"{before}{kind}{after}")
        if typed and not kind:
            key_end = f"{quoted(before)} /{'|'.join(_type_names(inner))}/ {quoted(after)}"
        parameter = f"{syntax_rule(m.key_begin)} {quoted(name)} {key_end} value_{i}_{k} {gap}"
        parts.append(parameter if name in required else f"({parameter})?")
    return " ".join(parts), rules
