"""JSON Schema rewrites: keywords that the grammar engine lacks or misreads, in keywords that it reads rightly."""

from __future__ import annotations

import re
from typing import Any

from logitless.models.grammar.json_schema.walk import BRANCHES, Schema, parts, pointer, resolve, subschemas

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_VALUES = ("const", "default", "example", "examples")  # keywords whose value is not about schemas
_ANNOTATIONS = {"title", "description", "$comment"}

# The types that a keyword is about; `additionalProperties: true` says nothing, as in llama.cpp.
_ABOUT: dict[str, tuple[str, ...]] = {
    "object": (
        *("properties", "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties"),
    ),
    "array": (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
        *("contains", "minItems", "maxItems", "uniqueItems"),
    ),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # of strings
_SETTLED = ("type", "enum", "const", "$ref", "$dynamicRef")
_KEYWORDS = {  # the engine knows these, or refuses them under `strict`; all others are notes, as `deprecated` is
    *(key for keys in _ABOUT.values() for key in keys), *_SETTLED, *BRANCHES,
    *("$schema", "$defs", "definitions", "$recursiveRef", "$recursiveAnchor", "$dynamicAnchor", "$vocabulary"),
    *("not", "minContains", "maxContains", "dependencies", "dependentRequired", "x-guidance"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}  # fmt: skip

_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {"time": f"^{_TIME}$", "date-time": f"^[0-9]{{4}}-(?:{_MONTHS})[Tt]{_TIME}$"}  # seconds end at 59

_CLASS = re.compile(r"\\(?:[pP](?:\{[^}]*\}|.)|.)|\[", re.DOTALL)
_CONTROLS = re.compile(r"\\[xupPcDWS0]|[\x00-\x1f]")  # what may bring control characters into a class

_ALL: tuple[Any, ...] = (True, {})  # schemas that everything fits
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    "unevaluatedItems": _ALL,
    "unevaluatedProperties": _ALL,
    "propertyNames": (*_ALL, {"type": "string"}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    "not": (False,),
    "then": _ALL,
    "else": _ALL,
    "format": ("",),
    "$recursiveAnchor": (False,),
}


def plain(schema: Schema, path: str) -> Schema:
    """The schema without keywords of the value null, whole counts as integers (`maxItems: 2.0`)."""
    for key, value in list(schema.items()):
        if value is None and key not in _VALUES:
            del schema[key]
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            schema[key] = int(value)
        elif key in ("properties", "patternProperties") and isinstance(value, dict):
            schema[key] = {name: True if part is None else part for name, part in value.items()}
    values, kind = schema.get("enum"), schema.get("type")
    if schema.get("nullable") is True and isinstance(values, list) and None in values and isinstance(kind, str):
        schema["type"] = [kind, "null"]  # as OpenAPI 3.0 writes null
    return schema


class Types:
    """Adds the `type` that a schema without one means by its other keywords, as llama.cpp does.

    A branch of a schema that says its type has none added, nor has a schema whose branches say it.
    """

    def __init__(self, root: Schema) -> None:
        self._reported: set[str] = set()
        for path, schema in subschemas(root):
            if not isinstance(schema, dict):
                continue
            settled = path in self._reported or _is_settled(schema)
            branches = [(step, part) for step, part in parts(schema) if step[0] in (*BRANCHES, "not")]
            by_branches = any(step[0] != "not" and _says_type(root, part, set()) for step, part in branches)
            if by_branches:
                self._reported.add(path)
            for step, _ in branches:
                alternative = step[0] in ("anyOf", "oneOf") or (step[0] == "allOf" and not by_branches)
                if settled or not alternative or (_kinds(schema) and not by_branches):
                    self._reported.add(path + pointer(step))

    def __call__(self, schema: Schema, path: str) -> Schema:
        kinds = _kinds(schema)
        if kinds and path not in self._reported and not _is_settled(schema):
            schema["type"] = kinds[0] if len(kinds) == 1 else kinds
        return schema


def _is_settled(schema: Schema) -> bool:
    return any(key in schema for key in _SETTLED)


def _says_type(root: Schema, schema: Any, visited: set[int]) -> bool:
    if not isinstance(schema, dict) or id(schema) in visited:
        return False
    visited.add(id(schema))
    target = resolve(root, schema.get("$ref"))
    return any(key in schema for key in ("type", "enum", "const", "$dynamicRef")) or any(
        _says_type(root, part, visited)
        for part in [*(part for step, part in parts(schema) if step[0] in BRANCHES), *([target[1]] if target else [])]
    )


def _kinds(schema: Schema) -> list[str]:
    return [
        kind
        for kind, keys in _ABOUT.items()
        if any(
            key in schema
            and (key != "additionalProperties" or schema[key] is not True)
            and (key != "format" or schema[key] in _FORMATS)
            for key in keys
        )
    ]


class Names:
    """`propertyNames` with an enumeration or a pattern, as the properties or patterns that it allows."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def __call__(self, schema: Schema, path: str) -> Schema:
        names = schema.get("propertyNames")
        if names is False:
            allowed: list[str] | None = []
            pattern = ""
        else:
            allowed, pattern = self._rule(names)
        if (allowed is None and not pattern) or "patternProperties" in schema or not _is_map(schema, "properties"):
            return schema
        others, own = schema.get("additionalProperties", True), schema.get("properties", {})
        del schema["propertyNames"]
        if allowed is not None:
            fit = {name: own.get(name, others) for name in allowed if name in own or others is not False}
            schema["properties"] = {**{name: part for name, part in own.items() if name in fit}, **fit}
        else:
            schema["properties"] = {name: part for name, part in own.items() if _matches(pattern, name)}
            if others is not False:
                schema["patternProperties"] = {pattern: others}
        schema["additionalProperties"] = False
        return schema

    def _rule(self, names: Any) -> tuple[list[str] | None, str]:
        """The names of an enumeration, or a pattern of names; neither: another rule, or none."""
        if not isinstance(names, dict):
            return None, ""
        if set(names) - {"$defs", *_ANNOTATIONS} == {"$ref"} and (target := resolve(self._root, names["$ref"])):
            return self._rule(target[1]) if target[1] is not names else (None, "")
        rules = set(names) - {"type", "$schema", "$id", *_ANNOTATIONS}
        if names.get("type", "string") != "string":
            return None, ""
        if rules == {"const"}:
            return [name for name in (names["const"],) if isinstance(name, str)], ""
        if rules == {"enum"} and isinstance(names["enum"], list):
            return [name for name in names["enum"] if isinstance(name, str)], ""
        if rules == {"pattern"} and isinstance(names["pattern"], str):
            return None, names["pattern"]
        if rules and rules <= {"minLength", "maxLength"}:
            least, most = names.get("minLength", 0), names.get("maxLength", "")
            return None, rf"^[\s\S]{{{least},{most}}}$"
        return None, ""


def _is_map(schema: Schema, key: str) -> bool:
    return isinstance(schema.get(key, {}), dict)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def engine_forms(schema: Schema, path: str) -> Schema:
    """The schema in the engine's words: patterns whose classes it quotes rightly, formats without second 60, closed
    arrays."""
    if schema.get("unevaluatedItems") is False and not schema.keys() & {"items", "additionalItems", *BRANCHES, "$ref"}:
        del schema["unevaluatedItems"]
        schema["items"] = False
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = without_nul(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {without_nul(pattern): part for pattern, part in patterns.items()}
    if isinstance(schema.get("format"), str) and schema["format"] in _PATTERNS:
        pattern = _PATTERNS[schema.pop("format")]
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern
    return schema


def without_nul(pattern: str) -> str:
    """The pattern, its classes without the character NUL.

    A class with all control characters lets the engine write `\\"` and `\\\\`, whether or not the
    class has them; one without NUL does not. In a class `[` and `\\b` are characters, as in
    JavaScript."""
    result, at = [], 0
    while match := _CLASS.search(pattern, at):
        result.append(pattern[at : match.start()])
        text, at = match[0], match.end()
        if text == "[":
            text, at = _class(pattern, match.start())
            if text.startswith("[^") or _CONTROLS.search(text):
                text = rf"[{text}&&[^\x00]]"
        elif text[1] in "pP":
            text = rf"[{text}&&[^\x00]]"
        result.append(text)
    return "".join(result) + pattern[at:]


def _class(pattern: str, start: int) -> tuple[str, int]:
    """The class of characters that begins here, in the engine's words, and its end."""
    at = start + (2 if pattern[start + 1 : start + 2] == "^" else 1)
    text, depth = pattern[start:at], 1
    while at < len(pattern) and depth:
        step = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(step)
        nested = step == "[" and (pattern[at : at + 1] == ":" or text.endswith("&&"))
        depth += nested - (step == "]")
        text += r"\x08" if step == r"\b" else r"\[" if step == "[" and not nested else step
    return text, at


def exclusive(schema: Schema, path: str) -> Schema:
    """A `oneOf` whose branches only require members, as branches that leave out what the others require."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or len(branches) < 2 or "anyOf" in schema:
        return schema
    if not all(isinstance(b, dict) and b.keys() - _ANNOTATIONS - {"type"} == {"required"} for b in branches):
        return schema
    if not all(isinstance(b["required"], list) and b.get("type", "object") == "object" for b in branches):
        return schema
    sets = [set(map(str, branch["required"])) for branch in branches]
    if any(other <= own for i, own in enumerate(sets) for j, other in enumerate(sets) if i != j):
        return schema
    del schema["oneOf"]
    everything = set().union(*sets)
    schema["anyOf"] = [
        {**branch, "properties": dict.fromkeys(sorted(everything - own), False)}
        for branch, own in zip(branches, sets, strict=True)
    ]
    return schema


def drop_idle(schema: Schema, path: str) -> Schema:
    """The schema without notes, and without keywords that the engine does not know and that say nothing."""
    for key in schema.keys() - _KEYWORDS:
        del schema[key]
    if (schema.get("minContains") == 0 and "maxContains" not in schema) or "contains" not in schema:
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    for key, idle in _IDLE.items():
        if any(type(schema.get(key)) is type(value) and schema[key] == value for value in idle):
            del schema[key]
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    return schema
