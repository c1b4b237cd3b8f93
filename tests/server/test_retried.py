"""Refusals in OpenAI's and Anthropic's clients: a permanent one is sent once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from tests.helpers.chat_fakes import HERMES_LIKE, chatting
from tests.helpers.http_fakes import running

PICTURE = {"url": "data:image/png;base64,AAAA"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def asked(*parts: Any) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, *parts]}]


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": asked({"type": "image_url", "image_url": PICTURE})}, "messages[0].content[1]"),
    ({"messages": asked({"type": "input_audio", "input_audio": {}})}, "messages[0].content[1]"),
    ({"messages": asked({"type": "file", "file": {}})}, "messages[0].content[1]"),
    ({"messages": asked({"type": "video_url", "video_url": {}})}, "messages[0].content[1]"),
    ({"messages": asked({"type": "hologram"})}, "messages[0].content[1]"),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": asked({"type": "input_image", "image_url": PICTURE["url"]})}, "input[0].content[1]"),
    ({"input": asked({"type": "input_file", "file_id": "file-1"})}, "input[0].content[1]"),
    ({"input": [{"type": "computer_call"}]}, "input[0]"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "background": True, "store": False}, "background"),
    ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": asked({"type": "image", "source": SOURCE})}, "messages[0].content[1]"),
    ({"messages": asked({"type": "document", "source": SOURCE})}, "messages[0].content[1]"),
    (
        {"messages": asked({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})},
        "messages[0].content[1].content[0]",
    ),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "extra_body": {"speculative.type": "draft-eagle3"}}, "speculative.type"),
    ({"prompt": "x", "extra_body": {"speculative.n_ctx": 9}}, "speculative.n_ctx"),
]


class Counting:
    """The statuses of a client's requests, in order."""

    def __init__(self, http: Any) -> None:
        self.statuses: list[int] = []
        send = http.send

        async def count(*args: Any, **kwargs: Any) -> Any:
            reply = await send(*args, **kwargs)
            self.statuses.append(reply.status_code)
            return reply

        http.send = count


async def test_refused_request_is_sent_once():
    async with chatting(HERMES_LIKE) as server:
        for stream in (False, True):
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
                counted = Counting(client._client)
                for create, cases, more in (
                    (client.chat.completions.create, CHATS, {}),
                    (client.responses.create, RESPONSES, {}),
                    (client.completions.create, COMPLETIONS, {}),
                ):
                    for body, named in cases:
                        counted.statuses.clear()
                        with pytest.raises(openai.BadRequestError) as caught:
                            await create(model="x", stream=stream, **body, **more)  # type: ignore[operator]
                        assert counted.statuses == [400], body
                        error: Any = caught.value
                        assert error.type == "invalid_request_error"
                        assert f"field '{named}" in error.body["message"], (body, error.body)
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x") as other:
                counted = Counting(other._client)
                for body, named in MESSAGES:
                    counted.statuses.clear()
                    with pytest.raises(anthropic.BadRequestError) as refused:
                        await other.messages.create(model="x", max_tokens=5, stream=stream, **body)
                    assert counted.statuses == [400]
                    assert f"field '{named}" in str(refused.value)


OFF = ("/metrics", "/slots/0?action=save", "/props", "/v1/files", "/v1/fine_tuning/jobs")


async def test_only_what_is_switched_off_is_a_501_and_is_sent_once():
    async with running() as server:
        for path in OFF:
            method = "GET" if path == "/metrics" else "POST"
            async with server.http.request(method, server.url + path, json={"filename": "a"}) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["type"]) == (501, "not_supported_error")
                assert "start" in error["message"]
                assert "--" in error["message"]
                assert reply.headers["x-should-retry"] == "false"
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            counted = Counting(client._client)
            with pytest.raises(openai.InternalServerError):
                await client.fine_tuning.jobs.create(model="x", training_file="file-1")
            assert counted.statuses == [501]


NEVER: list[tuple[str, dict[str, Any]]] = [
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["AAAA"]}}),
    ("/v1/embeddings", {"input": "x"}),
    ("/rerank", {"query": "x", "documents": ["x"]}),
    ("/v1/score", {"input": "x"}),
]


@pytest.mark.parametrize(("path", "body"), NEVER)
async def test_feature_missing_in_model_is_400(path: str, body: dict[str, Any]):
    async with running() as server:
        status, reply = await server.post(path, body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


async def test_a_model_without_a_template_refuses_chats():
    async with running() as server:
        assert server.service.served is not None
        server.service.served = replace(server.service.served, template=None)
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/apply-template"):
            said = {"messages": asked(), "input": "x"}
            status, reply = await server.post(path, said)
            assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), path
