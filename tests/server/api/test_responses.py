"""/v1/responses through OpenAI's own client, token counting, and /infill, on a fake engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from logitless.frontend.dialects.responses import called, homes
from logitless.frontend.parser import RequestParser
from logitless.frontend.texts.infill import parse_infill
from logitless.server.api.openai.stored import NOTHING, StoredResponses
from logitless.server.config import ServerConfig
from tests.helpers.chat_fakes import THOUGHT, named_events, prompt, says
from tests.helpers.http_fakes import N_CTX, FakeTokenizer, Running, running
from tests.server.api.test_completion import TIMINGS

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'


async def test_a_response(server: Running):
    says(server, "Two, é.")
    reply = await server.openai.responses.create(
        model="m", input="1 + 1?", instructions="Be brief", max_output_tokens=50
    )
    assert reply.id.startswith("resp_")
    assert (reply.object, reply.status, reply.output_text) == ("response", "completed", "Two, é.")
    (item,) = reply.output
    assert item.type == "message"
    assert item.id.startswith("msg_")
    assert reply.usage is not None
    n_prompt = len(server.scheduler.requests[-1].prompt)
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (
        n_prompt,
        9,
        n_prompt + 9,
    )
    assert (reply.instructions, reply.max_output_tokens) == ("Be brief", 50)
    assert set(reply.timings) == TIMINGS  # type: ignore[attr-defined]
    assert prompt(server) == "<s>[system]Be brief[user]1 + 1?[assistant]"
    reply = await server.openai.responses.create(model="m", input="x", max_output_tokens=3)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


async def test_tokens_of_reasoning_are_counted(server: Running):
    thought = len("<think>\nI should add.\n</think>")  # a token is a byte here
    for text, limit, expected in ((f"{THOUGHT}Two.", 500, thought), ("Two.", 500, 0), (THOUGHT, 12, 12)):
        says(server, text)
        asked: Any = {"model": "m", "input": "1 + 1?", "max_output_tokens": limit}
        whole = await server.openai.responses.create(**asked)
        async with server.openai.responses.stream(**asked) as stream:
            told = [event async for event in stream][-1].response  # type: ignore[union-attr]
        for usage in (whole.usage, told.usage):
            assert usage.output_tokens_details.reasoning_tokens == expected  # type: ignore[union-attr]


TWO_CALLS = f"{THOUGHT}Adding.\n{CALL}\n{CALL.replace('1', '12')}"


@pytest.mark.parametrize("n", range(1, len(TWO_CALLS.encode()) + 2, 5))
async def test_an_item_that_is_cut_is_incomplete(server: Running, n: int):
    """In the response, in the stream, and in what is stored; the conversation goes on from it."""
    says(server, TWO_CALLS)
    asked: Any = {"input": "1 + 1?", "tools": [TOOL], "max_output_tokens": n}
    _, whole = await server.post("/v1/responses", asked)
    assert whole["status"] == ("incomplete" if n <= len(TWO_CALLS.encode()) else "completed")
    statuses = [item["status"] for item in whole["output"]]
    if whole["output"]:
        last = whole["output"][-1]
        ended = whole["status"] == "completed" or (last["type"] == "function_call" and last["arguments"].endswith("}"))
        assert statuses == ["completed"] * (len(statuses) - 1) + ["completed" if ended else "incomplete"]
    else:  # a piece of the tag of reasoning is no item
        assert n < len("<think>")
    for item in whole["output"]:
        if item["type"] == "function_call" and item["status"] == "completed":
            assert json.loads(item["arguments"])["a"][1] == "é"
    data = await named_events(server, "/v1/responses", asked)
    told = data[-1]["response"]
    assert data[-1]["type"] == f"response.{whole['status']}"
    done = [event["item"] for event in data if event["type"] == "response.output_item.done"]
    assert done == told["output"]
    assert [item["status"] for item in told["output"]] == statuses
    _, kept = await server.get(f"/v1/responses/{told['id']}")
    assert kept["output"] == told["output"]
    says(server, "Go on.")
    status, _ = await server.post("/v1/responses", {"input": "x", "previous_response_id": told["id"], "tools": [TOOL]})
    assert status == 200


@pytest.mark.parametrize("text", ["Two, é.", f"{THOUGHT}Two.", f"{THOUGHT}Adding."])
async def test_log_probabilities_of_the_text(server: Running, text: str):
    says(server, text)
    for more, n in (({"top_logprobs": 2}, 2), ({"include": ["message.output_text.logprobs"]}, 0)):
        reply = await server.openai.responses.create(model="m", input="x", **more)  # type: ignore[call-overload]
        (part,) = reply.output[-1].content
        answer = text.removeprefix(THOUGHT)
        assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text == answer
        assert all(len(entry.top_logprobs) == n for entry in part.logprobs)
        async with server.openai.responses.stream(model="m", input="x", **more) as stream:  # type: ignore[arg-type]
            told: list[Any] = [event async for event in stream]
        deltas = [entry for event in told if event.type == "response.output_text.delta" for entry in event.logprobs]
        (done,) = [event for event in told if event.type == "response.output_text.done"]
        texts = [entry.token for entry in part.logprobs]
        assert [entry.token for entry in deltas] == [entry.token for entry in done.logprobs] == texts
    whole: Any = await server.openai.responses.create(model="m", input="x", top_logprobs=0)
    assert whole.output[-1].content[0].logprobs == []


async def test_items_that_are_referred_to(server: Running):
    says(server, CALL)
    first: Any = await server.openai.responses.create(model="m", input="1 + 1?", tools=[TOOL])
    _, given = await server.get(f"/v1/responses/{first.id}/input_items")
    (call,) = first.output
    says(server, "Two.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    for reference in ({"type": "item_reference", "id": call.id}, {"id": call.id}):
        asked: Any = [{"type": "item_reference", "id": given["data"][0]["id"]}, reference, output]
        second: Any = await server.openai.responses.create(model="m", input=asked, tools=[TOOL])
        assert second.output_text == "Two."
        said = prompt(server)
        whole: Any = [{"role": "user", "content": "1 + 1?"}, call.model_dump(exclude_none=True), output]
        await server.openai.responses.create(model="m", input=whole, tools=[TOOL])
        assert prompt(server) == said
        counted = await server.openai.responses.input_tokens.count(model="m", input=asked, tools=[TOOL])
        assert counted.input_tokens == second.usage.input_tokens


@pytest.mark.parametrize("text", ["Two.", f"{THOUGHT}Two.", f"{THOUGHT}Adding.\n{CALL}\n{CALL}", CALL, ""])
async def test_a_stream_adds_up_to_the_response(server: Running, text: str):
    says(server, text)
    asked: Any = {"model": "m", "input": "1 + 1?", "tools": [TOOL]}
    whole = await server.openai.responses.create(**asked)
    async with server.openai.responses.stream(**asked) as stream:
        told = await stream.get_final_response()

    def shown(response: Any) -> list[dict[str, Any]]:
        items = [item.model_dump(exclude_none=True) for item in response.output]
        for item in items:
            item.pop("id")
            item.pop("call_id", None)
            item.pop("parsed_arguments", None)
        return items

    assert shown(told) == shown(whole)
    assert told.output_text == whole.output_text == ("Two." if "Two" in text else "Adding." if "Add" in text else "")
    kinds = [item.type for item in whole.output]
    assert kinds.count("function_call") == text.count("<tool_call>")
    assert ("reasoning" in kinds) == ("<think>" in text)
    assert [i.arguments for i in whole.output if i.type == "function_call"] == ['{"a": [1, "é"]}'] * text.count(
        "<tool_"
    )


async def test_events(server: Running):
    says(server, "Two.")
    data = await named_events(server, "/v1/responses", {"input": "x", "return_progress": True})
    kinds = [d["type"] for d in data]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [d["sequence_number"] for d in data] == list(range(len(data)))
    assert len({d["item_id"] for d in data if "item_id" in d}) == 1
    assert data[-1]["response"]["id"] == data[0]["response"]["id"]
    assert any("prompt_progress" in d and d["timings"]["prompt_n"] for d in data)
    assert data[-1]["timings"] == data[-1]["response"]["timings"]
    timed = await named_events(server, "/v1/responses", {"input": "x", "timings_per_token": True})
    of_deltas = [d["timings"]["predicted_n"] for d in timed if d["type"] == "response.output_text.delta"]
    assert of_deltas == sorted(of_deltas)
    assert of_deltas[0] > 0
    says(server, CALL)
    body = {"input": "x", "tools": [{"type": "function", "name": "add"}]}
    kinds = [d["type"] for d in await named_events(server, "/responses", body)]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip


async def test_a_conversation(server: Running):
    says(server, f"{THOUGHT}Adding.\n{CALL}")
    first = await server.openai.responses.create(model="m", input="1 + 1?", tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    says(server, "Two.")
    reply = await server.openai.responses.create(model="m", input=given, tools=[TOOL])
    assert reply.output_text == "Two."
    assert prompt(server).endswith(
        '[user]1 + 1?[assistant]Adding.<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
        "[tool]2[assistant]"
    )
    says(server, CALL)
    reply = await server.openai.responses.create(model="m", input="x", tools=[TOOL], tool_choice="none")
    assert reply.output_text == CALL


async def test_going_on_from_a_response(server: Running):
    """Each turn says only what is new; the prompt is that of the whole conversation."""
    says(server, f"{THOUGHT}Adding.\n{CALL}")
    first = await server.openai.responses.create(model="m", input="1 + 1?", tools=[TOOL], instructions="Be brief")
    call = first.output[-1]
    assert call.type == "function_call"
    assert (first.store, first.previous_response_id) == (True, None)  # type: ignore[attr-defined]
    says(server, "Two.")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
    stream = await server.openai.responses.create(
        model="m", input=result, tools=[TOOL], previous_response_id=first.id, stream=True
    )
    second = [event async for event in stream][-1].response  # type: ignore[union-attr]
    assert second.previous_response_id == first.id
    talk = (
        '[user]1 + 1?[assistant]Adding.<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>'
        "[tool]2[assistant]"
    )
    assert prompt(server).endswith(talk)
    assert "Be brief" not in prompt(server)  # as OpenAI has it: instructions are each request's own
    says(server, "Yes.")
    body = {"input": "Sure?", "previous_response_id": second.id}
    status, third = await server.post("/v1/responses", body)
    assert status == 200, third
    assert prompt(server).endswith(f"{talk}Two.[user]Sure?[assistant]")
    _, counted = await server.post("/v1/responses/input_tokens", body)
    assert counted["input_tokens"] == third["usage"]["input_tokens"]
    other = await server.openai.responses.create(model="m", input="No?", previous_response_id=first.id)
    assert "Two." not in prompt(server)  # from one response several may go on
    assert other.id != third["id"]


async def test_stored_responses(server: Running):
    says(server, "Two.")
    api = server.openai.responses
    made = await api.create(model="m", input="x", instructions="y")
    assert (await api.retrieve(made.id)).model_dump() == made.model_dump()
    (item,) = (await api.input_items.list(made.id)).data
    assert (item.type, item.role, item.content[0].text) == ("message", "user", "x")  # type: ignore[union-attr]
    second = await api.create(model="m", input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    for order, texts in (("asc", "ab"), ("desc", "ba")):
        items = (await api.input_items.list(second.id, order=order)).data  # type: ignore[arg-type]
        assert "".join(i.content[0].text for i in items) == texts  # type: ignore[union-attr]
    kept_not = await api.create(model="m", input="x", store=False)
    await api.delete(made.id)
    for id in (made.id, kept_not.id, "resp_1"):
        for ask in (api.retrieve, api.delete, api.input_items.list):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await ask(id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await api.create(model="m", input="x", previous_response_id=id)
    with pytest.raises(openai.APIStatusError, match="told again as a whole"):
        await api.retrieve(second.id, stream=True)


def in_namespace(namespace: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": namespace, "description": "Some.", "tools": list(tools)}


async def test_functions_in_namespaces(server: Running):
    """As Codex has those of MCP servers: a model sees names of both parts, and a call comes back in two fields."""
    call = CALL.replace('"add"', '"mcp__sums__add"')
    tools: Any = [in_namespace("mcp__sums", TOOL), in_namespace("functions", TOOL)]
    says(server, call)
    async with server.openai.responses.stream(model="m", input="1 + 1?", tools=tools) as stream:
        begun = [event.item for event in [e async for e in stream] if event.type == "response.output_item.added"]
        first = await stream.get_final_response()
    assert [(i.name, i.namespace) for i in (begun[-1], first.output[-1])] == [("add", "mcp__sums")] * 2
    assert '"mcp__sums__add"' in prompt(server)
    says(server, "Two.")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"}
    given: Any = [{"role": "user", "content": "1 + 1?"}, first.output[-1].model_dump(exclude_none=True), output]
    await server.openai.responses.create(model="m", input=given, tools=tools)
    assert '{"name": "mcp__sums__add", "arguments"' in prompt(server)
    for name, choice in (("add", {"name": "add"}), ("mcp__sums__add", {"name": "add", "namespace": "mcp__sums"})):
        says(server, CALL.replace('"add"', f'"{name}"'))
        chosen: Any = {"type": "function"} | choice
        reply = await server.openai.responses.create(model="m", input="x", tools=tools, tool_choice=chosen)
        assert reply.output[-1].model_dump(exclude_none=True).items() >= choice.items()
        assert ("namespace" in choice) == (reply.output[-1].namespace is not None)


def test_a_function_that_is_called_like_one_of_a_namespace_is_itself() -> None:
    tools = [in_namespace("a", TOOL), {**TOOL, "name": "a__add"}, in_namespace("b__c", TOOL)]
    assert homes(tools) == {"b__c__add": ("b__c", "add")}
    assert called("b__c__add", homes(tools)) == {"name": "add", "namespace": "b__c"}
    assert called("a__add", homes(tools)) == {"name": "a__add"}


def test_too_many_are_forgotten_and_keys_see_their_own() -> None:
    kept = StoredResponses(max_bytes=3000)
    for i in range(20):
        kept.keep("k", {"id": f"resp_{i}", "output": []}, "x" * 200, NOTHING)
        assert kept.find("k", "resp_0")  # it is in use
    assert [i for i in range(20) if kept.find("k", f"resp_{i}")] == [0, *range(13, 20)]
    assert kept.find("other", "resp_19") is None
    assert not kept.forget("other", "resp_19")
    kept.keep("k", {"id": "large", "output": []}, "x" * 5000, NOTHING)
    assert [i for i in range(20) if kept.find("k", f"resp_{i}")] == []
    assert kept.before("k", "large").items == tuple(kept.find("k", "large").input)  # type: ignore[union-attr]


def test_conversation_before_stored_response_counts_in_its_size():
    """Or small answers to large conversations would keep those in memory, however many there are."""
    kept = StoredResponses(max_bytes=3000)
    for i in range(9):
        kept.keep("k", {"id": f"large_{i}", "output": []}, "x" * 1000, NOTHING)
        kept.keep("k", {"id": f"small_{i}", "output": []}, "y", kept.before("k", f"large_{i}"))
    held = {id(item): len(str(item)) for k in kept._all.values() for item in k.conversation}
    assert kept.find("k", "small_8")
    assert sum(held.values()) <= 3000


async def test_counting(server: Running):
    says(server, "Two.")
    body = {"input": "x", "instructions": "y", "tools": [TOOL]}
    _, reply = await server.post("/v1/responses", body)
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        _, counted = await server.post(path, body)
        assert counted == {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    _, reply = await server.post("/v1/chat/completions", chat)
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        _, counted = await server.post(path, chat)
        assert counted == {"object": "response.input_tokens", "input_tokens": reply["usage"]["prompt_tokens"]}


ASKED: Any = {"role": "user", "content": "x"}
SAID: Any = {"role": "assistant", "content": "x"}
CALLED: Any = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"input": None}, 400, "'input'"),
    ({"input": []}, 400, "'input'"),
    ({"input": [1]}, 400, "input[0]"),
    ({"input": [{}]}, 400, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "content[0]"),
    ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "function_call_output"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "content": [1]}]}, 400, "input[0].content"),
    *[({"input": [{"type": kind}]}, 400, "field 'input[0].type':") for kind in ("item\nreference", [], {}, None)],
    ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ({"previous_response_id": 1}, 400, "previous_response_id"),
    ({"conversation": "conv_1"}, 400, "conversation"),
    ({"tools": [{"type": 5}]}, 400, "field 'tools[0].type':"),
    ({"tools": [{"type": "namespace", "tools": []}]}, 400, "field 'tools[0].name':"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": TOOL}]}, 400, "field 'tools[0].tools':"),
    ({"tools": [TOOL, in_namespace("a", TOOL, 1)]}, 400, "field 'tools[1].tools[1]':"),
    ({"tools": [in_namespace("a", {**TOOL, "parameters": 5})]}, 400, "field 'tools[0].tools[0].parameters':"),
    ({"tools": [in_namespace("a", {"type": "function"})]}, 400, "field 'tools[0].tools[0].name':"),
    ({"tools": [TOOL, TOOL, {**TOOL, "parameters": 5}]}, 400, "field 'tools[2].parameters':"),
    ({"tools": [1]}, 400, "tools[0]"),
    ({"tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"instructions": 1}, 400, "instructions"),
    ({"text": {"format": {"type": "sound"}}}, 400, "field 'text.format':"),
    ({"text": {"format": 5}}, 400, "field 'text.format':"),
    ({"text": "x"}, 400, "field 'text':"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, 400, "field 'text.format.schema':"),
    ({"text": {"format": {"type": "json_schema"}}}, 400, "field 'text.format.schema':"),
    ({"reasoning": {"effort": 5}}, 400, "field 'reasoning.effort':"),
    ({"stream_options": {"include_usage": 5}}, 400, "field 'stream_options.include_usage':"),
    ({"tools": [{"type": "function"}]}, 400, "field 'tools[0].name':"),
    ({"tools": [TOOL, {**TOOL, "parameters": 5}]}, 400, "field 'tools[1].parameters':"),
    ({"input": [{"role": "user", "content": 5}], "instructions": "x"}, 400, "field 'input[0].content':"),
    (
        {"input": [ASKED, {"role": "user", "content": [{"type": "input_text"}]}], "instructions": "x"},
        400,
        "field 'input[1].content[0].text':",
    ),
    (
        {"input": [ASKED, CALLED, {"type": "function_call_output", "call_id": "x", "output": 5}]},
        400,
        "field 'input[2].output':",
    ),
    ({"input": [{"role": "", "content": "x"}], "instructions": "x"}, 400, "field 'input[0].role':"),
    ({"input": [ASKED, SAID, SAID], "instructions": "x"}, 400, "field 'input':"),
    ({"n": 2}, 400, "'n'"),
    ({"n_cmpl": 2}, 400, "'n_cmpl'"),
    ({"top_logprobs": 21}, 400, "top_logprobs"),
    ({"top_logprobs": "x"}, 400, "top_logprobs"),
    ({"include": "x"}, 400, "include"),
    ({"input": [{"type": "item_reference"}]}, 400, "field 'input[0].id':"),
    ({"input": [ASKED, {"type": "item_reference", "id": 5}]}, 400, "field 'input[1].id':"),
    ({"input": [ASKED, {"id": "msg_x"}]}, 400, "field 'input[1].id':"),
]


ONLY_ANSWERED = ("field 'text.format.schema':", "field 'stream_options.include_usage':")  # not where tokens are counted


@pytest.mark.parametrize(("fields", "code", "named"), BAD)
async def test_refusals(server: Running, fields: dict[str, Any], code: int, named: str):
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        if path.endswith("tokens") and named in ONLY_ANSWERED:
            continue
        status, body = await server.post(path, {"input": "x", "stream": True, **fields})
        assert status == code, body
        assert named in body["error"]["message"]
        assert "\n" not in body["error"]["message"]


async def test_errors(server: Running):
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        await server.openai.responses.create(model="m", input="x" * N_CTX, stream=True)
    with pytest.raises(openai.APIError, match="step that computed"):
        async for _ in await server.openai.responses.create(model="m", input="step-boom", stream=True):
            pass


# -- infill


class Coder(FakeTokenizer):
    """Bytes that stand for the tokens of a coder."""

    fim_pre_id, fim_suf_id, fim_mid_id, fim_rep_id, fim_sep_id = b"PSMRF"


async def filled(body: dict[str, Any], **ids: Any) -> str:
    coder = type("Coder", (Coder,), ids)()
    async with running(tokenizer=coder) as server:
        status, reply = await server.post("/infill", {"n_predict": 2, "verbose": True, **body})
        assert status == 200, reply
        assert reply["content"] == "ab"
        return str(reply["prompt"])


async def test_infill():
    gap = {"input_prefix": "def ", "input_suffix": "()"}
    assert await filled(gap, fim_rep_id=None, fim_sep_id=None) == "<s>Pdef S()M"
    assert await filled({**gap, "prompt": "f"}, fim_rep_id=None, fim_sep_id=None) == "<s>Pdef fS()M"
    extra = {**gap, "input_extra": [{"filename": "a.py", "text": "x"}]}
    assert await filled(extra) == "<s>Pdef S()M"  # 512 cells have no room beside the batch that llama-server reserves


async def test_a_suffix_is_a_gap():
    """OpenAI's way to ask for the same: prompt and suffix of /v1/completions."""
    async with running(tokenizer=Coder()) as server:
        ask: dict[str, Any] = {"prompt": "def ", "suffix": "()", "max_tokens": 2}
        status, reply = await server.post("/v1/completions", {**ask, "verbose": True})
        assert (status, reply["choices"][0]["text"]) == (200, "ab")
        assert reply["__verbose"]["prompt"] == "<s>Pdef S()M"
        _, reply = await server.post("/v1/completions", {**ask, "prompt": ["a", "b"], "echo": True, "verbose": True})
        assert [choice["text"] for choice in reply["choices"]] == ["aab", "bab"]
        status, reply = await server.post("/v1/completions", {**ask, "echo": True, "logprobs": 1})
        assert (status, "'suffix'" in reply["error"]["message"]) == (400, True)


