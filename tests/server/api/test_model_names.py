"""The field `model`: a finetuned model answers by its name, and one that is not there is refused."""

from __future__ import annotations

from typing import Any

from tests.helpers.http_fakes import FakeAdapters, running


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
            for model, shown in ((FakeAdapters.NAME, FakeAdapters.NAME), ("any", "fake.gguf")):
                status, reply = await server.post(path, {**body, "model": model})
                assert (status, reply["model"]) == (200, shown), path
                async with server.http.post(server.url + path, json={**body, "model": model, "stream": True}) as told:
                    assert f'"model":"{shown}"' in await told.text(), path
            status, reply = await server.post(path, {**body, "model": "ft:fake:me:2"})
            assert (status, reply["error"]["type"]) == (404, "not_found_error"), path
