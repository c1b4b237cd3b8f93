"""/v1/messages through Anthropic's own client, on a fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from logitless.frontend.dialects.translate import whole_members
from tests.helpers.chat_fakes import THOUGHT, named_events, prompt, says
from tests.helpers.http_fakes import N_CTX, Running

ASK: Any = [{"role": "user", "content": "What is 1 + 1?"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'


@pytest.fixture
async def client(server: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


async def test_a_message(server: Running, client: anthropic.AsyncAnthropic):
    says(server, "Two, é.")
    reply = await client.messages.create(
        model="m",
        max_tokens=50,
        messages=ASK,
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
    )
    assert reply.id.startswith("msg_")
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "fake")
    assert [(block.type, block.text) for block in reply.content if block.type == "text"] == [("text", "Two, é.")]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    n_prompt = len(server.scheduler.requests[-1].prompt)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (n_prompt, 9)
    assert reply.usage.cache_read_input_tokens == 0
    assert prompt(server) == "<s>[system]Be\nbrief[user]What is 1 + 1?[assistant]"
    reply = await client.messages.create(model="m", max_tokens=3, messages=ASK)
    assert reply.stop_reason == "max_tokens"
    reply = await client.messages.create(model="m", max_tokens=9, messages=ASK, stop_sequences=["o,", "x"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "o,")
    assert reply.content[0].text == "Tw"  # type: ignore[union-attr]


async def test_the_most_tokens_by_default(server: Running):
    await server.post("/v1/messages", {"messages": ASK})
    assert server.scheduler.requests[-1].n_predict == 4096


MANY = '{"a": [1, {"b": 2}], "n": -12.5, "t": true, "s": "x\\"}", "z": null}'


@pytest.mark.parametrize("n", range(30, 38 + len(MANY)))
async def test_a_cut_call_has_only_members_that_were_written(server: Running, n: int):
    whole = json.loads(MANY)
    text = f'<tool_call>\n{{"name": "add", "arguments": {MANY}}}\n</tool_call>'
    says(server, text)
    _, reply = await server.post("/v1/messages", {"messages": ASK, "tools": [TOOL], "max_tokens": n})
    assert reply["stop_reason"] == "max_tokens"
    for block in reply["content"]:
        if block["type"] == "tool_use":
            assert list(block["input"].items()) == list(whole.items())[: len(block["input"])]
            written = text[:n].partition('"arguments": ')[2]
            assert len(block["input"]) == sum(f'"{name}": ' in written and _ended(written, name) for name in whole)


def _ended(written: str, name: str) -> bool:
    """Whether the member's value is whole in what was written, read by eye."""
    return written[written.index(f'"{name}": ') :].startswith(
        {"a": '"a": [1, {"b": 2}]', "n": '"n": -12.5,', "t": '"t": true', "s": '"s": "x\\"}"', "z": '"z": null'}[name]
    )


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("", {}), ("{", {}), ("[1]", {}), ("{}", {}), ("null", {}), ('{"a"', {}), ('{"a":', {}), ('{"a":1', {}),
        ('{"a":1,', {"a": 1}), ('{"a":1}', {"a": 1}), ('{ "a" : [1 , 2] , "b"', {"a": [1, 2]}), ('{"a":"x', {}),
        ('{"a":"x"', {"a": "x"}), ('{"a":tru', {}), ('{"a":NaN,"b":1}', {}), ('{"a":1e999}', {}), ('{5:1}', {}),
        ('{"a":1 "b":2}', {}), ('{"a":' + "[" * 5000, {}), ('{"a":{"b":1', {}), (' {"a":false', {"a": False}),
    ],
)  # fmt: skip
def test_whole_members(text: str, members: dict[str, Any]):
    assert whole_members(text) == members


TEXTS = ["Two.", f"{THOUGHT}Two.", f"{THOUGHT}Adding.\n{CALL}\n{CALL}", CALL, ""]


