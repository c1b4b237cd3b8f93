"""Tools that a provider defines: skipped, or functions with published parameters. Types are the SDKs' own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from anthropic.types.beta import BetaToolUnionParam
from openai.types.responses import ToolParam

from logitless.frontend.dialects.hosted_tools import client_tool, is_hosted
from tests.helpers.chat_fakes import HERMES_LIKE, chatting, prompt, says
from tests.helpers.http_fakes import Running
from tests.server.test_refusals import refused

ASK: Any = [{"role": "user", "content": "x"}]
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
OWN = {"function", "custom", "namespace", "mcp"}
CLIENT_RUN = ("bash_", "text_editor_", "memory_", "computer_2")


def literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for inner in get_args(hint):
            yield from literals(inner)


def types_of(union: Any) -> list[str]:
    found = {kind for each in get_args(union) for kind in literals(get_type_hints(each, include_extras=True)["type"])}
    return sorted(found - OWN)


OPENAI, ANTHROPIC = types_of(ToolParam), types_of(BetaToolUnionParam)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with chatting(HERMES_LIKE, n_ctx=1 << 16) as started:
        yield started


async def post(server: Running, path: str, body: Any) -> tuple[int, str, Any]:
    async with server.http.post(server.url + path, json=body) as reply:
        return reply.status, reply.headers.get("X-Skipped-Tools", ""), await reply.json()


async def refused_message(server: Running, body: Any, named: str) -> None:
    status, reply = await server.post("/v1/messages", body)
    assert (status, reply["type"]) == (400, "error")
    assert named in reply["error"]["message"]


def test_sdks_have_types() -> None:
    assert {"web_search", "file_search", "code_interpreter", "image_generation"} <= set(OPENAI)
    assert {"bash_20250124", "text_editor_20250728", "memory_20250818", "web_search_20250305"} <= set(ANTHROPIC)


@pytest.mark.parametrize("kind", [*OPENAI, "retrieval", "openrouter:web_search"])
async def test_responses_skip_tools_of_the_service(server: Running, kind: str, caplog: pytest.LogCaptureFixture):
    says(server, "Two.")
    with caplog.at_level(logging.WARNING):
        status, skipped, reply = await post(server, "/v1/responses", {"input": "x", "tools": [ADD, {"type": kind}]})
    assert (status, skipped, reply["output"][0]["content"][0]["text"]) == (200, kind, "Two.")
    assert [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()] == [
        f"field 'tools': nobody here runs tools of type '{kind}'; they are skipped"
    ]
    assert "add" in prompt(server)
    assert kind not in prompt(server)


@pytest.mark.parametrize("kind", ANTHROPIC)
async def test_messages_skip_tools_of_the_service_and_take_those_of_the_client(server: Running, kind: str):
    says(server, "Two.")
    size = {"display_width_px": 800, "display_height_px": 600}
    body = {"messages": ASK, "max_tokens": 9, "tools": [{"type": kind, "name": "thing", **size}]}
    status, skipped, reply = await post(server, "/v1/messages", body)
    assert (status, reply["content"][0]["text"]) == (200, "Two.")
    is_function = kind.startswith(CLIENT_RUN)
    assert skipped == ("" if is_function else kind)
    assert ('"name": "thing"' in prompt(server)) == is_function


async def test_a_chat_skips_them_streamed_and_without_a_tool_left(server: Running):
    says(server, "Two.")
    body = {"messages": ASK, "tools": [{"type": "web_search"}, {"type": "web_search"}, {"type": "x"}], "stream": True}
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as reply:
        assert (reply.status, reply.headers["X-Skipped-Tools"]) == (200, "web_search, x")
        assert '"content":"T"' in await reply.text()


@pytest.mark.parametrize(
    "choice",
    [{"type": "web_search"}, "required", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}],
)
async def test_a_choice_of_a_skipped_tool_is_refused(server: Running, choice: Any):
    body = {"input": "x", "messages": ASK, "tools": [{"type": "web_search"}], "tool_choice": choice}
    cure = "field 'tool_choice': nobody here runs 'web_search': leave it to auto, or name a tool of type function"
    await refused(server, "/v1/responses", body, named=cure)
    await refused(server, "/v1/chat/completions", body, named=cure)


async def test_a_function_with_the_name_of_a_skipped_tool_may_be_chosen(server: Running):
    says(server, "Two.")
    function = {"type": "function", "function": {"name": "web_search", "parameters": {"type": "object"}}}
    choice = {"type": "function", "function": {"name": "web_search"}}
    body = {"messages": ASK, "tools": [{"type": "web_search"}, function], "tool_choice": choice}
    assert (await post(server, "/v1/chat/completions", body))[0] == 200


async def test_a_choice_among_tools_leaves_the_skipped_ones_out(server: Running):
    says(server, "Two.")
    allowed = [{"type": "function", "name": "add"}, {"type": "image_generation"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    body = {"input": "x", "tools": [ADD, {"type": "image_generation"}], "tool_choice": choice}
    assert (await post(server, "/v1/responses", body))[:2] == (200, "image_generation")


async def test_a_named_choice_of_a_skipped_tool_is_refused_in_messages(server: Running):
    body = {"messages": ASK, "max_tokens": 9, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    chosen = {**body, "tool_choice": {"type": "tool", "name": "web_search"}}
    await refused_message(server, chosen, "nobody here runs 'web_search'")


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "functoin", "name": "f", "parameters": {}},
        {"type": "Function", "function": {"name": "f"}},
        {"type": "customized", "name": "f", "input_schema": {"type": "object"}},
        {"type": "mcp", "server_label": "a"},
        {"type": 7},
    ],
)
async def test_a_function_of_a_wrong_type_is_refused(server: Running, tool: Any):
    await refused(server, "/v1/responses", {"input": "x", "tools": [tool]}, named="field 'tools[0].type'")
    await refused_message(server, {"messages": ASK, "tools": [tool]}, "field 'tools[0].type'")


def test_client_tools_have_the_published_parameters() -> None:
    """Parameters and commands of Anthropic's documentation, by version."""

    def made(kind: str, **more: Any) -> Any:
        tool = client_tool({"type": kind, "name": "n", **more})
        assert tool is not None
        return tool["parameters"]["properties"]

    assert set(made("bash_20250124")) == {"command", "restart"}
    newer, older = made("text_editor_20250728"), made("text_editor_20250124")
    assert newer["command"]["enum"] == ["view", "create", "str_replace", "insert"]
    assert older["command"]["enum"] == ["view", "create", "str_replace", "insert", "undo_edit"]
    assert set(newer) - set(older) == {"insert_text"}
    memory = made("memory_20250818")
    assert memory["command"]["enum"] == ["view", "create", "str_replace", "insert", "delete", "rename"]
    assert {"old_path", "new_path", "insert_text"} <= set(memory)
    assert "scroll" not in made("computer_20241022")["action"]["enum"]
    assert {"scroll_direction", "duration"} <= set(made("computer_20250124"))
    assert "region" not in made("computer_20251124")
    assert made("computer_20251124", enable_zoom=True)["region"]["minItems"] == 4
    assert client_tool({"type": "web_search_20250305", "name": "web_search"}) is None
    assert not is_hosted({"type": "custom", "name": "f"})
    assert not is_hosted({"name": "f"})
