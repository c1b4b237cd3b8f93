"""HTTP reference as Markdown: every endpoint with the fields of its body and answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from logitless.engine.params import Generation
from logitless.engine.sampling.params import FLOAT_MAX, INT_MAX, params_of
from logitless.frontend.answers.errors import Error
from logitless.server.openapi.operations import ERRORS, OPERATIONS, Body
from logitless.server.openapi.schemas import Schema, answer_schema, object_schema, of_types
from logitless.server.routes import OLLAMA, Route

_SHARED = "Generation fields"


def markdown() -> str:
    """The endpoints by tag, the fields that every request that generates text has, and the answers' objects."""
    parts, objects = [], dict[str, Schema]()
    for error in (Error, *ERRORS.values()):
        objects |= answer_schema(error)[1]
    for tag in dict.fromkeys(each.tag for each in OPERATIONS):
        parts.append(f"## {tag}\n")
        for operation in OPERATIONS:
            if operation.tag == tag:
                parts += _operation(operation, objects)
    parts += [f"## {_SHARED}\n", _table([Generation], ()), "## Objects of answers\n"]
    return "\n".join([*parts, *(_object(name, schema) for name, schema in sorted(objects.items()))])


def _operation(operation: Route, objects: dict[str, Schema]) -> list[str]:
    """One endpoint; `objects` gets those that its answer refers to."""
    parts = [f"### {operation.method.upper()} {operation.path}\n\n{_plain(operation.summary)}.\n"]
    if operation.aliases:
        parts.append("Also " + ", ".join(f"`{name}`" for name in operation.aliases) + ".\n")
    if operation.query:
        schemas, _ = of_types(operation.query.values())
        pairs = zip(operation.query, schemas, strict=True)
        fields = [f"`{name}` {_linked(schema)}{_limits(schema)}" for name, schema in pairs]
        parts.append(f"Query: {'; '.join(fields)}.\n")
    return [*parts, *_fields(operation.body), *_answer(operation, objects)]


def _answer(operation: Route, objects: dict[str, Schema]) -> list[str]:
    """The types of an endpoint's answer and of its stream's events; `objects` gets those that they refer to."""
    lines = []
    if operation.answer is not None:
        schema, components = answer_schema(operation.answer)
        objects |= components
        lines.append(f"Answer: {_linked(schema)}.")
    if operation.events is not None:
        schema, components = answer_schema(operation.events)
        objects |= components
        stream = "With `stream`, server-sent events" if operation.answer else "Answer: server-sent events"
        stream = "Unless `stream` is false, lines of JSON" if operation.tag == OLLAMA else stream
        lines.append(f"{stream}: {_linked(schema)}." if schema else f"{stream}.")
    return [" ".join(lines) + "\n"] if lines else []


def _object(name: str, schema: Schema) -> str:
    """One object: its fields, their types and meanings."""
    rows = [("field", "type", "meaning"), ["---"] * 3]
    for key, field in schema["properties"].items():
        often = "" if key in schema["required"] else " (optional)"
        rows.append((f"`{key}`{often}", _linked(field), _plain(field.get("description", ""))))
    return f"### {name}\n\n{_plain(schema.get('description', ''))}\n\n{_rows(rows)}"


def _linked(schema: Schema) -> str:
    """The type of an answer's value, with links to the objects."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_linked(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("format") == "binary":
        return "the bytes"
    if schema.get("items"):
        return f"array of {_linked(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict) and schema["additionalProperties"]:
        return f"object of {_linked(schema['additionalProperties'])}"
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _fields(body: Body | None) -> list[str]:
    """The fields of a body; those of Generation by a link."""
    if not body:
        return []
    generates = any(issubclass(kind, Generation) for kind in body)
    parts = [_table(body, Generation.__struct_fields__ if generates else ())]
    if generates:
        parts.append(f"And the [generation fields](#{_SHARED.lower().replace(' ', '-')}).\n")
    return parts


def _table(kinds: Sequence[type[Struct]], hidden: Sequence[str]) -> str:
    """Names, type, default and meaning of the fields of these structs."""
    rows = []
    for kind in kinds:
        schema, components = object_schema((kind,))
        for name, (_, param) in params_of(kind).items():
            if name in hidden:
                continue
            field = schema["properties"][name]
            names = ", ".join(f"`{each}`" for each in (name, *param.aliases))
            needed = " (required)" if name in schema["required"] else ""
            meaning = _plain(param.doc) + _limits(field)
            rows.append((names + needed, _type(field, components), _default(field.get("default")), meaning))
    head = ("field", "type", "default", "meaning")
    return _rows([head, ["---"] * len(head), *rows])


def _rows(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _type(schema: Schema, components: dict[str, Schema]) -> str:
    """The JSON types that a schema allows, in words."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        kinds = [_type(part, components) for part in schema["anyOf"] if part != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    kinds = schema.get("type", "string" if "enum" in schema else "any")
    kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    words = " or ".join(kinds)
    inner = schema.get("items")
    return words.replace("array", f"array of {_type(inner, components)}") if inner else words


def _default(value: Any) -> str:
    if value is None or value in ("", (), [], {}):
        return ""
    return f"`{json.dumps(value)}`"


def _limits(schema: Schema) -> str:
    """The limits outside of which a value is refused."""
    parts = [", ".join(f"`{value}`" for value in schema.get("enum", ()) if value is not None)]
    if "minimum" in schema:
        parts.append(f"≥ {schema['minimum']}")
    if schema.get("maximum", INT_MAX) not in (INT_MAX, FLOAT_MAX, 1e38):
        parts.append(f"≤ {schema['maximum']}")
    if "maxItems" in schema:
        parts.append(f"at most {schema['maxItems']} items")
    text = ", ".join(part for part in parts if part)
    return f" ({text})" if text else ""


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return re.sub(r"([*_<\[])", r"\\\1", text)