@pytest.mark.parametrize("text", TEXTS)
async def test_a_stream_adds_up_to_the_message(server: Running, client: anthropic.AsyncAnthropic, text: str):
    says(server, text)
    asked: Any = {"model": "m", "max_tokens": 400, "messages": ASK, "tools": [TOOL]}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        told = await stream.get_final_message()
    contents = [
        [block.model_dump(exclude={"id", "parsed_output"}) for block in reply.content] for reply in (told, whole)
    ]
    assert contents[0] == contents[1]
    assert (told.stop_reason, told.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert told.usage.input_tokens == whole.usage.input_tokens
    kinds = [block.type for block in whole.content]
    expected = ["thinking"] * ("<think>" in text) + ["text"] * ("Two" in text or "Add" in text)
    assert kinds == expected + ["tool_use"] * text.count("<tool_call>")
    assert whole.stop_reason == ("tool_use" if "<tool_call>" in text else "end_turn")
    for block in whole.content:
        if block.type == "tool_use":
            assert (block.name, block.input) == ("add", {"a": [1, "é"]})


async def test_event_names(server: Running):
    says(server, f"{THOUGHT}Two.")
    data = await named_events(server, "/v1/messages", {"messages": ASK})
    names = [d["type"] for d in data]
    assert [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "content_block_start",
        "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert not any("timings" in d for d in data)


async def test_tools_and_their_results(server: Running, client: anthropic.AsyncAnthropic):
    says(server, f"Adding.\n{CALL}")
    asked: Any = {"model": "m", "max_tokens": 400, "tools": [TOOL]}
    first = await client.messages.create(messages=ASK, **asked)
    used = first.content[1]
    assert used.type == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "Go on."},
    ]
    says(server, "Two.")
    content = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in first.content]
    messages = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    await client.messages.create(messages=messages, **asked)
    assert prompt(server).endswith(
        '[assistant]Adding.<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
        "[tool]2[user]Go on.[assistant]"
    )
    says(server, CALL)
    reply = await client.messages.create(messages=ASK, tool_choice={"type": "none"}, **asked)
    assert [block.type for block in reply.content] == ["text"]
    says(server, CALL * 2)
    reply = await client.messages.create(
        messages=ASK, tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **asked
    )
    assert [block.type for block in reply.content] == ["tool_use"]


async def test_field_of_remote_service_is_refused_by_name(server: Running):
    for name in ("mcp_servers", "container"):
        status, reply = await server.post("/v1/messages", {"messages": ASK, "max_tokens": 2, name: [{"type": "url"}]})
        assert (status, f"field '{name}'" in reply["error"]["message"]) == (400, True)


async def test_documents_and_references_are_text(server: Running, client: anthropic.AsyncAnthropic):
    says(server, "Two.")
    plain: Any = {"type": "text", "media_type": "text/plain", "data": "one\ntwo"}
    parts: Any = {"type": "content", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]}
    found: Any = {"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "found"}]}
    content: Any = [
        {"type": "text", "text": "Read:"},
        {"type": "document", "source": plain, "title": "A", "context": "B"},
        {"type": "document", "source": parts},
        {"type": "document", "source": {"type": "content", "content": "five"}},
        found,
    ]
    await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert prompt(server) == "<s>[user]Read:\nA\nB\none\ntwo\nthree\nfour\nfive\nT\ns\nfound[assistant]"
    used: Any = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": [
        {"type": "tool_reference", "tool_name": "add"}, {"type": "document", "source": plain}]}  # fmt: skip
    said: Any = [*ASK, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    await client.messages.create(model="m", max_tokens=9, messages=said, tools=[TOOL])
    assert "[tool]add\none\ntwo[assistant]" in prompt(server)
    for source in ({"type": "base64", "data": "AA"}, {"type": "url"}, {"type": "text"}, {"type": "content"}, None):
        blocks = [{"type": "document", "source": source}]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 2}
        status, reply = await server.post("/v1/messages", body)
        empty = source == {"type": "content"}
        assert (status, empty or "messages[0].content[0]" in reply["error"]["message"]) == (200 if empty else 400, True)


async def test_the_list_of_models(client: anthropic.AsyncAnthropic, server: Running):
    page = await client.models.list()
    (model,) = page.data
    assert (model.id, model.type, model.display_name, page.has_more) == ("fake", "model", "fake", False)
    assert (await client.models.retrieve("fake")) == model
    assert (page.first_id, page.last_id) == ("fake", "fake")
    assert (await client.models.list(after_id="fake")).data == []
    for query in ("limit=0", "limit=x", "after_id=y"):
        headers = {"anthropic-version": "2023-06-01"}
        status, reply = await server.get(f"/v1/models?{query}", headers=headers)
        assert (status, reply["type"]) == (400, "error")
    assert "object" in (await server.get("/v1/models"))[1]


async def test_thinking(server: Running, client: anthropic.AsyncAnthropic):
    says(server, "Two.")
    thought: Any = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages: Any = [*ASK, {"role": "assistant", "content": [thought, {"type": "text", "text": "It"}]}]
    await client.messages.create(model="m", max_tokens=9, messages=messages, thinking={"type": "disabled"})
    assert prompt(server).endswith("[assistant]<think>\nHm.\n</think>\n\nIt")


FIRST_LINE = "x-anthropic-billing-header: cc_version=2.1.177.{build}; cc_entrypoint=cli; cch={cch};"


