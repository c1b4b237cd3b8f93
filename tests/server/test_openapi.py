"""OpenAPI document: equal to the application's routes."""

from __future__ import annotations

import json
import pkgutil
import re
from typing import Any

import pytest
from msgspec import to_builtins

from logitless.engine.async_engine import AsyncEngine
from logitless.server.app import make_app
from logitless.server.config import ServerConfig
from logitless.server.middleware import OPEN_TO_ALL
from logitless.server.openapi.document import document
from logitless.server.openapi.operations import OPERATIONS
from logitless.server.openapi.schemas import answer_schema, body_schema
from logitless.server.routes import JSON, all_routes
from logitless.server.ui.page import PAGE
from tests.helpers.http_fakes import running
from tests.helpers.paths import ROOT


async def test_it_is_served():
    async with running() as server, server.http.get(f"{server.url}/openapi.json") as response:
        assert response.status == 200
        told = await response.json()
    assert told["openapi"] == "3.1.0"
    assert "security" not in told
    assert told["paths"]["/v1/chat/completions"]["post"]["requestBody"]["required"] is True


def routes() -> set[tuple[str, str]]:
    """(method, path) of the application, but for the page."""
    app = make_app(AsyncEngine(), ServerConfig())
    found = {
        (route.method.lower(), route.resource.canonical.replace("{id:.+}", "{id}"))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD" and route.name != OPEN_TO_ALL
    }
    return {(method, path) for method, path in found if path not in PAGE}


async def test_every_route_is_in_it_and_no_page():
    async with running() as server, server.http.get(f"{server.url}/openapi.json") as response:
        paths = (await response.json())["paths"]
    told = {(method, path) for path, methods in paths.items() for method in methods}
    assert told == routes()


def test_nothing_is_described_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    described = {(each.method, name) for each in OPERATIONS for name in (each.path, *each.aliases)}
    assert described <= routes()


def test_each_route_has_its_handler() -> None:
    """Modules that are imported at their first request, too."""
    for route in all_routes():
        module, _, name = route.handler.rpartition(".")
        assert pkgutil.resolve_name(
            f"{module if module.startswith('logitless.') else f'logitless.server.api.{module}'}:{name}"
        )


def test_it_is_sound() -> None:
    """Ids are unique, references exist, parameters are those of the path, keys are asked for where there are some."""
    made = to_builtins(document("x", routes(), prefix="/api", keys=True))
    assert "a chat" in made["paths"]["/api/v1/chat/completions"]["post"]["summary"]
    operations = [operation for methods in made["paths"].values() for operation in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids))
    assert made["security"] == [{"key": []}]
    for path, methods in made["paths"].items():
        for operation in methods.values():
            names = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"]
            assert names == re.findall(r"{(\w+)}", path)
            assert all(reply["description"] for reply in operation["responses"].values())
    for reference in _references(made):
        target: Any = made
        for key in reference.removeprefix("#/").split("/"):
            target = target[key]
    json.dumps(made, allow_nan=False)


@pytest.mark.parametrize("vertex", [False, True])
def test_every_route_describes_its_answer(vertex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the struct that the handler returns; a failure of every route has its error."""
    if vertex:
        monkeypatch.setenv("AIP_MODE", "PREDICTION")
    paths = document("x", routes()).paths
    for method, path in routes():
        answers = paths[path][method]["responses"]
        operation = next(each for each in OPERATIONS if path in (each.path, *each.aliases) and each.method == method)
        for code in ("400", "503"):
            assert _references(answers[code]), (method, path)
        if operation.refused:
            assert not {"200", "204"} & answers.keys(), path
        elif operation.answer is operation.events is None:
            assert "content" not in answers[str(operation.empty)]
        else:
            schemas = [content["schema"] for content in answers["200"]["content"].values()]
            assert schemas
            assert all(schemas), (method, path)
            assert any(map(_references, schemas)) or operation.media != JSON or operation.events is Any, (method, path)


def test_one_name_is_one_object() -> None:
    found: dict[str, Any] = {}
    for operation in OPERATIONS:
        parts = [] if operation.body is None else [body_schema(operation.body)]
        parts += [answer_schema(kinds) for kinds in (operation.answer, operation.events) if kinds is not None]
        for _, components in parts:
            for name, schema in components.items():
                assert found.setdefault(name, schema) == schema, name


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [v for k, v in node.items() if k == "$ref"] + [r for v in node.values() for r in _references(v)]
    return [r for v in node for r in _references(v)] if isinstance(node, list) else []


async def test_a_field_of_another_type_than_told_is_refused():
    """What the document says about types is what the server checks."""
    wrong = {"number": "x", "integer": "x", "boolean": "x", "string": 1, "array": 1, "object": 1}
    operation = document("x", [("post", "/completion")]).paths["/completion"]["post"]
    fields = operation["requestBody"]["content"]["application/json"]["schema"]
    async with running() as server:
        for name, schema in fields["properties"].items():
            kinds = schema.get("type", [])
            if not kinds:
                continue
            status, body = await server.post("/completion", {"prompt": "a", name: wrong[kinds[0]]})
            assert status == 400, (name, body)
            assert name in body["error"]["message"]


def test_the_documentation_names_it() -> None:
    assert "/openapi.json" in (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


REQUIRED: list[tuple[str, list[str], list[list[str]]]] = [
    ("/completion", ["prompt"], []),
    ("/v1/completions", ["prompt"], []),
    ("/v1/chat/completions", ["messages"], []),
    ("/v1/responses", ["input"], []),
    ("/v1/embeddings", [], [["input", "content"]]),
    ("/v1/rerank", ["query"], [["documents", "texts"]]),
    ("/v1/verify", [], [["prompt", "id_slot"]]),
    ("/api/show", [], [["model", "name"]]),
    ("/tokenize", [], []),
]


async def test_required_fields_are_marked_and_their_absence_is_refused():
    async with running() as server:
        _, document = await server.get("/openapi.json")
        for path, required, either in REQUIRED:
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema["required"] == required
            names = [[one["required"][0] for one in group["anyOf"]] for group in schema.get("allOf", ())]
            assert names == either
            status, answer = await server.post(path, {})
            assert status == (400 if required or either else 200)
            vectors = path in ("/v1/embeddings", "/v1/rerank")  # this server makes none
            named = [name for name in (*required, *(group[0] for group in either)) if name in json.dumps(answer)]
            assert named or vectors or not (required or either)
