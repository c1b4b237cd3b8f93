"""Gemma 4 and FunctionGemma grammars: JSON schemas as Lark rules of dictionaries with bare keys.

Keys have the order of the model's template; texts stand between marks; there are no blanks.

Patterns, formats and conditions (`if`, `not`, …) are not enforced, nor anything that exceeds a limit below."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from logitless.models.grammar import in_regex, json_rule, quoted
from logitless.models.grammar.json_schema.walk import resolve

Schema = Mapping[str, Any]

_MAX_DEPTH = 64
_MAX_COUNT = 100_000  # characters or elements
_MAX_PARTS = 5_000  # of one tool's schema, as often as they are used
_BARE = r"""[^:{}\[\],<"\s]"""
_NEW_KEY = r"[\w.$-]{1,64}"  # of members that a schema does not name
_PLAIN_KEY = re.compile(rf"{_BARE}(?:[^:{{}}\[\],<\"\n]*{_BARE})?")
_OBJECT = ("properties", "required", "additionalProperties", "patternProperties")


@cache
def shared_rules(quote: str) -> tuple[str, ...]:
    """Rules of any value; the rules of schemas build on them. `quote`: the mark around texts."""
    mark = quoted(quote)
    return (
        f"any: TEXT | {json_rule({'type': 'number'})} | {json_rule({'type': 'boolean'})} | NULL | dict | list",
        'NULL: "null" | "None"',  # which Jinja writes
        f"TEXT: {mark} ( {_inside(quote)} ) {mark}",
        f'KEY: /{_NEW_KEY}/ ":"',
        'dict: "{" (KEY any ("," KEY any)*)? "}"',
        'list: "[" (any ("," any)*)? "]"',
    )


def _inside(quote: str) -> str:
    # the first: bytes that are no UTF-8 are in every complement
    return rf"/(?s:.*)/ & ~/(?s:.*){in_regex(quote)}(?s:.*)/"


def argument_rules(schema: Schema, name: str, quote: str) -> list[str]:
    """Lark rules of a tool's arguments: the rule `name`, and rules whose names begin with it."""
    writer = _Writer(schema, name, quote)
    start = writer.value(schema)
    return [f"{name}: {start}", *writer.rules]


class _Writer:
    def __init__(self, root: Schema, prefix: str, quote: str) -> None:
        self._quote = quote
        self.rules: list[str] = []
        self._root = root
        self._prefix = prefix
        self._refs: dict[str, str] = {}
        self._depth = 0
        self._n_parts = 0

    def value(self, schema: Any) -> str:
        """The right side of a rule for values of this schema, or the name of a rule."""
        self._n_parts += 1
        if not isinstance(schema, dict) or self._depth > _MAX_DEPTH or self._n_parts > _MAX_PARTS:
            return "any"
        self._depth += 1
        try:
            return self._of(schema)
        finally:
            self._depth -= 1

    def _of(self, schema: Schema) -> str:
        if isinstance(ref := schema.get("$ref"), str):
            return self._reference(ref)
        if "const" in schema:
            return _literals(self._quote, [schema["const"]])
        if isinstance(schema.get("enum"), list):
            return _literals(self._quote, schema["enum"])
        if isinstance(parts := schema.get("allOf"), list) and parts:
            return self.value(self._merged({**schema, "allOf": []}, *parts))
        for key in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(key), list) and choices:
                rest = {other: schema[other] for other in schema if other != key}
                return self._either([self._merged(rest, choice) if rest else choice for choice in choices])
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return self._either([{**schema, "type": one} for one in kind])
        if kind == "object" or (kind is None and any(key in schema for key in _OBJECT)):
            return self._object(schema)
        if kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            return self._array(schema)
        if kind == "string":
            return self._text(schema)
        if kind == "null":
            return "NULL"
        if kind in ("number", "integer", "boolean"):
            return json_rule({key: schema[key] for key in schema if key in _OF_NUMBERS})
        return "any"

    def _rule(self, right: str) -> str:
        """The name of a new rule."""
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {right}")
        return name

    def _either(self, schemas: Sequence[Any]) -> str:
        return self._rule(" | ".join(self._rule(self.value(schema)) for schema in schemas))

    def _reference(self, ref: str) -> str:
        if ref not in self._refs:
            self._refs[ref] = name = f"{self._prefix}_ref_{len(self._refs)}"
            self.rules.append(f"{name}: {self.value(self._target(ref))}")
        return self._refs[ref]

    def _target(self, ref: str) -> Any:
        """The part of the schema that a reference within it names; none: anything."""
        target = resolve(self._root, ref)
        return target[1] if target else True

    def _merged(self, *schemas: Any) -> dict[str, Any]:
        """One schema with the constraints of all; the last one wins where keywords contradict each other."""
        merged: dict[str, Any] = {}
        for schema in schemas:
            for _ in range(_MAX_DEPTH):
                if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                    break
                schema = self._target(schema["$ref"])
            if isinstance(schema, dict) and "$ref" not in schema:
                joined: dict[str, Any] = {}
                for key in ("properties", "required", "allOf"):
                    old, new = merged.get(key), schema.get(key)
                    if isinstance(old, dict) and isinstance(new, dict):
                        joined[key] = {**old, **new}
                    elif isinstance(old, list) and isinstance(new, list):
                        joined[key] = [*old, *new]
                merged = {**merged, **schema, **joined}
        return merged

    def _text(self, schema: Schema) -> str:
        least, most = _count(schema, "minLength") or 0, _count(schema, "maxLength")
        if not least and most is None:
            return "TEXT"
        name = f"{self._prefix.upper()}_{len(self.rules)}"
        length = f"{{{least},{'' if most is None else max(least, most)}}}"
        self.rules.append(
            f"{name}: {quoted(self._quote)} ( /(?s:.{length})/ & {_inside(self._quote)} ) {quoted(self._quote)}"
        )
        return name

    def _array(self, schema: Schema) -> str:
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(items, list):  # the older way to write prefixItems
            items, first = schema.get("additionalItems"), items
        first = first if isinstance(first, list) else []
        least, most = max(_count(schema, "minItems") or 0, len(first)), _count(schema, "maxItems")
        if items is False or (most is not None and most < least):
            most = least = len(first)
        if not first and most == 0:
            return '"[" "]"'
        parts = [self._rule(self.value(part)) for part in first]
        rest = ""
        if most is None or most > len(parts):
            item = self._rule(self.value(items))
            if not parts:
                parts, least = [item], max(least, 1) if least else 0
            rest = _times(f'("," {item})', max(least - len(parts), 0), None if most is None else most - len(parts))
        inside = ' "," '.join(parts) + f" {rest}"
        inside = inside if least else f"({inside})?"
        return self._rule(f'"[" {inside} "]"')

    def _object(self, schema: Schema) -> str:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        more = schema.get("additionalProperties", not properties or "patternProperties" in schema)
        if not properties and not required and (more is True or more == {}):
            return "dict"
        named = {**dict.fromkeys(required, more if isinstance(more, dict) else True), **properties}
        names = [name for name in named if named[name] is not False and self._quote not in name]
        names.sort(key=lambda name: (name.lower(), name))  # as Jinja's dictsort
        first, later = '""', '""'
        if more is not False:
            key = f"{self._prefix.upper()}_KEY_{len(self.rules)}"
            names_in_regex = "|".join(in_regex(name) for name in names)
            self.rules.append(f'{key}: ( /{_NEW_KEY}/{f" & ~/({names_in_regex})/" if names_in_regex else ""} ) ":"')
            extra = self._rule(f"{key} {self.value(more)}")
            first, later = f'({extra} ("," {extra})*)?', f'("," {extra})*'
        for name in reversed(names):
            member = self._rule(f"{quoted(_key(self._quote, name) + ':')} {self._rule(self.value(named[name]))}")
            alone = f"{member} {later}"
            first = self._rule(alone if name in required else f"{alone} | {first}")
            later = self._rule(f'"," {member} {later}' if name in required else f'("," {member})? {later}')
        return self._rule(f'"{{" {first} "}}"')


