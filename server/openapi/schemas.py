"""JSON schemas of bodies, answers and events, from the types that parsers read and handlers return."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.json import schema_components

from logitless.engine.sampling.params import Param, params_of
from logitless.frontend.answers.generation import GenerationSettings
from logitless.frontend.lora import Scales
from logitless.server.openapi.operations import Body
from logitless.training.config import AUTO

Schema = dict[str, Any]
Described = tuple[Schema, dict[str, Schema]]
"""A schema, and the schemas that it refers to, by name."""

_SAMPLERS = params_of(GenerationSettings)  # their fields have the requests' declarations


def of_types(kinds: Iterable[Any]) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    """(schema of each type, schemas that they refer to)."""
    return schema_components(kinds, ref_template="#/components/schemas/{name}")


def body_schema(body: Body) -> Described:
    """The schema of a body."""
    if body == (Scales,):  # an array
        schema, components = object_schema(body)
        return schema["properties"]["body"], components
    if isinstance(body, tuple):
        return object_schema(body) if body else ({"type": "object"}, {})
    parts = [object_schema((kind,)) for kind in body]
    return {"anyOf": [*(schema for schema, _ in parts), {"type": "object"}]}, {}


def object_schema(kinds: tuple[type[Struct], ...]) -> Described:
    """The schema of an object with the fields of these structs."""
    _, components = of_types(kinds)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    either: list[Schema] = []  # of several names one is required
    for kind in kinds:
        own = components.pop(kind.__name__)
        for name, (_, param) in params_of(kind).items():
            needed = name in own["required"] or param.required
            schema = _declared(own["properties"][name], param, needed)
            properties |= dict.fromkeys((name, *param.aliases), schema)
            if needed and (others := (*param.aliases, *param.instead)):
                either.append({"anyOf": [{"required": [each]} for each in (name, *others)]})
            elif needed:
                required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | ({"allOf": either} if either else {}), components


def _declared(schema: Schema, param: Param, required: bool) -> Schema:
    """The schema of a field with its declaration's meaning and limits; null means the default."""
    schema = {**_binary(schema), "description": param.doc}
    if param.fields:
        kinds = [object_schema((kind,))[0]["properties"] for kind in param.fields]
        schema["properties"] = {name: _or_auto(field) for kind in kinds for name, field in kind.items()}
    if param.hard:
        schema |= {name: limit for name, limit in _limits(param) if math.isfinite(limit)}
    if param.choices:
        schema["enum"] = [*param.choices] if required else [*param.choices, None]
    if param.least:
        schema["minItems"] = param.least
    if param.most is not None:
        schema["maxItems"] = param.most
    if not required and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    elif not required and "anyOf" in schema and {"type": "null"} not in schema["anyOf"]:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema


def _limits(param: Param) -> tuple[tuple[str, float], ...]:
    return ("minimum", param.low), ("maximum", param.high)


def _or_auto(schema: Schema) -> Schema:
    """The schema of a hyperparameter, which may be "auto"."""
    rest: Schema = {name: schema[name] for name in ("description", "default") if name in schema}
    values = {name: value for name, value in schema.items() if name not in rest}
    return {**rest, "anyOf": [values, {"const": AUTO}]}


def _binary(schema: Schema) -> Schema:
    """Bytes are sent as they are, not in base64."""
    return {"type": "string", "format": "binary"} if "contentEncoding" in schema else schema


def answer_schema(answer: Any) -> Described:
    """The schema of an answer of this type, or of one of a list of types. All fields but those of
    Opt are always there."""
    schemas, components = of_types(answer if isinstance(answer, list) else [answer])
    for component in components.values():
        for name, field in component["properties"].items():
            if "default" in field:
                del field["default"]
                component["required"].append(name)
            if name in _SAMPLERS:
                field.setdefault("description", _SAMPLERS[name][1].doc)
    return {"anyOf": list(schemas)} if isinstance(answer, list) else _binary(schemas[0]), components


def event_schema(data: Any, error: str) -> Described:
    """The schema of a server-sent event with data of this type, or with this error."""
    if data is Any:
        return {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}, {}
    schema, components = answer_schema(data)
    either = {"anyOf": [schema, {"$ref": f"#/components/schemas/{error}"}]}
    json = {"contentMediaType": "application/json", "contentSchema": either}
    lines = {"type": "string", "anyOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": lines}}, components