def test_infill_with_other_files():
    body = {
        "input_prefix": "def ",
        "input_suffix": "()",
        "input_extra": [{"filename": "a", "text": "x"}, {"text": "y"}],
    }

    def filled_by(n_ctx: int = 8192, spm: bool = False, **ids: Any) -> str:
        coder = type("Coder", (Coder,), ids)()
        (request,) = parse_infill(body, RequestParser(coder, ServerConfig(spm_infill=spm), n_ctx)).requests
        return coder.pieces(request.prompt).decode()

    files = "Rmyproject\nFa\nxFtmp\nyFfilename\n"
    assert filled_by() == f"{files}<s>Pdef S()M"
    assert filled_by(spm=True) == f"{files}<s>S()Pdef M"
    assert filled_by(2048 + 5) == "name\n<s>Pdef S()M"
    snippets = "\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\ny"
    assert filled_by(fim_rep_id=None, fim_sep_id=None) == f"{snippets}<s>Pdef S()M"
    body["input_prefix"], body["input_suffix"] = "p" * 9999, "s" * 9999
    filled = filled_by(2048, fim_rep_id=None)
    assert (filled.count("p"), filled.count("s")) == (1536, 511)  # the "s" of <s> too


async def test_infill_is_refused(server: Running):
    status, body = await server.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    async with running(tokenizer=Coder()) as coder:
        for fields, named in (
            ({}, "input_prefix"), ({"input_prefix": "a", "input_suffix": None}, "input_suffix"),
            ({"input_prefix": 1}, "input_prefix"),
            ({"input_prefix": "", "input_suffix": "", "input_extra": [1]}, "input_extra[0]"),
            ({"input_prefix": "", "input_suffix": "", "input_extra": [{"text": 1}]}, "input_extra[0].text"),
            ({"input_prefix": "", "input_suffix": "", "prompt": []}, "prompt"),
        ):  # fmt: skip
            status, body = await coder.post("/infill", {"input_suffix": "b", **fields})
            assert status == 400
            assert named in body["error"]["message"]