async def test_claude_codes_first_line_is_the_same_in_each_request(server: Running):
    says(server, "Two.")
    prompts = []
    for build, cch in (("01c", "fa690"), ("9ab", "0aaa9")):
        system = [
            {"type": "text", "text": FIRST_LINE.format(build=build, cch=cch)},
            {"type": "text", "text": "cch=fa690;"},
        ]
        status, _ = await server.post("/v1/messages", {"messages": ASK, "max_tokens": 2, "system": system})
        assert status == 200
        prompts.append(prompt(server))
    assert prompts[0] == prompts[1]
    assert FIRST_LINE.format(build="fff", cch="fffff") + "\ncch=fa690;" in prompts[0]
    body = {"messages": ASK, "max_tokens": 2, "system": "Say cch=fa690; as it is."}  # no header: as it came
    await server.post("/v1/messages", body)
    assert "cch=fa690;" in prompt(server)


async def test_usage_counts_tokens_of_the_cache_as_the_other_dialects(server: Running):
    for cache in (True, False):
        body = {"messages": ASK, "max_tokens": 2, "cache_prompt": cache}
        _, message = await server.post("/v1/messages", body)
        _, chat = await server.post("/v1/chat/completions", body)
        details = chat["usage"]["prompt_tokens_details"]
        assert message["usage"]["cache_creation_input_tokens"] == details["cache_write_tokens"]
        assert message["usage"]["cache_read_input_tokens"] == details["cached_tokens"]
        assert (details["cache_write_tokens"] > 0) == cache


async def test_count_tokens(server: Running, client: anthropic.AsyncAnthropic):
    says(server, "Two.")
    counted = await client.messages.count_tokens(model="m", messages=ASK, system="Be brief", tools=[TOOL])
    asked = await client.messages.create(model="m", max_tokens=5, messages=ASK, system="Be brief", tools=[TOOL])
    assert counted.input_tokens == asked.usage.input_tokens


async def test_errors(server: Running, client: anthropic.AsyncAnthropic):
    with pytest.raises(anthropic.BadRequestError, match="exceeds the available context size") as caught:
        await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "x" * N_CTX}])
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    with pytest.raises(anthropic.APIStatusError, match="step that computed"):
        async with client.messages.stream(
            model="m", max_tokens=5, messages=[{"role": "user", "content": "step-boom"}]
        ) as stream:
            await stream.get_final_message()


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": [1]}, 400, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [1]}]}, 400, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, 400, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, 400, "name"),
    ({"system": 1}, 400, "system"),
    ({"system": [{"type": "text"}]}, 400, "system[0]"),
    ({"tools": [1]}, 400, "tools[0]"),
    ({"tools": [TOOL, {"name": "f", "input_schema": 5}]}, 400, "tools[1].input_schema"),
    ({"tool_choice": {"type": "maybe"}}, 400, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, 400, "field 'tool_choice.name': is required"),
    ({"thinking": {"type": "hard"}}, 400, "thinking"),
    ({"stop_sequences": "x"}, 400, "stop_sequences"),
    ({"stop_sequences": ["x"] * 300}, 400, "field 'stop_sequences':"),
    ({"thinking": {"type": "enabled", "budget_tokens": -5}}, 400, "field 'thinking.budget_tokens':"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, 400, "field 'tool_choice.disable_parallel"),
    ({"tools": [{"name": 5}]}, 400, "field 'tools[0].name':"),
    ({"tools": [TOOL, {"name": "a", "input_schema": 5}]}, 400, "field 'tools[1].input_schema':"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "x"}}}, 400, "field 'output_format.schema':"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, 400, "field 'output_config.format.schema':"),
    ({"output_config": {"format": {"type": "text"}}}, 400, "field 'output_config.format':"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": 5}]}]},
        400,
        "field 'messages[0].content[0].name':",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]},
        400,
        "field 'messages[0].content[0].thinking':",
    ),
    ({"stop_sequences": [1]}, 400, "stop_sequences"),
    ({"n": 2}, 400, "'n'"),
    ({"n_cmpl": 2}, 400, "'n_cmpl'"),
]


ONLY_ANSWERED = (  # not where tokens are counted
    "field 'stop_sequences':", "field 'output_format.schema':", "field 'output_config.format.schema':",
)  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "named"), BAD)
async def test_refusals(server: Running, fields: dict[str, Any], code: int, named: str):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and named in ONLY_ANSWERED:
            continue
        status, body = await server.post(path, {"messages": ASK, "max_tokens": 5, **fields})
        assert status == code, body
        assert body["type"] == "error"
        assert named in body["error"]["message"]
        assert "\n" not in body["error"]["message"]
