"""The HTTP reference as Markdown: every endpoint with the fields of its body, from the
declarations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from logitless.engine.sampling.params import FLOAT_MAX, INT_MAX, params_of
from logitless.server.openapi.document import OPERATIONS, Body
from logitless.server.openapi.requests import Schema, body_schema
from logitless.server.protocol.generation import Generation

_SHARED = "Generation fields"


def markdown() -> str:
    """The endpoints by tag, then the fields that every request that generates text has."""
    parts = []
    for tag in dict.fromkeys(row[3] for row in OPERATIONS):
        parts.append(f"## {tag}\n")
        for method, path, aliases, of, summary, body, streams in OPERATIONS:
            if of != tag:
                continue
            parts.append(f"### {method.upper()} {path}\n\n{_plain(summary)}.\n")
            if aliases:
                parts.append("Also " + ", ".join(f"`{name}`" for name in aliases) + ".\n")
            if streams:
                parts.append("The answer may be a stream of server-sent events.\n")
            parts += _fields(body)
    return "\n".join([*parts, f"## {_SHARED}\n", _table([Generation], ())])


def _fields(body: Body | None) -> list[str]:
    """The fields of a body; those of Generation by a link."""
    if body is None or isinstance(body, dict):
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
        schema, components = body_schema(kind)
        for name, (_, param) in params_of(kind).items():
            if name in hidden:
                continue
            field = schema["properties"][name]
            names = ", ".join(f"`{each}`" for each in (name, *param.aliases))
            needed = " (required)" if name in schema["required"] else ""
            meaning = _plain(param.doc) + _limits(field)
            rows.append((names + needed, _type(field, components), _default(field.get("default")), meaning))
    head = ("field", "type", "default", "meaning")
    lines = [head, ["---"] * len(head), *rows]
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
    told = ", ".join(part for part in parts if part)
    return f" ({told})" if told else ""


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return re.sub(r"([*_<\[])", r"\\\1", text)
