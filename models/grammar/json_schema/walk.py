"""Walk over JSON schemas: parts, JSON pointers, references, edits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

from logitless.models.grammar.errors import GrammarError

# Keywords whose value is a schema, a list of schemas, a map of names to schemas.
_SUBSCHEMAS = {
    *("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}

BRANCHES = ("anyOf", "oneOf", "allOf", "if", "then", "else", "dependentSchemas")
_MAX_DEPTH = 200
_PART = "part of another schema"
_IN_POINTER = "!$&'()*+,-./:;=?@_~"

Schema = dict[str, Any]
Edit = Callable[[Schema, str], Schema]  # (schema, its JSON pointer) → the edited schema


def subschemas(root: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, schema) of a schema and of every schema in it, a parent before its parts."""
    work = [("", root)]
    while work:
        path, schema = work.pop()
        yield path, schema
        if isinstance(schema, dict):
            work += reversed([(path + pointer(step), part) for step, part in parts(schema)])


def parts(schema: Schema) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(keys, schema) of the schemas directly in a schema."""
    for key, value in schema.items():
        if isinstance(value, dict):
            if key in _SUBSCHEMAS:
                yield (key,), value
            elif key in _MAPS:
                yield from (((key, name), part) for name, part in value.items())
        elif isinstance(value, list) and key in _LISTS:
            yield from (((key, i), part) for i, part in enumerate(value))


def pointer(keys: tuple[Any, ...]) -> str:
    """The JSON pointer of keys (RFC 6901)."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def reference(path: str) -> str:
    """The `$ref` of a JSON pointer."""
    return "#" + quote(path, safe=_IN_POINTER)


def resolve(root: Any, ref: object) -> tuple[str, Any] | None:
    """(JSON pointer, schema) of a reference within the schema; None if it leads nowhere.

    The pointer is read literally and, if that leads nowhere, percent-decoded (RFC 6901, section 6).
    """
    if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
        return None
    for path in (ref[1:], unquote(ref[1:])):
        part = root
        for step in path.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                break
        else:
            return path, part
    return None


def edited(schema: Any, edit: Edit, path: str = "", depth: int = 0) -> Any:
    """The schema with each schema in it edited, the innermost first."""
    if depth > _MAX_DEPTH:
        raise GrammarError("the schema is nested too deeply")
    if not isinstance(schema, dict):
        return schema
    result = {
        key: list(v) if isinstance(v, list) else dict(v) if isinstance(v, dict) else v for key, v in schema.items()
    }
    for step, part in list(parts(schema)):
        inner = edited(part, edit, path + pointer(step), depth + 1)
        if len(step) == 1:
            result[step[0]] = inner
        else:
            result[step[0]][step[1]] = inner
    return edit(result, path)


def standalone(schema: Any, root: Any) -> Any:
    """A part of a schema as a schema of its own, which has the targets of its references."""
    if not isinstance(schema, dict) or not any(isinstance(p, dict) and "$ref" in p for _, p in subschemas(schema)):
        return schema
    definitions = root.get("$defs")
    whole = {**root, "$defs": {**(definitions if isinstance(definitions, dict) else {}), _PART: schema}}
    whole = edited(with_definitions(whole), rerooted)
    part = whole["$defs"].pop(_PART)
    return {**part, "$defs": {**part.get("$defs", {}), "root": whole}}


def rerooted(schema: Schema, path: str) -> Schema:
    """The schema with its references into `#/$defs/root`."""
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        schema["$ref"] = "#/$defs/root" + ref[1:]
    return schema


def with_definitions(root: Schema) -> Schema:
    """The schema with every target of a reference in a place of schemas: targets elsewhere (`#/components/schemas/B`)
    are copied to `$defs`, by their pointers."""
    known, work = {path for path, _ in subschemas(root)}, list(subschemas(root))
    copied: Schema = {}
    while work:
        _, schema = work.pop()
        target = resolve(root, schema.get("$ref")) if isinstance(schema, dict) else None
        if target and target[0] not in known:
            known.add(target[0])
            copied[target[0]] = target[1]
            work += subschemas(target[1])
    if not copied:
        return root

    def moved(schema: Schema, path: str) -> Schema:
        target = resolve(root, schema.get("$ref"))
        if target and target[0] in copied:
            schema["$ref"] = reference("/$defs" + pointer((target[0],)))
        return schema

    definitions = root.get("$defs")
    root = {**root, "$defs": {**(definitions if isinstance(definitions, dict) else {}), **copied}}
    return dict(edited(root, moved))


def place(path: str) -> str:
    """The pointer in the client's schema, of a pointer in one `with_definitions`."""
    keys = path.split("/")
    if keys[1:3] == ["$defs", "root"] and len(keys) > 3:
        return place("/".join(["", *keys[3:]]))
    if keys[1:2] == ["$defs"] and len(keys) > 2 and keys[2].startswith("~1"):
        return "/".join([keys[2].replace("~1", "/").replace("~0", "~"), *keys[3:]])
    return path
