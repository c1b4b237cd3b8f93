"""Deeply nested JSON: refused in every endpoint before a stack overflow."""

from __future__ import annotations

import json

import pytest

from logitless.engine.errors import InvalidRequest
from logitless.server.bodies.json_body import MAX_DEPTH, json_value
from tests.helpers.http_fakes import Running

BODIES = (  # with a place for what is nested deeply
    ("/v1/responses", '{"input": "a", "metadata": DEEP}'),
    ("/v1/responses", '{"input": "a", "metadata": DEEP, "stream": true}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a", "x": DEEP}]}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": DEEP}}'),
    (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "parameters": DEEP}}]}',
    ),
    (
        "/v1/messages",
        '{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": DEEP}]}',
    ),
    ("/completion", '{"prompt": "a", "n_predict": 1, "json_schema": {"properties": DEEP}}'),
    ("/completion", '{"prompt": "a", "n_predict": 1, "json_schema": {"x": DEEP}}'),
)


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * depth + "1" + closing * depth


def test_the_limit():
    for pair in (("[", "]"), ('{"a":', "}")):
        json_value(nested(MAX_DEPTH, *pair).encode())
        for depth in (MAX_DEPTH + 1, 980, 100_000):
            with pytest.raises(InvalidRequest, match="nested too deeply"):
                json_value(nested(depth, *pair).encode())
    wide = [["[[[[{{{{", []]] * MAX_DEPTH
    assert json_value(json.dumps(wide).encode()) == wide


@pytest.mark.parametrize("depth", [MAX_DEPTH - 5, *range(900, 1000, 14)])
async def test_everywhere(server: Running, depth: int):
    for path, body in BODIES:
        data = body.replace("DEEP", nested(depth)).encode()
        async with server.http.post(server.url + path, data=data) as reply:
            told = await reply.text()
        assert reply.status in ((400,) if depth > MAX_DEPTH else (200, 400)), (path, told)
        assert ("nested too deeply" in told) == (depth > MAX_DEPTH), (path, told)
        assert reply.status == 400 or '"error":{' not in told, (path, told)


async def test_arguments_that_are_text(server: Running):
    for depth in (300, 980, 100_000):
        function = {"name": "f", "arguments": nested(depth)}
        said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
        messages = [{"role": "user", "content": "a"}, said, {"role": "tool", "tool_call_id": "1", "content": "b"}]
        async with server.http.post(f"{server.url}/v1/chat/completions", json={"messages": messages}) as reply:
            assert reply.status in (200, 400), await reply.text()
