"""The API's own description, OpenAPI 3.1, as `/openapi.json` serves it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from logitless.frontend.answers import UNSET
from logitless.frontend.answers.errors import Error
from logitless.frontend.answers.models import ApiDocument
from logitless.server.openapi.operations import ERRORS, OPERATIONS
from logitless.server.openapi.schemas import Schema, answer_schema, body_schema, event_schema, of_types
from logitless.server.routes import BYTES, FORM, JSON, OLLAMA, Route

_FAILURES = {
    "400": "A field is wrong; the message names it.",
    "401": "The API key is missing or wrong.",
    "403": "This needs the admin key, or is not offered.",
    "404": "There is no such thing.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "429": "This client has too much in the queue.",
    "500": "The device, or this program, failed.",
    "501": "The operator has not switched this on.",
    "503": "The model is loading, or the server is full.",
    "507": "There is no room on the server's disk.",
}
_BY_ROUTE = {(each.method, name): each for each in OPERATIONS for name in (each.path, *each.aliases)}


def document(version: str, routes: Iterable[tuple[str, str]], *, prefix: str = "", keys: bool = False) -> ApiDocument:
    """The document of an application with these routes (method, path). `prefix` stands before each
    path; `keys`: requests need an API key."""
    paths: dict[str, Schema] = {}
    schemas: dict[str, Schema] = {}
    for method, path in sorted(routes):
        paths.setdefault(prefix + path, {})[method] = _operation(prefix + path, schemas, _BY_ROUTE[method, path])
    return ApiDocument(
        info={"title": "logitless", "version": version, "description": "One GGUF model, served."},
        paths=paths,
        components={"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        security=[{"key": []}] if keys else UNSET,
    )


def _operation(path: str, schemas: dict[str, Schema], operation: Route) -> Schema:
    """One operation of a path; `schemas` gets those that it refers to."""
    error = ERRORS.get(operation.tag, Error)
    schema, components = answer_schema(error)
    schemas |= components
    failure = {JSON: {"schema": schema}}
    described: Schema = {
        "operationId": f"{operation.method}{path.translate(str.maketrans('/-.{}', '_____'))}",
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {
            **_success(operation, error.__name__, schemas),
            **{code: {"description": text, "content": failure} for code, text in _FAILURES.items()},
        },
    }
    query = operation.query or {}
    parameters: list[Any] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": name == "action", "schema": schema}
        for name, schema in zip(query, of_types(query.values())[0], strict=True)
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema, components = body_schema(operation.body)
        schemas |= components
        content: Schema = {"schema": schema}
        if operation.example is not None:
            content["example"] = operation.example
        is_form = any(field.get("format") == "binary" for field in schema.get("properties", {}).values())
        described["requestBody"] = {"required": True, "content": {FORM if is_form else JSON: content}}
    if operation.raw:
        file = {"schema": {"type": "string", "format": "binary"}}
        described["requestBody"] = {"required": True, "content": {BYTES: file}}
    return described


def _success(operation: Route, error: str, schemas: dict[str, Schema]) -> Schema:
    """The response of a request that is not refused."""
    if operation.refused:
        return {}
    content: Schema = {}
    if operation.answer is not None:
        schema, components = answer_schema(operation.answer)
        content[operation.media] = {"schema": schema}
        schemas |= components
    if operation.events is not None and operation.tag == OLLAMA:
        schema, components = answer_schema(operation.events)
        content["application/x-ndjson"] = {"schema": {"anyOf": [schema, {"$ref": f"#/components/schemas/{error}"}]}}
        schemas |= components
    elif operation.events is not None:
        schema, components = event_schema(operation.events, error)
        content["text/event-stream"] = {"schema": schema}
        schemas |= components
    if not content:
        return {str(operation.empty): {"description": "Done."}}
    return {"200": {"description": "Done.", "content": content}}
