"""Python literals of JSON schemas as Lark rules: single quotes, True, False and None, as templates write them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from logitless.models.grammar import json_rule, quoted
from logitless.models.grammar.json_schema.walk import resolve

_MAX_PARTS = 200  # of one schema, as often as they are used
_MAX_CHARS = 20_000
_NOTES = frozenset(("type", "description", "title", "default", "examples"))
_STRING = r"/'([^'\\]|\\['\"\\nt])*'/"
_COMMA, _COLON = '"," " "?', '":" " "?'
_ANY = "py_any"


@cache
def any_rules() -> tuple[str, ...]:
    """Rules of any literal, on which those of schemas build."""
    value = json_rule({"type": ["string", "number"]})
    return (
        f'{_ANY}: {_STRING} | {value} | "True" | "False" | "None" | py_list | py_dict',
        f'py_list: "[" ({_ANY} ({_COMMA} {_ANY})*)? "]"',
        f'py_dict: "{{" (py_key {_ANY} ({_COMMA} py_key {_ANY})*)? "}}"',
        f"py_key: {_STRING} {_COLON}",
    )


def literal(schema: Any, whole: Mapping[str, Any]) -> str:
    """Lark of the literals of a schema, with any_rules(); "": only its JSON is known. `whole`: the schema with its
    definitions."""
    text = _literal(schema, whole, [])
    return text if len(text) <= _MAX_CHARS else ""


def _literal(schema: Any, whole: Mapping[str, Any], parts: list[Any]) -> str:
    """`parts`: the schemas so far."""
    parts.append(schema)
    if schema is True or schema == {}:
        return _ANY
    if not isinstance(schema, dict) or len(parts) > _MAX_PARTS:
        return ""
    keys = schema.keys() - _NOTES
    if keys == {"$ref"}:
        target = resolve(whole, schema["$ref"])
        return _literal(target[1], whole, parts) if target else ""
    for key in ("anyOf", "oneOf"):
        if keys == {key} and "type" not in schema:
            return _either([_literal(choice, whole, parts) for choice in schema[key]])
    if keys == {"enum"} or keys == {"const"}:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return _either([quoted(repr(value)) for value in values])
    kind = schema.get("type")
    if isinstance(kind, list) and not keys:
        return _either([_literal({"type": one}, whole, parts) for one in kind])
    if kind == "object" and keys <= {"properties", "required", "additionalProperties"}:
        return _object(schema, whole, parts)
    if kind == "array" and keys <= {"items"}:
        item = _literal(schema.get("items", True), whole, parts)
        return "" if not item or len(item) > _MAX_CHARS else f'"[" ({item} ({_COMMA} {item})*)? "]"'
    if kind == "string":
        return json_rule(schema) if keys else f"({_STRING} | {json_rule(schema)})"
    if kind in ("integer", "number"):
        return json_rule(schema)
    return {"boolean": '("True" | "False")', "null": '"None"'}.get(kind, "") if isinstance(kind, str) else ""


def _either(choices: list[str]) -> str:
    is_known = choices and all(choices) and sum(map(len, choices)) <= _MAX_CHARS
    return f"({' | '.join(choices)})" if is_known else ""


def _object(schema: Mapping[str, Any], whole: Mapping[str, Any], parts: list[Any]) -> str:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not properties:
        return "" if required or schema.get("additionalProperties", True) not in (True, {}) else "py_dict"
    members = []
    for name, inner in properties.items():
        value = _literal(inner, whole, parts)
        if not value or len(value) > _MAX_CHARS:
            return ""
        members.append((f"({quoted(repr(name))} {_COLON} {value})", name in required))
    first, later = '""', '""'
    for part, is_required in reversed(members):
        first = f"{part} {later}" if is_required else f"({part} {later} | {first})"
        later = f"{_COMMA} {part} {later}" if is_required else f"({_COMMA} {part})? {later}"
        if len(first) > _MAX_CHARS:
            return ""
    return f'"{{" {first} "}}"'
