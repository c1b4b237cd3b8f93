"""Custom (free-form) tools through the real port and OpenAI's own client, in chats and responses."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent

from logitless.frontend.fields import forget
from tests.helpers.chat_fakes import HERMES_LIKE, chatting, named_events, prompt, says
from tests.helpers.grammars import accepts
from tests.helpers.http_fakes import Running
from tests.models.grammar.test_lark_source import APPLY_PATCH, NESTED, PATCH
from tests.server.api.test_completion import events
from tests.server.api.test_strict_types import CHAT_TOOL, parsed
from tests.server.test_refusals import refused

FORMAT = {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH}
CUSTOM: Any = {"type": "custom", "name": "patch", "description": "Edits files.", "format": FORMAT}
IN_CHAT: Any = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": APPLY_PATCH}},
    },
}
ADD: Any = {"type": "function", **CHAT_TOOL["function"]}
ASK: Any = [{"role": "user", "content": "x"}]


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with chatting(HERMES_LIKE, n_ctx=4096) as started:
        yield started


def call(text: str = PATCH, name: str = "patch") -> str:
    made = {"name": name, "arguments": {"input": text}}
    return f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>"


async def test_chats(server: Running):
    says(server, f"Let me.\n{call()}")
    asked: Any = {"model": "m", "messages": ASK, "tools": [CHAT_TOOL, IN_CHAT]}
    reply = await server.openai.chat.completions.create(**asked)
    parsed(ChatCompletion, reply.model_dump(exclude_none=True) | {"system_fingerprint": None})
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me.")
    (made,) = choice.message.tool_calls or []
    assert made.type == "custom"
    assert (made.custom.name, made.custom.input) == ("patch", PATCH)
    assert "Edits files." in prompt(server)
    assert "begin_patch" in prompt(server)  # the model is shown the grammar
    assert '"input"' in prompt(server)

    stream = await server.openai.chat.completions.create(**asked, stream=True)
    deltas = [d.model_dump(exclude_none=True) async for c in stream for d in c.choices[0].delta.tool_calls or []]
    assert {"index": 0, "type": "custom", "custom": {"name": "patch", "input": ""}}.items() <= deltas[0].items()
    assert len(deltas) > 3
    assert all(delta.keys() == {"index", "custom"} for delta in deltas[1:])
    assert "".join(delta["custom"]["input"] for delta in deltas) == PATCH

    again: Any = [*ASK, choice.message.model_dump(), {"role": "tool", "tool_call_id": made.id, "content": "Done."}]
    says(server, "2.")
    reply = await server.openai.chat.completions.create(**{**asked, "messages": again})
    assert reply.choices[0].message.content == "2."
    assert json.dumps({"input": PATCH}, ensure_ascii=False) in prompt(server)
    assert "[tool]Done." in prompt(server)


async def test_responses(server: Running):
    asked: Any = {"model": "m", "input": "x", "tools": [ADD, CUSTOM]}
    says(server, f"Let me.\n{call()}\n{call('ls', 'patch')}")
    _, reply = await server.post("/v1/responses", asked)
    items = parsed(Response, reply).output
    assert [(i.type, i.input) for i in items[1:]] == [("custom_tool_call", PATCH), ("custom_tool_call", "ls")]
    _, stored = await server.get(f"/v1/responses/{reply['id']}/input_items")
    told = [parsed(ResponseStreamEvent, event) for event in await named_events(server, "/v1/responses", asked)]
    async with server.openai.responses.stream(**asked) as stream:
        assert [event.type async for event in stream if "custom" in event.type]
        final = await stream.get_final_response()
    kinds = [e.type for e in told if "custom" in e.type]
    assert kinds[0] == "response.custom_tool_call_input.delta"
    assert kinds.count("response.custom_tool_call_input.done") == 2
    first = [e for e in told if "custom" in e.type and e.output_index == 1]
    assert "".join(e.delta for e in first[:-1]) == first[-1].input == PATCH
    begun = [e.item for e in told if e.type == "response.output_item.added"]
    assert (begun[1].type, begun[1].name, begun[1].input) == ("custom_tool_call", "patch", "")
    ended = [e.item for e in told if e.type == "response.output_item.done"]
    assert [i.id for i in ended] == [i.id for i in begun] == [i.id for i in told[-1].response.output]
    item = final.output[1].model_dump(exclude_none=True)
    assert item["input"] == PATCH

    says(server, "2.")
    outputs = [{"type": "custom_tool_call_output", "call_id": i.call_id, "output": "Done."} for i in final.output[1:]]
    parts = [{"type": "input_text", "text": "Done."}]
    for given in (
        {"input": [*ASK, item, outputs[0] | {"output": parts}]},
        {"input": outputs, "previous_response_id": reply["id"]},
    ):
        second = await server.openai.responses.create(**{**asked, **given})
        assert second.output_text == "2."
        assert json.dumps({"input": PATCH}, ensure_ascii=False) in prompt(server)
        assert "[tool]Done." in prompt(server)
    _, stored = await server.get(f"/v1/responses/{second.id}/input_items")
    for each in stored["data"]:
        parsed(ResponseItem, each)


async def test_a_cut_call_is_incomplete(server: Running):
    says(server, call())
    asked = {"input": "x", "tools": [CUSTOM], "max_output_tokens": 70}
    _, reply = await server.post("/v1/responses", asked)
    (item,) = parsed(Response, reply).output
    assert (item.status, reply["status"]) == ("incomplete", "incomplete")
    assert PATCH.startswith(item.input)
    assert 0 < len(item.input) < len(PATCH)
    for event in await named_events(server, "/v1/responses", asked):
        parsed(ResponseStreamEvent, event)


CHOICES: list[tuple[Any, Any]] = [
    ({"type": "custom", "name": "patch"}, {"type": "custom", "custom": {"name": "patch"}}),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        },
    ),
]


@pytest.mark.parametrize(("flat", "nested"), CHOICES)
async def test_a_choice_forces_the_grammar(server: Running, flat: Any, nested: Any):
    says(server, call())
    await server.openai.responses.create(model="m", input="x", tools=[ADD, CUSTOM], tool_choice=flat)
    of_response = server.scheduler.requests[-1].sampling.grammar
    tools: Any = [CHAT_TOOL, IN_CHAT]
    await server.openai.chat.completions.create(model="m", messages=ASK, tools=tools, tool_choice=nested)
    of_chat = server.scheduler.requests[-1].sampling.grammar
    for constraint in (of_response, of_chat):
        assert constraint is not None
        assert not constraint.lazy
        assert accepts(constraint.grammar, call())
        assert not accepts(constraint.grammar, call("ls"))
        assert not accepts(constraint.grammar, call(name="add"))


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (None, ["", 'a\n"é"\''], []),
        ({"type": "text"}, ["any"], []),
        ({"type": "grammar", "syntax": "regex", "definition": r"^[a-c]+\n?$"}, ["abc", "a\n"], ["", "abd"]),
        ({"type": "grammar", "syntax": "lark", "definition": NESTED}, ["[]", "([])"], ["([]", "x"]),
    ],
)
async def test_formats(server: Running, form: Any, right: list[str], wrong: list[str]):
    says(server, call("", "f"))
    tool = {"type": "custom", "name": "f"} | ({"format": form} if form else {})
    for tools, path in ([tool], "/v1/responses"), ([{"type": "custom", "custom": tool}], "/v1/chat/completions"):
        body: Any = {"input": "x", "messages": ASK, "tools": tools, "tool_choice": "required"}
        status, reply = await server.post(path, body)
        assert status == 200, reply
        constraint = server.scheduler.requests[-1].sampling.grammar
        assert constraint is not None
        assert [t for t in (*right, *wrong) if accepts(constraint.grammar, call(t, "f"))] == right


async def test_a_grammar_that_cannot_be_enforced_is_any_text(server: Running, caplog: pytest.LogCaptureFixture):
    says(server, call("a", "f"))
    forget()  # the lines that other tests have logged
    sources = [("lark", "start: /a(?=b)/"), ("lark", "%import python.NAME\nstart: NAME"), ("regex", r"(a)\1")]
    for syntax, definition in sources:
        form = {"type": "grammar", "syntax": syntax, "definition": definition}
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                tools = [{"type": "custom", "name": "f", "format": form}]
                _, reply = await server.post("/v1/responses", {"input": "x", "tools": tools, "tool_choice": "required"})
        assert reply["output"][0]["input"] == "a"
        lines = [r.getMessage() for r in caplog.records if "not enforced" in r.getMessage()]
        assert len(lines) == 1
        assert "tools[0].custom.format.definition" in lines[0]


LARK = {"type": "grammar", "syntax": "lark", "definition": "x"}
WRONG: list[tuple[Any, str, str]] = [
    ({"name": "f", "format": LARK | {"definition": "start: x"}}, "format.definition", "'x' is not defined"),
    ({"name": "f", "format": LARK | {"syntax": "gbnf"}}, "format.syntax", "must be lark or regex"),
    ({"name": "f", "format": {"type": "grammar", "syntax": "lark"}}, "format.definition", "expected a string"),
    ({"name": "f", "format": LARK | {"syntax": "regex", "definition": "("}}, "format.definition", "unterminated"),
    ({"name": "f", "format": {"type": "json"}}, "format.type", "must be text or grammar"),
    ({"name": "f", "format": []}, "format", "expected an object"),
    ({"name": ""}, "name", "must not be empty"),
    ({}, "name", "is required"),
]


@pytest.mark.parametrize(("tool", "field", "problem"), WRONG)
async def test_mistakes_are_named(server: Running, tool: Any, field: str, problem: str):
    for path, tools, place in (
        ("/v1/responses", [ADD, {"type": "custom", **tool}], "tools[1]"),
        ("/v1/chat/completions", [CHAT_TOOL, {"type": "custom", "custom": tool}], "tools[1].custom"),
    ):
        body = {"input": "x", "messages": ASK, "tools": tools}
        await refused(server, path, body, named=f"field '{place}.{field}'")
        await refused(server, path, body, named=problem)


NO_CALL: Any = {"type": "custom"}
OTHER: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "custom", "custom": {"name": "add"}}}, "there is no tool 'add' of type custom"),
    ({"tool_choice": {"type": "function", "name": "patch"}}, "there is no tool 'patch' of type function"),
    ({"tool_choice": {"type": "custom"}}, "field 'tool_choice'"),
    ({"tools": [{"type": "custom"}]}, "field 'tools[0].custom': is required"),
    ({"tools": [{"type": "function"}]}, "field 'tools[0].function': is required"),
    ({"tools": [{"type": "mcp"}]}, "field 'tools[0].type'"),
    ({"messages": [{"role": "assistant", "tool_calls": [NO_CALL]}]}, "tool_calls[0].function': is required"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [NO_CALL | {"custom": {"name": "f"}}]}]},
        "field 'messages[0].tool_calls[0].custom.input'",
    ),
]


@pytest.mark.parametrize(("more", "problem"), OTHER)
async def test_other_mistakes(server: Running, more: Any, problem: str):
    body = {"messages": ASK, "tools": [CHAT_TOOL, IN_CHAT], **more}
    await refused(server, "/v1/chat/completions", body, named=problem)


async def test_mistakes_in_items(server: Running):
    for item, start in (
        ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 3}, "field 'input[0].input'"),
        ({"type": "custom_tool_call", "call_id": "c", "input": ""}, "field 'input[0].name'"),
        ({"type": "custom_tool_call_output", "output": ""}, "field 'input[0].call_id'"),
    ):
        await refused(server, "/v1/responses", {"input": [item]}, named=start)


async def test_the_text_is_told_as_it_is_written(server: Running):
    """Whatever the pieces, with escapes and halves of surrogate pairs; and a call that is no object with input."""
    text = '{"name": "f", "arguments": {"input": "a\\n\\"\\\\ \\u00e9\\ud83d\\ude00é"}}'
    says(server, f"<tool_call>\n{text}\n</tool_call>")
    body = {"messages": ASK, "tools": [{"type": "custom", "custom": {"name": "f"}}]}
    told = [c["choices"][0]["delta"] for c in await events(server, "/v1/chat/completions", body) if c]
    pieces = [d["tool_calls"][0]["custom"]["input"] for d in told if d.get("tool_calls")]
    assert "".join(pieces) == 'a\n"\\ é😀é'
    for arguments, read in (('{"other": 1}', '{"other": 1}'), ('"plain"', "plain"), ("{}", "{}")):
        says(server, f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
        _, reply = await server.post("/v1/chat/completions", body)
        assert reply["choices"][0]["message"]["tool_calls"][0]["custom"] == {"name": "f", "input": read}


async def test_custom_tools_in_namespaces(server: Running):
    says(server, call(name="files__patch"))
    tools: Any = [{"type": "namespace", "name": "files", "description": "x", "tools": [CUSTOM]}]
    reply = await server.openai.responses.create(model="m", input="x", tools=tools)
    assert reply.output[0].model_dump(exclude_none=True).items() >= {"name": "patch", "namespace": "files"}.items()


async def test_it_is_refused_as_the_client_has_it(server: Running):
    bad: Any = [CUSTOM | {"format": LARK}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].format.definition"):
        await server.openai.responses.create(model="m", input="x", tools=bad)
