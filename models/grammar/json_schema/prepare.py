"""JSON schemas prepared for the grammar engine: valid references, closed objects, enforceable keywords.

An object with `properties` is closed unless its schema opens it, as in llama.cpp. A keyword that no
grammar can enforce (a pattern with look-around, a bound outside of 64 bits, an unknown `$schema`)
is dropped and logged; under `strict` it stays, and compilation reports its place."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from typing import Any
from urllib.parse import quote, urldefrag, urljoin

from logitless.models.grammar.errors import GrammarError, reason
from logitless.models.grammar.json_schema import rewrites
from logitless.models.grammar.json_schema.closing import Closing
from logitless.models.grammar.json_schema.walk import (
    BRANCHES,
    Schema,
    edited,
    parts,
    place,
    pointer,
    reference,
    rerooted,
    resolve,
    subschemas,
    with_definitions,
)
from logitless.models.grammar.vocabulary import LIMITS, byte_vocabulary

log = logging.getLogger("logitless.grammar")

_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
_MAX_LOOKED_AT = 500  # parts of a schema that are tried to find the one at fault
_MAX_LINKS = 20  # of a reference to a reference
_IN_URI = "!#$%&'()*+,-./:;=?@_~"

# Keywords that are dropped where they cannot be enforced, with the types that they constrain.
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS = ("pattern", "format")
_UNKNOWN = frozenset(  # keywords that the engine leaves out, unless the schema is strict
    (
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_DROPPABLE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_TEXTS, "minLength", "maxLength"), ("string",)),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), ("integer", "number")),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties"), ("object",)),
}

_FARTHEST = 2**63 - 1024  # the largest bound of the engine, which reads bounds as float64


def prepared(schema: Any, *, strict: bool = False) -> Any:
    """The schema as the grammar engine gets it.

    Each dropped keyword is one line of the log. An error that dropping keywords does not mend stays
    in the schema, and the engine reports it. Raises GrammarError if the schema is nested too
    deeply."""
    if not isinstance(schema, dict):
        return schema
    try:
        return json.loads(_prepared(json.dumps(schema), strict))
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def object_schema(schema: Any, *, strict: bool = False) -> Any:
    """The schema of a tool's arguments, which are an object whether or not its schema says so.

    Without `strict`, a schema that cannot be compiled becomes that of any object, with a line in
    the log, so that one tool does not disable the others."""
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

    GrammarError: the tool is strict, and its schema constrains parameters together."""
    schema = object_schema(function.get("parameters"))
    together = next((key for key in (*BRANCHES, "not", "minProperties", "maxProperties") if key in schema), "")
    if function.get("strict") is True and together:
        raise GrammarError(f"tool {function['name']!r}: the model's format of calls cannot enforce {together}")
    properties, required = schema.get("properties"), schema.get("required")
    return schema, properties if isinstance(properties, dict) else {}, required if isinstance(required, list) else []


def compile_error(schema: Any, *, strict: bool = False) -> str:
    """The engine's message about a schema, compiled for a vocabulary of bytes; empty if it compiles."""
    from llguidance import LLMatcher, LLParserLimits

    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"lenient": not strict, "coerce_one_of": not strict}}
    lark = LLMatcher.grammar_from_lark(f"start: %json {json.dumps(schema)}\n")
    return str(LLMatcher(byte_vocabulary(), lark, log_level=0, limits=LLParserLimits(**LIMITS)).get_error())


@functools.lru_cache(maxsize=256)
def _prepared(source: str, strict: bool) -> str:
    schema = edited(with_definitions(json.loads(source)), rewrites.plain)
    schema = with_definitions(edited(schema, _Identifiers(schema)))
    schema = edited(schema, rewrites.Types(schema))
    schema = edited(schema, rewrites.Names(schema))
    schema = edited(schema, rewrites.engine_forms)
    closed = edited(schema, Closing(schema))
    if strict:
        _check_alternatives(closed, schema)
        closed = edited(closed, _InlineAlternatives(closed))
    schema = edited(edited(closed, rewrites.exclusive), rewrites.drop_idle)
    if strict:
        return json.dumps(edited(schema, _nearer_bounds))
    schema = edited(schema, _drop_wide_bounds)
    if compile_error(schema):
        schema = edited(schema, _drop_unenforceable)
    _log_unknown(schema)
    return json.dumps(schema)


