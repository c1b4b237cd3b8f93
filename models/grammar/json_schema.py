"""JSON schemas prepared for the grammar engine: valid references, closed objects, enforceable keywords.

An object with `properties` is closed unless its schema opens it, as in llama.cpp. A keyword that no
grammar can enforce (a pattern with look-around, a bound outside of 64 bits, an unknown `$schema`)
is dropped and logged; under `strict` it stays, and compilation reports its place."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from logitless.models.grammar.errors import GrammarError, reason
from logitless.models.grammar.vocabulary import LIMITS, byte_vocabulary

log = logging.getLogger("logitless.grammar")

# Keywords whose value is a schema, a list of schemas, a map of names to schemas.
_SUBSCHEMAS = (
    "items",
    "additionalProperties",
    "additionalItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_BRANCHES = ("anyOf", "oneOf", "allOf", "if", "then", "else", "dependentSchemas")
_OPENING = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_DESCRIBES_MEMBERS = ("properties", *_OPENING, "$ref", *_BRANCHES)
_NOT_ONLY_OBJECTS = (*_BRANCHES, "$ref", "$dynamicRef", "enum", "const", "not", "items", "prefixItems")
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
_IN_URI = "!#$%&'()*+,-./:;=?@_~"
_MAX_DEPTH = 200

# Keywords that are dropped where they cannot be enforced, with the types that they constrain.
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS = ("pattern", "format")
_DROPPABLE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_TEXTS, "minLength", "maxLength"), ("string",)),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), ("integer", "number")),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties"), ("object",)),
}

Schema = dict[str, Any]
Edit = Callable[[Schema, str], Schema]  # (schema, its JSON pointer) → the edited schema


def prepared(schema: Any, *, strict: bool = False) -> Any:
    """The schema as the grammar engine gets it.

    Each dropped keyword is one line of the log. An error that dropping keywords does not mend stays
    in the schema, and the engine reports it. Raises GrammarError if the schema is nested too
    deeply.
    """
    if not isinstance(schema, dict):
        return schema
    try:
        return json.loads(_prepared(json.dumps(schema), strict))
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def object_schema(schema: Any, *, strict: bool = False) -> Any:
    """The schema of a tool's arguments, which are an object whether or not its schema says so.

    Without `strict`, a schema that cannot be compiled becomes that of any object, with a line in
    the log, so that one tool does not disable the others.
    """
    if not isinstance(schema, dict) or not schema:
        return {"type": "object"}
    if "$ref" in schema:
        others = {key: schema[key] for key in schema if key != "$ref"}
        schema = {**others, "allOf": [{"$ref": schema["$ref"]}, *others.get("allOf", ())]}
    schema = {**schema, "type": "object"}
    if not strict and (problem := compile_error(prepared(schema))):
        log.warning("the schema of a tool's arguments is not enforced: %s", reason(problem)[:200])
        return {"type": "object"}
    return schema


def parameters_of(function: Mapping[str, Any]) -> tuple[Schema, dict[str, Any], list[str]]:
    """A tool's schema, its properties and the required ones, for formats that write each parameter
    by itself.

    GrammarError: the tool is strict, and its schema constrains parameters together.
    """
    schema = object_schema(function.get("parameters"))
    together = next((key for key in (*_BRANCHES, "not", "minProperties", "maxProperties") if key in schema), "")
    if function.get("strict") is True and together:
        raise GrammarError(f"tool {function['name']!r}: the model's format of calls cannot enforce {together}")
    properties, required = schema.get("properties"), schema.get("required")
    return schema, properties if isinstance(properties, dict) else {}, required if isinstance(required, list) else []


def compile_error(schema: Any) -> str:
    """The engine's message about a schema, compiled for a vocabulary of bytes; empty if it
    compiles."""
    from llguidance import LLMatcher, LLParserLimits

    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"lenient": True, "coerce_one_of": True}}
    lark = LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}\n")
    return str(LLMatcher(byte_vocabulary(), lark, log_level=0, limits=LLParserLimits(**LIMITS)).get_error())


def subschemas(root: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, schema) of a schema and of every schema in it, a parent before its parts."""
    work = [("", root)]
    while work:
        path, schema = work.pop()
        yield path, schema
        if isinstance(schema, dict):
            work += reversed([(path + _pointer(step), part) for step, part in _parts(schema)])


