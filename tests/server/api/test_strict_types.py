"""Answers parsed strictly with the types of OpenAI's and Anthropic's clients."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.helpers.chat_fakes import THOUGHT, named_events, says
from tests.helpers.http_fakes import Running, running
from tests.server.api.test_completion import events

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
TEXTS = ["Two.", "", f"{THOUGHT}Two.", f"{THOUGHT}Adding.\n{CALL}\n{CALL}", CALL]
SCHEMA = {"type": "object", "properties": {"a": {}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ASK: Any = [{"role": "user", "content": "x"}]


def parsed(kind: Any, data: Any) -> Any:
    """The data as this type; ValidationError where a field is missing or has another type."""
    return adapter(kind).validate_json(json.dumps(data), strict=True)


adapter = cache(TypeAdapter)  # which takes 0.03 s to make


@pytest.mark.parametrize("limit", [200, 40])
@pytest.mark.parametrize("text", TEXTS)
async def test_answers(server: Running, text: str, limit: int):
    says(server, text)
    chat = {"messages": ASK, "tools": [CHAT_TOOL], "max_tokens": limit, "stream_options": {"include_usage": True}}
    for more in ({}, {"tools": [], "logprobs": True, "top_logprobs": 2}, {"return_token_ids": True, "n": 2}):
        status, reply = await server.post("/v1/chat/completions", {**chat, **more})
        assert status == 200, reply
        assert parsed(ChatCompletion, reply).choices
        for chunk in filter(None, await events(server, "/v1/chat/completions", {**chat, **more})):
            parsed(ChatCompletionChunk, chunk)
    tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
    said: dict[str, Any] = {"input": "x", "tools": [tool], "max_output_tokens": limit}
    _, reply = await server.post("/v1/responses", said)
    assert parsed(Response, reply).usage.input_tokens_details.cache_write_tokens >= 0
    for event in await named_events(server, "/v1/responses", said):
        parsed(ResponseStreamEvent, event)
    _, items = await server.get(f"/v1/responses/{reply['id']}/input_items")
    for item in items["data"]:
        parsed(ResponseItem, item)
    asked = {"messages": ASK, "max_tokens": limit, "tools": [{"name": "add", "input_schema": SCHEMA}]}
    _, reply = await server.post("/v1/messages", asked)
    assert parsed(Message, reply).usage.output_tokens >= 0
    for event in await named_events(server, "/v1/messages", asked):
        parsed(RawMessageStreamEvent, event)
    _, reply = await server.post("/v1/messages/count_tokens", {"messages": ASK})
    parsed(MessageTokensCount, reply)


async def test_completions_and_models(server: Running):
    says(server, "Two, é.")
    for more in ({}, {"logprobs": 2}, {"logprobs": True, "echo": False}, {"n": 2, "return_token_ids": True}):
        body = {"prompt": "x", "max_tokens": 5, **more}
        parsed(Completion, (await server.post("/v1/completions", body))[1])
        for chunk in filter(None, await events(server, "/v1/completions", body)):
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"  # OpenAI's own is null before the end
            parsed(Completion, chunk)
    _, reply = await server.get("/v1/models")
    assert [parsed(Model, model).id for model in reply["data"]] == ["fake"]
    headers = {"anthropic-version": "2023-06-01"}
    _, reply = await server.get("/v1/models", headers=headers)
    assert [parsed(ModelInfo, model).id for model in reply["data"]] == ["fake"]
    parsed(ModelInfo, (await server.get("/v1/models/fake", headers=headers))[1])


CAUSES: list[tuple[str, dict[str, Any], int, str]] = [
    ("POST", {"json": {}}, 400, "invalid_request_error"),
    ("POST", {"data": b"{"}, 400, "invalid_request_error"),
    ("POST", {"json": {"messages": ASK, "max_tokens": 5}, "headers": {"x-api-key": "no"}}, 401, "authentication_error"),
    ("POST", {"data": b"x" * 2000}, 413, "invalid_request_error"),
    ("POST", {"data": b"x", "headers": {"Content-Encoding": "br"}}, 415, "invalid_request_error"),
    ("PUT", {"json": {}}, 405, "invalid_request_error"),
    ("POST", {"json": {"messages": [{"role": "user", "content": "submit-boom"}]}}, 500, "api_error"),
    ("POST", {"json": {"messages": [{"role": "user", "content": "a" * 600}]}}, 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("method", "request_", "code", "kind"), CAUSES)
@pytest.mark.parametrize("path", ["/v1/messages", "//v1/messages/", "/v1/messages/count_tokens"])
async def test_errors_of_messages(path: str, method: str, request_: dict[str, Any], code: int, kind: str):
    if "count" in path and kind == "api_error":
        return
    async with running(api_keys=("k",), max_body=1000) as server:
        headers = {"x-api-key": "k"} | request_.get("headers", {})
        async with server.http.request(method, server.url + path, **{**request_, "headers": headers}) as reply:
            assert reply.status in (code, 200 if "count" in path else code), await reply.text()
            if reply.status != 200:
                found = parsed(ErrorResponse, await reply.json())
                assert (found.type, found.error.type) == ("error", kind)


async def test_errors_of_anthropics_clients_elsewhere(server: Running):
    for path in ("/v1/nothing", "/v1/models/nothing"):
        status, reply = await server.get(path, headers={"anthropic-version": "2023-06-01"})
        assert (status, parsed(ErrorResponse, reply).error.type) == (404, "not_found_error")
        assert set((await server.get(path))[1]) == {"error"}
