"""/v1/conversations through OpenAI's own client and strict types, on a fake engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItemList
from openai.types.responses import Response

from logitless.server.api.openai.stored import StoredConversations
from tests.helpers.chat_fakes import THOUGHT, prompt, says
from tests.helpers.http_fakes import Running, running
from tests.server.api.test_responses import CALL, TOOL
from tests.server.api.test_strict_types import parsed

HELLO: Any = {"type": "message", "role": "user", "content": "Hello"}


async def test_a_conversation_and_its_items(server: Running):
    api = server.openai.conversations
    made = await api.create(items=[HELLO, {**HELLO, "role": "assistant"}], metadata={"topic": "a"})
    assert (made.id.startswith("conv_"), made.object, made.metadata) == (True, "conversation", {"topic": "a"})
    assert await api.retrieve(made.id) == made
    assert (await api.update(made.id, metadata={"topic": "b"})).metadata == {"topic": "b"}
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": "2"}
    thought: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
    added = await api.items.create(made.id, items=[call, output, thought, thought])
    assert [item.type for item in added.data] == ["function_call", "function_call_output", "reasoning", "reasoning"]
    ids = [item.id async for item in api.items.list(made.id, order="asc", limit=2)]
    assert len(set(ids)) == 6
    assert [item.id async for item in api.items.list(made.id)] == ids[::-1]
    assert ids[4] == "rs_1" != ids[5]
    first: Any = await api.items.retrieve(ids[0], conversation_id=made.id)
    assert (first.role, first.content[0].text, first.status) == ("user", "Hello", "completed")
    assert await api.items.delete(ids[1], conversation_id=made.id) == await api.retrieve(made.id)
    assert [item.id async for item in api.items.list(made.id, order="asc")] == [ids[0], *ids[2:]]
    for path, kind in (("", Conversation), ("/items", ConversationItemList)):
        parsed(kind, (await server.get(f"/v1/conversations/{made.id}{path}"))[1])
    empty = await api.create()
    _, told = await server.get(f"/v1/conversations/{empty.id}/items")
    assert parsed(ConversationItemList, told).data == []
    gone = await api.delete(made.id)
    assert parsed(ConversationDeletedResource, gone.model_dump()).deleted
    for again in (api.retrieve, api.delete, api.items.list):
        with pytest.raises(openai.NotFoundError, match="there is no conversation"):
            await again(made.id)
    with pytest.raises(openai.NotFoundError, match="there is no item"):
        await api.items.delete("x", conversation_id=empty.id)


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_goes_on_with_it_and_adds_to_it(server: Running, store: bool):
    api = server.openai.conversations
    made = await api.create(items=[HELLO])
    says(server, f"{THOUGHT}Adding.\n{CALL}")
    asked: Any = {"model": "m", "conversation": made.id, "tools": [TOOL], "store": store}
    first = await server.openai.responses.create(**asked, input="1 + 1?")
    assert prompt(server).endswith("[user]Hello[user]1 + 1?[assistant]")
    assert parsed(Response, first.model_dump(mode="json")).conversation.id == made.id
    says(server, "Two.")
    output: Any = [{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"}]  # type: ignore[union-attr]
    body = {**asked, "input": output, "conversation": {"id": made.id}}
    counted = await server.openai.responses.input_tokens.count(
        model="m", input=output, tools=[TOOL], conversation=made.id
    )
    async with server.openai.responses.stream(**body) as stream:
        second = await stream.get_final_response()
    assert counted.input_tokens == second.usage.input_tokens  # type: ignore[union-attr]
    said = prompt(server)
    items = [item async for item in api.items.list(made.id, order="asc")]
    kinds = ["message", "message", "reasoning", "message", "function_call", "function_call_output", "message"]
    assert [item.type for item in items] == kinds
    assert [item.id for item in items[2:5]] == [item.id for item in first.output]
    given: Any = [item.model_dump(exclude_none=True) for item in items[:-1]]
    await server.openai.responses.create(model="m", input=given, tools=[TOOL])
    assert prompt(server) == said
    await api.delete(made.id)
    with pytest.raises(openai.BadRequestError, match="field 'conversation': there is no conversation"):
        await server.openai.responses.create(**asked, input="x")


async def test_keys_see_their_own():
    async with running(api_keys=("one", "two")) as server:
        made = await server.openai.conversations.create(items=[HELLO])
        other = server.openai.with_options(api_key="two").conversations
        for ask in (other.retrieve, other.delete, other.items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        assert (await server.openai.conversations.retrieve(made.id)).id == made.id


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"items": [1]}, "items[0]"),
        ({"items": [{"role": "user", "content": 5}]}, "items[0].content"),
        ({"items": [HELLO, {"content": "x"}]}, "items[1].role"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ({"items": [HELLO] * 21}, "items"),
        ({"items": "x"}, "items"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)
async def test_bad_conversation_body_is_refused(server: Running, body: Any, field: str):
    status, told = await server.post("/v1/conversations", body)
    assert status == 400
    assert told["error"]["message"].startswith(f"field '{field}"), told


async def test_response_with_bad_conversation_is_refused(server: Running):
    for change, field in (
        ({"conversation": 5}, "conversation"),
        ({"conversation": {}}, "conversation.id"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
    ):
        status, told = await server.post("/v1/responses", {"input": "x", **change})
        assert (status, told["error"]["message"].startswith(f"field '{field}':")) == (400, True), told


def test_too_many_are_forgotten() -> None:
    kept = StoredConversations(max_bytes=3000)
    made = [kept.create("k", {}, [{"id": f"msg_{i}", "text": "x" * 300}]).id for i in range(9)]
    assert [kept.find("k", id) is not None for id in made] == [False] * 5 + [True] * 4
    assert kept.find("other", made[-1]) is None
    kept.add("k", made[-1], [{"id": "large", "text": "x" * 3000}])
    assert all(kept.find("k", id) is None for id in made)  # it alone is larger than all may be
    assert kept._nbytes == 0
    last = kept.create("k", {"a": "b"}, [{"id": "msg", "text": "x"}]).id
    assert kept.remove("k", last, "msg") is not None
    kept.name("k", last, {})
    assert kept.forget("k", last)
    assert kept._nbytes == 0