def resolve(root: Any, ref: str) -> tuple[str, Any] | None:
    """(JSON pointer, schema) of a reference within the schema; None if it leads nowhere.

    The pointer is read literally and, if that leads nowhere, percent-decoded (RFC 6901, section 6).
    """
    if ref != "#" and not ref.startswith("#/"):
        return None
    for pointer in (ref[1:], unquote(ref[1:])):
        part = root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                break
        else:
            return pointer, part
    return None


@functools.lru_cache(maxsize=256)
def _prepared(source: str, strict: bool) -> str:
    schema = json.loads(source)
    schema = _edited(schema, _Identifiers(schema))
    schema = _edited(_edited(schema, _Closing(schema)), _drop_idle)
    if not strict:
        schema = _edited(schema, _drop_wide_bounds)
        if compile_error(schema):
            schema = _edited(schema, _drop_unenforceable)
    return json.dumps(schema)


def _edited(schema: Any, edit: Edit, path: str = "", depth: int = 0) -> Any:
    """The schema with each schema in it edited, the innermost first."""
    if depth > _MAX_DEPTH:
        raise GrammarError("the schema is nested too deeply")
    if not isinstance(schema, dict):
        return schema
    result = {
        key: list(v) if isinstance(v, list) else dict(v) if isinstance(v, dict) else v for key, v in schema.items()
    }
    for step, part in list(_parts(schema)):
        inner = _edited(part, edit, path + _pointer(step), depth + 1)
        if len(step) == 1:
            result[step[0]] = inner
        else:
            result[step[0]][step[1]] = inner
    return edit(result, path)


def _parts(schema: Schema) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(keys, schema) of the schemas directly in a schema."""
    for key in _SUBSCHEMAS:
        if isinstance(schema.get(key), dict):
            yield (key,), schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from (((key, i), part) for i, part in enumerate(schema[key]))
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from (((key, name), part) for name, part in schema[key].items())


def _pointer(keys: tuple[Any, ...]) -> str:
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


class _Identifiers:
    """Percent-encodes `$ref`, and removes a `$schema` or `$id` that the engine cannot read."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def __call__(self, schema: Schema, path: str) -> Schema:
        dialect, base, ref = (schema.get(key) for key in ("$schema", "$id", "$ref"))
        if "$schema" in schema and not (isinstance(dialect, str) and _DRAFT.fullmatch(dialect)):
            del schema["$schema"]
        if "$id" in schema and not (isinstance(base, str) and quote(base, safe=_IN_URI) == base):
            del schema["$id"]
        if isinstance(ref, str):
            target = resolve(self._root, ref)
            schema["$ref"] = "#" + quote(target[0], safe="!$&'()*+,-./:;=?@_~") if target else quote(ref, safe=_IN_URI)
        return schema


class _Closing:
    """Closes objects with `properties`: no members beside the named ones and those of `required`.

    An object stays open if it has a keyword for other members (`additionalProperties`,
    `patternProperties`, `unevaluatedProperties`). Where a composition describes one object in
    several places (`allOf`, branches beside `properties`, the targets of their references), the
    places stay open; an `allOf` whose parts all can be closed has the members of them all, as in
    llama.cpp, and no others.
    """

    def __init__(self, root: Schema) -> None:
        composed = [(path, parts) for path, part in subschemas(root) if (parts := _composition(root, path, part))]
        inner = _reached(root, [part for _, parts in composed for part in parts])
        self._open = {*inner, *(path for path, _ in composed)}
        # of the outermost compositions, and of objects that are inner elsewhere
        self._members = {path: _members(root, path) for path, _ in composed if path not in inner}
        for path, schema in subschemas(root):
            target = resolve(root, str(schema.get("$ref", ""))) if isinstance(schema, dict) else None
            if target and path not in self._open and target[0] in inner:
                self._members[path] = _members(root, path)

    def __call__(self, schema: Schema, path: str) -> Schema:
        if names := self._members.get(path):
            own = schema.get("properties", {})
            schema["properties"] = {**dict.fromkeys(names, True), **own}
            schema["additionalProperties"] = False
            schema.setdefault("type", "object")
            return schema
        if not isinstance(schema.get("properties"), dict):
            return schema
        if schema.get("type") is None and not any(key in schema for key in _NOT_ONLY_OBJECTS):
            schema["type"] = "object"
        if path not in self._open and not any(key in schema for key in _OPENING):
            own, required = schema["properties"], schema.get("required")
            others = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
            schema["properties"] = own | {name: True for name in others if name not in own}
            schema["additionalProperties"] = False
        return schema


