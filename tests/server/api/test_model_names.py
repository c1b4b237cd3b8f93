"""The field `model`: a fine-tuned model answers by its name; an unknown name is refused."""

from __future__ import annotations

from typing import Any

import pytest

from logitless.server.config import ServerConfig
from tests.helpers.http_fakes import FakeAdapters, running


@pytest.mark.parametrize(
    ("path", "aliases", "model", "others"),
    [
        ("/models/qwen2.5-0.5b.gguf", (), "qwen2.5-0.5b", {"qwen2.5-0.5b.gguf"}),
        ("stories260K.gguf", (), "stories260K", set()),
        ("m/big-00001-of-00003.gguf", (), "big", {"big-00001-of-00003", "big-00001-of-00003.gguf"}),
        ("m/blob", (), "blob", set()),
        ("m/a.gguf", ("z", "b"), "b", {"z", "a", "a.gguf"}),
    ],
)
async def test_a_model_has_the_names_of_its_file(path: str, aliases: tuple[str, ...], model: str, others: set[str]):
    config = ServerConfig(model_path=path, alias=aliases[0] if aliases else "", aliases=aliases)
    assert (config.model, config.names) == (model, {model, path} | others)
    async with running(config) as server:
        assert (await server.get("/v1/models"))[1]["data"][0]["id"] == model
        assert (await server.get("/props"))[1]["model_alias"] == model
        for name in config.names - {path if path.startswith("/") else ""}:
            status, body = await server.get(f"/v1/models/{name}")
            assert (status, body["id"]) == (200, model), name
            assert (await server.post("/completion", {"prompt": "say:a", "model": name}))[1]["model"] == model
        assert (await server.get("/v1/models/other"))[0] == 404


async def test_a_finetuned_model_answers_by_its_name():
    messages = [{"role": "user", "content": "say:a"}]
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/completion", {"prompt": "say:a"}),
        ("/v1/completions", {"prompt": "say:a"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "say:a"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 9}),
    )
    async with running(adapters=FakeAdapters()) as server:
        for path, body in asked:
            for model, shown in ((FakeAdapters.NAME, FakeAdapters.NAME), ("any", "fake")):
                status, reply = await server.post(path, {**body, "model": model})
                assert (status, reply["model"]) == (200, shown), path
                async with server.http.post(server.url + path, json={**body, "model": model, "stream": True}) as told:
                    assert f'"model":"{shown}"' in await told.text(), path
            status, reply = await server.post(path, {**body, "model": "ft:fake:me:2"})
            assert (status, reply["error"]["type"]) == (404, "not_found_error"), path
