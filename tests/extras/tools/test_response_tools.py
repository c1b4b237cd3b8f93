"""/v1/responses with tools of MCP servers: calls, approvals and bounds, parsed with OpenAI's strict types."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent

from logitless.extras.tools import response_turns as response_tools
from logitless.extras.tools.config import McpSettings
from logitless.extras.tools.settings import ToolSettings
from tests.helpers.bad_mcp_server import HERE
from tests.helpers.chat_fakes import HERMES_LIKE, chatting, named_events
from tests.helpers.http_fakes import Running
from tests.server.api.test_strict_types import parsed

SUMS = McpSettings("sums", (sys.executable, "-S", str(HERE)), seconds=20.0)
SERVERS = ToolSettings(servers=(SUMS,), web_search="sums_search")
MCP: dict[str, Any] = {"type": "mcp", "server_label": "sums", "require_approval": "never"}
ADD: Any = {"type": "function", "name": "own", "parameters": {"type": "object", "properties": {}}, "strict": False}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def by_turns(server: Running, *answers: str) -> None:
    """Answers of the next generations, one after the other; the last one stays."""
    waiting = [[*server.scheduler.tokenizer.encode(text, add_special=False), 257] for text in answers]
    submit = type(server.scheduler).submit

    def scripted(request: Any, client: str = "") -> Any:
        sequence = submit(server.scheduler, request, client)
        sequence.script = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return sequence

    server.scheduler.submit = scripted


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with chatting(HERMES_LIKE, n_ctx=8192, tools=SERVERS) as started:
        yield started


def kinds(items: list[Any]) -> list[str]:
    return [item["type"] for item in items]


def prompts(server: Running) -> list[str]:
    return [server.scheduler.tokenizer.pieces(request.prompt).decode() for request in server.scheduler.requests]


async def test_calls_until_an_answer(server: Running):
    by_turns(server, "Adding." + call("sums__add", a=1, b=2), call("sums__add", a=3, b=4), "It is 7.")
    asked = {"input": "1 + 2 + 4?", "tools": [MCP, ADD], "tool_choice": {"type": "mcp", "server_label": "sums"}}
    status, reply = await server.post("/v1/responses", asked)
    assert status == 200, reply
    assert kinds(reply["output"]) == ["mcp_list_tools", "message", "mcp_call", "mcp_call", "message"]
    response = parsed(Response, reply)
    assert response.output_text == "Adding.It is 7."
    listed, _, first, second, _ = response.output
    assert (listed.server_label, listed.tools[1].name) == ("sums", "add")
    assert (first.name, first.output, first.status, first.error) == ("add", "3", "completed", None)
    assert (second.arguments, second.output) == ('{"a": 3, "b": 4}', "7")
    assert prompts(server)[-1].endswith("[tool]7[assistant]")
    finished = server.scheduler.requests
    assert response.usage.input_tokens == sum(len(request.prompt) for request in finished)
    assert len(finished) == 3
    by_turns(server, "Yes.")
    more = {"input": "Sure?", "previous_response_id": reply["id"], "tools": [MCP]}
    _, later = await server.post("/v1/responses", more)
    assert kinds(later["output"]) == ["message"]  # the list is known
    assert "[tool]3" in prompts(server)[-1]
    _, items = await server.get(f"/v1/responses/{later['id']}/input_items")
    for item in items["data"]:
        parsed(ResponseItem, item)


async def test_the_stream_tells_the_same(server: Running):
    by_turns(server, "Adding." + call("sums__add", a=1, b=2), "It is 3.")
    data = await named_events(server, "/v1/responses", {"input": "1 + 2?", "tools": [MCP]})
    assert len(parsed(list[ResponseStreamEvent], data)) == len(data)
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    told = [event["type"].removeprefix("response.") for event in data]
    for kind in ("mcp_list_tools.completed", "mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed"):
        assert told.count(kind) == 1
    assert (told[0], told[-1]) == ("created", "completed")
    done = {event["output_index"]: event["item"] for event in data if event["type"].endswith("output_item.done")}
    added = [event["output_index"] for event in data if event["type"].endswith("output_item.added")]
    output = data[-1]["response"]["output"]
    assert added == list(range(len(output)))
    assert [done[i] for i in added] == output
    assert kinds(output) == ["mcp_list_tools", "message", "mcp_call", "message"]
    assert (await server.get(f"/v1/responses/{data[0]['response']['id']}"))[1]["output"] == output


@pytest.mark.parametrize("approve", [True, False])
async def test_approval(server: Running, approve: bool):
    by_turns(server, call("sums__add", a=1, b=2))
    first: Any = await server.openai.responses.create(
        model="m", input="1 + 2?", tools=[{**MCP, "require_approval": "always"}]
    )
    asked = first.output[-1]
    assert (asked.type, asked.name, asked.arguments) == ("mcp_approval_request", "add", '{"a": 1, "b": 2}')
    assert [item.type for item in first.output] == ["mcp_list_tools", "mcp_approval_request"]
    by_turns(server, "Well.")
    answer: Any = [{"type": "mcp_approval_response", "approval_request_id": asked.id, "approve": approve}]
    again = {"model": "m", "input": answer, "previous_response_id": first.id, "tools": [MCP]}
    second: Any = await server.openai.responses.create(**again)
    called = second.output[0]
    assert (called.type, called.approval_request_id) == ("mcp_call", asked.id)
    assert (called.output, called.status) == (("3", "completed") if approve else (None, "failed"))
    assert second.output_text == "Well."
    assert ("[tool]3" in prompts(server)[-1]) is approve
    assert (response_tools.REFUSED in prompts(server)[-1]) is not approve
    status, refused = await server.post("/v1/responses", {**again, "previous_response_id": second.id})
    assert (status, "no approval" in refused["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("approval", "asks"),
    [
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"tool_names": ["die"]}}, True),
        ({"always": {"tool_names": ["add"]}}, True),
        ({"always": {"tool_names": ["die"]}}, False),
        ({"never": {"read_only": True}}, True),
        (None, True),
    ],
)
async def test_approval_depends_on_the_tool(server: Running, approval: Any, asks: bool):
    by_turns(server, call("sums__add", a=1, b=2), "It is 3.")
    tool = {"type": "mcp", "server_label": "sums", "require_approval": approval}
    _, reply = await server.post("/v1/responses", {"input": "x", "tools": [tool]})
    assert ("mcp_approval_request" in kinds(reply["output"])) is asks


async def test_the_loop_is_bounded(server: Running, monkeypatch: pytest.MonkeyPatch):
    by_turns(server, call("sums__add", a=1, b=2))  # again and again
    _, reply = await server.post("/v1/responses", {"input": "x", "tools": [MCP], "max_tool_calls": 2})
    assert kinds(reply["output"])[:3] == ["mcp_list_tools", "mcp_call", "mcp_call"]
    assert len(server.scheduler.requests) == 3  # the last one has no tools
    monkeypatch.setattr(response_tools, "MAX_CALLS", 3)
    by_turns(server, call("sums__add", a=1, b=2) * 5)
    body = {"input": "x", "tools": [MCP], "parallel_tool_calls": True}
    _, reply = await server.post("/v1/responses", body)
    states = [item["status"] for item in reply["output"] if item["type"] == "mcp_call"]
    assert states == ["completed"] * 3 + ["failed"] * 2
    by_turns(server, call("sums__add", a=1, b=2))
    _, reply = await server.post("/v1/responses", {"input": "x", "tools": [MCP], "max_output_tokens": 20})
    assert (reply["status"], kinds(reply["output"])) == ("incomplete", ["mcp_list_tools"])  # the call was cut


async def test_failures_of_tools(server: Running):
    by_turns(server, call("sums__die"), "It died.")
    _, reply = await server.post("/v1/responses", {"input": "x", "tools": [MCP]})
    (called,) = [item for item in reply["output"] if item["type"] == "mcp_call"]
    assert called["status"] == "failed"
    assert "is down" in called["error"]["content"][0]["text"]
    assert parsed(Response, reply).output_text == "It died."
    by_turns(server, call("sums__add", a=1, b=1) + call("own"))
    _, reply = await server.post("/v1/responses", {"input": "x", "tools": [MCP, ADD], "parallel_tool_calls": True})
    assert kinds(reply["output"]) == ["mcp_list_tools", "mcp_call", "function_call"]  # the client has its turn


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"server_label": "other"}, "tools[0].server_label"),
        ({"server_label": None}, "tools[0].server_label"),
        ({"server_url": "http://169.254.169.254/"}, "tools[0].server_url"),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id"),
        ({"headers": {"a": "b"}}, "tools[0].headers"),
        ({"authorization": "x"}, "tools[0].authorization"),
        ({"require_approval": "perhaps"}, "tools[0].require_approval"),
        ({"require_approval": {"never": {"names": []}}}, "tools[0].require_approval.never"),
        ({"allowed_tools": "add"}, "tools[0].allowed_tools"),
    ],
)
async def test_refusals(server: Running, change: dict[str, Any], named: str):
    status, reply = await server.post("/v1/responses", {"input": "x", "tools": [{**MCP, **change}]})
    assert (status, f"'{named}'" in reply["error"]["message"]) == (400, True), reply


async def test_conflicting_fields_are_refused(server: Running):
    body = {"input": "x", "tools": [MCP]}
    assert (await server.post("/v1/responses", {**body, "background": True}))[0] == 400
    assert (await server.post("/v1/responses", {**body, "tools": [MCP, MCP]}))[0] == 400
    assert (await server.post("/v1/responses", body, headers={"X-Conversation-Id": "a"}))[0] == 400
    assert (await server.post("/v1/responses", {**body, "temperature": "hot"}))[0] == 400
    for given in ([1], [], None, 1, [{"type": "mcp_approval_response", "approval_request_id": "x", "approve": True}]):
        assert (await server.post("/v1/responses", {**body, "input": given}))[0] == 400
    allowed = {**MCP, "allowed_tools": ["pid"]}
    by_turns(server, "x")
    _, reply = await server.post("/v1/responses", {"input": "x", "tools": [allowed]})
    assert [tool["name"] for tool in reply["output"][0]["tools"]] == ["pid"]


async def test_mcp_tools_need_the_admin_key():
    body = {"input": "x", "tools": [MCP]}
    async with chatting(HERMES_LIKE) as server:
        status, refused = await server.post("/v1/responses", body)
        assert (status, "tools[0].type" in refused["error"]["message"]) == (400, True)
    key, admin = {"Authorization": "Bearer k"}, {"Authorization": "Bearer a"}
    async with chatting(HERMES_LIKE, n_ctx=8192, tools=SERVERS, api_keys=("k",), admin_api_key="a") as server:
        by_turns(server, "x")
        assert (await server.post("/v1/responses", body, headers=key))[0] == 403
        assert (await server.post("/v1/responses", body, headers=admin))[0] == 200


async def test_web_search(server: Running):
    search = {"type": "web_search", "search_context_size": "low"}
    by_turns(server, call("web_search", query="Ophir"), "It is lost.")
    asked = {"input": "Where is Ophir?", "tools": [search], "tool_choice": {"type": "web_search_preview"}}
    data = await named_events(server, "/v1/responses", asked)
    assert len(parsed(list[ResponseStreamEvent], data)) == len(data)
    kinds_told = [event["type"] for event in data]
    for kind in ("in_progress", "searching", "completed"):
        assert kinds_told.count(f"response.web_search_call.{kind}") == 1
    reply = parsed(Response, data[-1]["response"])
    result, message = reply.output
    assert (result.type, result.status, result.action.query) == ("web_search_call", "completed", "Ophir")
    assert message.content[0].text == "It is lost."
    assert prompts(server)[-1].endswith("[tool]Nothing is known of Ophir.[assistant]")
    by_turns(server, "Yes.")
    await server.post("/v1/responses", {"input": "Sure?", "previous_response_id": reply.id, "tools": [search]})
    assert "[tool]Nothing is known of Ophir." in prompts(server)[-1]
    for tools in ([search, search], [{**search, "filters": {"allowed_domains": ["a"]}}]):
        assert (await server.post("/v1/responses", {"input": "x", "tools": tools}))[0] == 400