def fault(schema: Any, *, strict: bool = False) -> tuple[str, str] | None:
    """(JSON pointer, reason) of the innermost part of a schema at fault; None if it compiles by itself."""
    root = prepared(schema, strict=strict)
    if not isinstance(root, dict):
        return ("", reason(problem)) if (problem := compile_error(root, strict=strict)) else None
    within = {"$defs": {"root": edited(root, rerooted)}}
    visited: set[str] = set()

    def problem_of(path: str) -> str:
        part = resolve(within, "#/$defs/root" + path)
        assert part is not None
        own: Schema = part[1] if isinstance(part[1], dict) else {"allOf": [part[1]]}
        return compile_error({**own, "$defs": {**own.get("$defs", {}), **within["$defs"]}}, strict=strict)

    def innermost(path: str, problem: str) -> tuple[str, str]:
        visited.add(path)
        _, schema = resolve(root, f"#{path}") or ("", None)
        inner: list[tuple[bool, str]] = []
        if isinstance(schema, dict):
            inner = [("$ref" in part, path + pointer(step)) for step, part in parts(schema) if isinstance(part, dict)]
        target = resolve(root, schema.get("$ref")) if isinstance(schema, dict) else None
        for part in [*(part for _, part in sorted(inner, key=itemgetter(0))), *([target[0]] if target else [])]:
            if part not in visited and len(visited) < _MAX_LOOKED_AT and (text := problem_of(part)):
                return innermost(part, text)
            visited.add(part)
        return place(path), reason(problem)

    problem = compile_error(root, strict=strict)
    return innermost("", problem) if problem else None


def _check_alternatives(closed: Schema, schema: Schema) -> None:
    """GrammarError where an answer of one branch of a `oneOf` may fit another too: the engine compares closed objects,
    but a client that checks an answer reads the other branch as its schema has it, open."""
    for path, part in subschemas(schema):
        branches = part.get("oneOf") if isinstance(part, dict) else None
        target = resolve(closed, f"#{path}")
        if not isinstance(branches, list) or target is None:
            continue
        around = {key: value for key, value in part.items() if key not in BRANCHES and key != "$defs"}
        nearer = [_inlined(closed, branch) for branch in target[1].get("oneOf", ())]
        opened = [_inlined(schema, branch) for branch in branches]
        definitions = {"root": edited(closed, rerooted)}
        for i, one in enumerate(nearer):
            for j, other in enumerate(opened):
                if i == j or other == nearer[j] or _told_apart(one, other):
                    continue
                pair = {**around, "oneOf": [one, other]}
                problem = compile_error({**edited(pair, rerooted), "$defs": definitions}, strict=True)
                if "oneOf" in problem:
                    raise GrammarError(f"in the schema at {place(path) or '/'}: {reason(problem)}")


def _told_apart(one: Schema, other: Schema) -> bool:
    """True if two schemas have other types, or require a member of different constants: the usual case, without the
    engine."""

    def types(schema: Schema) -> set[str]:
        kinds = schema.get("type")
        names = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
        return names | {"integer"} if "number" in names else names

    def constants(schema: Schema) -> dict[str, list[Any]]:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return {}
        members = [(name, part) for name, part in properties.items() if name in required and isinstance(part, dict)]
        return {name: part.get("enum", [part["const"]] if "const" in part else []) for name, part in members}

    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if types(one) and types(other) and not types(one) & types(other):
        return True
    values, others = constants(one), constants(other)
    return any(
        values[name] and others.get(name) and not any(value in others[name] for value in values[name])
        for name in values
    )