def _reached(root: Schema, paths: list[str]) -> set[str]:
    """Pointers of these schemas, of their branches and of the targets of their references."""
    reached = set(paths)
    work = [*paths]
    while work:
        path = work.pop()
        _, schema = resolve(root, f"#{path}") or ("", None)
        if isinstance(schema, dict):
            target = resolve(root, str(schema.get("$ref", "")))
            inner = {path + _pointer(step) for step, _ in _parts(schema) if step[0] in _BRANCHES}
            inner |= {target[0]} if target else set()
            work += inner - reached
            reached |= inner
    return reached


def _members(root: Schema, path: str) -> dict[str, None] | None:
    """Names of all members that a schema, its reference and its `allOf` describe; None: it may have others."""
    names: dict[str, None] = {}
    work, seen = [(path, False)], set[str]()
    while work:
        at, is_part = work.pop(0)
        _, schema = resolve(root, f"#{at}") or ("", None)
        if at in seen or schema is True:
            continue
        seen.add(at)
        if not isinstance(schema, dict) or schema.get("type", "object") != "object" or schema.keys() & {*_OPENING}:
            return None
        kinds = {step[0] for step, _ in _parts(schema) if step[0] in _BRANCHES}
        properties, target = schema.get("properties", {}), resolve(root, str(schema.get("$ref", "")))
        if not isinstance(properties, dict) or ("$ref" in schema and target is None):
            return None
        if kinds - ({"allOf", "anyOf", "oneOf"} if is_part else {"allOf"}):
            return None
        names |= dict.fromkeys(properties)
        work += [(at + _pointer(step), True) for step, _ in _parts(schema) if step[0] in kinds]
        work += [(target[0], True)] if target else []
    return names


def _composition(root: Schema, path: str, schema: Any) -> list[str]:
    """Pointers of the branches and the reference that describe members of the same object as the schema; none: it
    does so by itself."""
    if not isinstance(schema, dict):
        return []
    branches = [(step, part) for step, part in _parts(schema) if step[0] in _BRANCHES]
    describing = [step for step, part in branches if isinstance(part, dict) and set(part) & {*_DESCRIBES_MEMBERS}]
    alternatives = {step[0] for step in describing} in ({"anyOf"}, {"oneOf"})
    own = [key for key in ("properties", "$ref") if key in schema]
    if len(own) < 2 and (not describing or (not own and (alternatives or len(describing) == 1))):
        return []
    target = resolve(root, str(schema.get("$ref", "")))
    return [*(path + _pointer(step) for step in describing), *([target[0]] if target else [])]


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


def _drop_idle(schema: Schema, path: str) -> Schema:
    """The schema without keywords that the engine does not know and that say nothing."""
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


def _drop_wide_bounds(schema: Schema, path: str) -> Schema:
    """The schema without bounds outside of 64 bits: the engine would move them."""
    for key in _BOUNDS:
        value = schema.get(key)
        if isinstance(value, int | float) and not -(2**63) < value < 2**63:
            del schema[key]
            _log_dropped(path, (key,), "the bound is outside of 64 bits")
    return schema


def _drop_unenforceable(schema: Schema, path: str) -> Schema:
    """The schema without the keywords that do not compile even on their own."""
    for key, types in _DROPPABLE.items():
        value = schema.get(key)
        if isinstance(value, bool) or not isinstance(value, str if key in _TEXTS else int | float):
            continue  # absent, or malformed: the engine's error stays
        problem = next((text for type in types if (text := compile_error({"type": type, key: value}))), "")
        if problem:
            del schema[key]
            _log_dropped(path, (key,), problem)
    patterns = schema.get("patternProperties")
    for pattern in list(patterns) if isinstance(patterns, dict) else ():
        if problem := compile_error({"type": "object", "patternProperties": {pattern: {}}}):
            del schema["patternProperties"][pattern]
            _log_dropped(path, ("patternProperties", pattern), problem)
    return schema


def _log_dropped(path: str, keys: tuple[str, ...], problem: str) -> None:
    log.warning("JSON schema: %s is not enforced: %s", path + _pointer(keys), reason(problem)[:200])