_OF_NUMBERS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _times(part: str, least: int, most: int | None) -> str:
    return f"{part}*" if not least and most is None else f"{part}{{{least},{'' if most is None else most}}}"


def _count(schema: Schema, key: str) -> int | None:
    count = schema.get(key)
    if not isinstance(count, int | float) or isinstance(count, bool):
        return None
    return int(count) if 0 <= count <= _MAX_COUNT else None


def _literals(quote: str, values: Sequence[Any]) -> str:
    texts = [text for value in values if (text := _notation(quote, value)) is not None]
    return f"({' | '.join(map(quoted, texts))})" if texts else "any"


def _notation(quote: str, value: Any) -> str | None:
    """A value in the template's notation; None if it cannot be written."""
    if isinstance(value, str):
        return None if quote in value else f"{quote}{value}{quote}"
    if isinstance(value, list):
        parts = [_notation(quote, part) for part in value]
        return None if None in parts else f"[{','.join(map(str, parts))}]"
    if isinstance(value, dict):
        members = [(key, _notation(quote, value[key])) for key in sorted(value, key=lambda key: (key.lower(), key))]
        if any(text is None or quote in key for key, text in members):
            return None
        return f"{{{','.join(f'{_key(quote, key)}:{text}' for key, text in members)}}}"
    return json.dumps(value)


def _key(quote: str, name: str) -> str:
    """A key in the template's notation: between marks if it would not be read as a bare key."""
    return name if _PLAIN_KEY.fullmatch(name) else f"{quote}{name}{quote}"