class _InlineAlternatives:
    """Puts the targets of references into `oneOf`: the engine does not compare references. Alternatives that differ in
    their types or constants become `anyOf`: the engine does not compare schemas that refer to themselves."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def __call__(self, schema: Schema, path: str) -> Schema:
        if isinstance(branches := schema.get("oneOf"), list):
            inlined = [_inlined(self._root, branch) for branch in branches]
            apart = all(_told_apart(one, other) for one, other in itertools.combinations(inlined, 2))
            if apart and "anyOf" not in schema:
                schema["anyOf"] = schema.pop("oneOf")
            else:
                schema["oneOf"] = inlined
        return schema


def _inlined(root: Schema, branch: Any) -> Any:
    """A branch, or the target of one that is only a reference."""
    for _ in range(_MAX_LINKS):
        target = resolve(root, branch.get("$ref")) if isinstance(branch, dict) and set(branch) == {"$ref"} else None
        if target is None:
            return branch
        branch = target[1]
    return branch


class _Identifiers:
    """Writes references as pointers within the whole schema, those to a `$id` or an anchor, too; removes `$id`, and a
    `$schema` that the engine cannot read."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._places = {"": ""}  # pointers of what URIs name
        self._bases: dict[str, tuple[str, str]] = {}  # (URI, pointer) of the `$id` around each schema
        self._dynamic: Counter[str] = Counter()  # how often each dynamic anchor is set
        work: list[tuple[str, Any, str, str]] = [("", root, "", "")]
        while work:
            path, schema, uri, resource = work.pop()
            if not isinstance(schema, dict):
                continue
            if isinstance(name := schema.get("$id"), str):
                self._places.setdefault(_joined(uri, name), path)
                if not name.startswith("#"):  # an anchor, until draft 7
                    uri, resource = urldefrag(_joined(uri, name)).url, path
                    self._places.setdefault(uri, path)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(key), str):
                    self._places.setdefault(f"{uri}#{name}", path)
                    self._dynamic[name] += key == "$dynamicAnchor"
            self._bases[path] = uri, resource
            work += reversed([(path + pointer(step), part, uri, resource) for step, part in parts(schema)])

    def __call__(self, schema: Schema, path: str) -> Schema:
        dialect = schema.get("$schema")
        if "$schema" in schema and not (isinstance(dialect, str) and _DRAFT.fullmatch(dialect)):
            del schema["$schema"]
        schema.pop("$id", None)
        if self._dynamic[str(schema.get("$dynamicAnchor"))] == 1:
            del schema["$dynamicAnchor"]
        dynamic = schema.get("$dynamicRef")
        if isinstance(dynamic, str) and self._dynamic[dynamic.partition("#")[2]] == 1 and "$ref" not in schema:
            schema["$ref"] = schema.pop("$dynamicRef")
        if isinstance(ref := schema.get("$ref"), str):
            target = self._target(path, ref)
            schema["$ref"] = quote(ref, safe=_IN_URI) if target is None else reference(target)
            _, part = resolve(self._root, f"#{target}") or ("", None)
            if isinstance(part, dict) and "type" in schema and schema["type"] == part.get("type"):
                del schema["type"]  # said twice: the engine refuses keywords beside a reference to a schema around it
        return schema

    def _target(self, path: str, ref: str) -> str | None:
        """The pointer of a reference's target: within the `$id` around it, within the whole schema, of a URI."""
        uri, resource = self._bases[path]
        near = resolve(self._root, f"#{resource}{ref[1:]}") if resource and ref.startswith("#") else None
        if target := near or resolve(self._root, ref):
            return target[0]
        whole = _joined(uri, ref)
        if (place := self._places.get(whole)) is not None:
            return place
        base, fragment = urldefrag(whole)
        target = resolve(self._root, f"#{self._places[base]}{fragment}") if base in self._places else None
        return target[0] if target else None


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # no URI
        return uri


def _nearer_bounds(schema: Schema, path: str) -> Schema:
    """The schema with bounds outside of 64 bits drawn in to the farthest that the engine reads."""
    for key in _BOUNDS:
        value = schema.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value > _FARTHEST and key in ("maximum", "exclusiveMaximum"):
                schema[key] = _FARTHEST
            elif value < -_FARTHEST and key in ("minimum", "exclusiveMinimum"):
                schema[key] = -_FARTHEST
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
    log.warning("JSON schema: %s is not enforced: %s", place(path) + pointer(keys), reason(problem)[:200])


def _log_unknown(schema: Any) -> None:
    """One line of the log for all keywords that the engine leaves out."""
    names: list[str] = []

    def note(part: Schema, path: str) -> Schema:
        names.extend(place(path) + pointer((key,)) for key in part if key in _UNKNOWN and part[key] not in (False, {}))
        return part

    edited(schema, note)
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        log.warning("JSON schema: not enforced without strict: %s", ", ".join(names[:8])[:400] + more)
