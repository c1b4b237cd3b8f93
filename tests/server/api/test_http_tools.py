"""Tools and reasoning through the real port and OpenAI's client, on a fake engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.chat_fakes import HERMES_LIKE, THOUGHT, chatting, prompt, says
from tests.helpers.grammars import accepts
from tests.helpers.http_fakes import Running
from tests.server.api.test_completion import events
from tests.server.test_refusals import refused

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
ASK: Any = [{"role": "user", "content": "What is 1 + 1?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "<é}\\n"}}\n</tool_call>'
ARGUMENTS = '{"a": "<é}\\n"}'


async def test_a_call(server: Running):
    says(server, f"Let me add.\n{CALL}")
    reply = await server.openai.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me add.")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", ARGUMENTS)
    says(server, CALL)
    _, body = await server.post("/v1/chat/completions", {"messages": ASK, "tools": [TOOL], "verbose": True})
    assert body["choices"][0]["message"]["content"] is None
    assert body["__verbose"]["generation_settings"]["chat_format"] == "Hermes 2 Pro"
    assert '"name": "add"' in body["__verbose"]["prompt"]
    again = [*ASK, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    says(server, "2.")
    reply = await server.openai.chat.completions.create(model="m", messages=again, tools=[TOOL])
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == ("2.", None)
    assert '{"name": "add", "arguments": {"a": "<é}\\n"}}' in prompt(server)
    assert "[tool]2" in prompt(server)


async def test_arguments_that_are_no_object_become_one_in_every_api(server: Running):
    function = TOOL["function"]
    other = {"name": "add", "input_schema": function["parameters"]}
    for text in ('{"name": "add", "arguments": 5}', '```json\n[{"name": "add", "arguments": {"a": 5}}]\n```'):
        says(server, f"<tool_call>{text}</tool_call>")
        _, body = await server.post("/v1/chat/completions", {"messages": ASK, "tools": [TOOL]})
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 5}'
        _, body = await server.post("/v1/messages", {"messages": ASK, "tools": [other], "max_tokens": 500})
        assert [(block["type"], block["input"]) for block in body["content"]] == [("tool_use", {"a": 5})]
        _, body = await server.post("/v1/responses", {"input": ASK, "tools": [{"type": "function", **function}]})
        assert [(item["type"], item["arguments"]) for item in body["output"]] == [("function_call", '{"a": 5}')]
        _, body = await server.post("/api/chat", {"model": "fake", "messages": ASK, "tools": [TOOL], "stream": False})
        assert body["message"]["tool_calls"][0]["function"]["arguments"] == {"a": 5}
        assert body["message"]["content"] == ""


@pytest.mark.parametrize(
    "text", [CALL, f"One.\n{CALL}\n{CALL}", f"{THOUGHT}Sum: {CALL} done", "None <tool_call> ever."]
)
async def test_deltas_add_up_to_the_message(server: Running, text: str):
    says(server, text)
    asked: Any = {"model": "m", "messages": ASK, "tools": [TOOL]}
    whole = (await server.openai.chat.completions.create(**asked)).choices[0]
    async with server.openai.chat.completions.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        told = (await stream.get_final_completion()).choices[0]
    calls = [(c.function.name, c.function.arguments) for c in told.message.tool_calls or []]
    assert calls == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]  # type: ignore[union-attr]
    assert (told.message.content or None, told.finish_reason) == (whole.message.content, whole.finish_reason)
    assert getattr(told.message, "reasoning_content", None) == getattr(whole.message, "reasoning_content", None)
    assert ("tool_calls.function.arguments.delta" in kinds) == bool(calls)


GEMMA4 = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name }}"
    "{{ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ v }}{% endfor %}{{ '}<tool_call|>' }}{% endfor %}"
    "{% for r in m.tool_responses or [] %}response:{{ r.name }}{value:{{ r.response }}}{% endfor %}"
    "{{ m.content }}{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)


async def test_one_of_is_enforced_or_refused_where_it_is_strict():
    """Also in formats that write arguments other than as one JSON object."""
    overlap, apart = [{"type": "integer"}, {"type": "number"}], [{"type": "integer"}, {"type": "string"}]
    async with chatting(GEMMA4) as server:
        says(server, "No.")
        for choices, strict in ((overlap, False), (apart, True), (overlap, True)):
            parameters = {"type": "object", "properties": {"a": {"oneOf": choices}}}
            tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}
            status, body = await server.post("/v1/chat/completions", {"messages": ASK, "tools": [TOOL, tool]})
            assert status == (400 if strict and choices is overlap else 200)
        assert "'tools[1].function.parameters': in the schema at /properties/a: oneOf" in body["error"]["message"]


async def test_gemma4_calls_and_results():
    async with chatting(GEMMA4) as server:
        says(server, '<|tool_call>call:add{a:1,b:<|"|>"<|"|>}<tool_call|>')
        asked = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "verbose": True}
        _, body = await server.post("/v1/chat/completions", asked)
        (choice,) = body["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": "\\""}'}
        settings = body["__verbose"]["generation_settings"]
        assert settings["chat_format"] == "Gemma 4"
        again = [*ASK, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
        says(server, "2.")
        await server.post("/v1/chat/completions", {"messages": again, "tools": [TOOL]})
        assert prompt(server).endswith('[assistant]<|tool_call>call:add{a:1b:"}<tool_call|>response:add{value:2}add')


async def test_the_shape_of_deltas(server: Running):
    says(server, CALL)
    chunks = await events(server, "/v1/chat/completions", {"messages": ASK, "tools": [TOOL], "stream": True})
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    (begin,) = deltas[1]["tool_calls"]
    assert begin.pop("id").startswith("call_")
    assert begin == {"index": 0, "type": "function", "function": {"name": "add", "arguments": ""}}
    rest = [call for delta in deltas[2:-1] for call in delta["tool_calls"]]
    assert len(rest) > 5  # they come while the model writes
    assert all(set(call) == {"index", "function"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in rest) == ARGUMENTS
    assert (chunks[-2]["choices"][0]["finish_reason"], deltas[-1]) == ("tool_calls", {})


async def test_cut_short(server: Running):
    says(server, CALL)
    reply = await server.openai.chat.completions.create(model="m", messages=ASK, tools=[TOOL], max_tokens=45)
    assert reply.choices[0].finish_reason == "length"
    (call,) = reply.choices[0].message.tool_calls or []
    assert ARGUMENTS.startswith(call.function.arguments)  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [1, 2, 4, 9])
async def test_a_limit_within_a_marker_is_no_text_in_any_api(server: Running, n: int):
    """The fake's tokens are characters; the marker is `<tool_call>`."""
    says(server, CALL)
    body = {"messages": ASK, "tools": [TOOL], "max_tokens": n}
    _, chat = await server.post("/v1/chat/completions", body)
    assert (chat["choices"][0]["message"]["content"] or "", chat["choices"][0]["finish_reason"]) == ("", "length")
    chunks = await events(server, "/v1/chat/completions", {**body, "stream": True})
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk and chunk["choices"])
    tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}
    _, reply = await server.post("/v1/messages", {**body, "tools": [tool]})
    assert (reply["content"], reply["stop_reason"]) == ([], "max_tokens")
    tool = {"type": "function", "name": "add", "parameters": TOOL["function"]["parameters"]}
    _, reply = await server.post("/v1/responses", {"input": "Hi", "tools": [tool], "max_output_tokens": n})
    assert not any(part["text"] for item in reply["output"] for part in item.get("content", ()))
    asked = {"model": "fake", "messages": ASK, "tools": [TOOL], "options": {"num_predict": n}, "stream": False}
    _, reply = await server.post("/api/chat", asked)
    assert (reply["message"]["content"], reply["done_reason"]) == ("", "length")


async def test_choice(server: Running):
    says(server, CALL)
    body = {"messages": ASK, "tools": [TOOL], "verbose": True}
    _, reply = await server.post("/v1/chat/completions", {**body, "tool_choice": "none"})
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert "add" not in reply["__verbose"]["prompt"]
    _, reply = await server.post("/v1/chat/completions", {**body, "parse_tool_calls": False})
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert "Adds numbers" in reply["__verbose"]["prompt"]
    says(server, f"{CALL}\n{CALL}")
    for parallel, n in ((True, 2), (False, 1), (None, 2)):
        _, reply = await server.post("/v1/chat/completions", {**body, "parallel_tool_calls": parallel})
        message = reply["choices"][0]["message"]
        assert len(message["tool_calls"]) == n
        assert message["content"] is None


async def test_reasoning(server: Running):
    says(server, f"{THOUGHT}Two.")
    body: dict[str, Any] = {"messages": ASK}
    for kind in ("auto", "deepseek", None):
        _, reply = await server.post("/v1/chat/completions", {**body, "reasoning_format": kind})
        message = reply["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Two.", "reasoning_content": "I should add."}
    _, reply = await server.post("/v1/chat/completions", {**body, "reasoning_format": "none"})
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": f"{THOUGHT}Two."}
    body["reasoning_format"] = "deepseek-legacy"
    _, reply = await server.post("/v1/chat/completions", body)
    legacy = {"role": "assistant", "content": f"{THOUGHT}Two.", "reasoning_content": "I should add."}
    assert reply["choices"][0]["message"] == legacy
    deltas = [c["choices"][0]["delta"] for c in (await events(server, "/v1/chat/completions", body))[1:-1]]
    assert "".join(d.get("content", "") for d in deltas) == f"{THOUGHT}Two."
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "I should add."


async def test_skip_chat_parsing_leaves_reasoning_and_calls_in_the_text():
    async with chatting(HERMES_LIKE, skip_chat_parsing=True) as server:
        said = f'{THOUGHT}Two.<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>'
        says(server, said)
        for body in ({"messages": ASK}, {"messages": ASK, "reasoning_format": "deepseek"}):
            _, reply = await server.post("/v1/chat/completions", body)
            assert reply["choices"][0]["message"] == {"role": "assistant", "content": said}
        _, reply = await server.post("/v1/chat/completions", {"messages": ASK, "tools": [TOOL]})
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": said}
        _, reply = await server.post("/v1/messages", {"messages": ASK, "max_tokens": 200})
        assert reply["content"] == [{"type": "text", "text": said}]


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
@pytest.mark.parametrize("template", ["object", "text"])
async def test_calls_without_arguments_in_the_history(arguments: Any, template: str):
    written = HERMES_LIKE if template == "object" else HERMES_LIKE.replace("arguments | tojson", "arguments")
    async with chatting(written) as server:
        for function in ({"name": "now", "arguments": arguments}, {"name": "now"}):
            call = {"id": "c", "type": "function", "function": function}
            said = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
            said.append({"role": "tool", "tool_call_id": "c", "content": "r"})
            status, reply = await server.post("/v1/chat/completions", {"messages": said})
            assert status == 200, reply
            assert '{"name": "now", "arguments": {}}' in prompt(server)
        items = [{"type": "function_call", "call_id": "c", "name": "now", "arguments": arguments or None}]
        items.append({"type": "function_call_output", "call_id": "c", "output": "r"})
        assert (await server.post("/v1/responses", {"input": [*ASK, *items]}))[0] == 200
        assert '{"name": "now", "arguments": {}}' in prompt(server)


NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_allowed_tools_and_any(server: Running):
    says(server, CALL)
    body: dict[str, Any] = {"messages": ASK, "tools": [TOOL, NOW]}
    for choice, lazy in (
        (allowed("auto", "add"), True),
        (allowed("required", "add"), False),
        ({**allowed("required", "add")["allowed_tools"], "type": "allowed_tools"}, False),
        ("any", False),
    ):
        _, reply = await server.post("/v1/chat/completions", {**body, "tool_choice": choice})
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        grammar = server.scheduler.requests[-1].sampling.grammar
        assert grammar.lazy == lazy
        assert (choice == "any") == ("now" in grammar.grammar.source)
        named = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
        flat = [{"type": "function", **tool["function"]} for tool in (TOOL, NOW)]
        await server.post("/v1/responses", {"input": "x", "tools": flat, "tool_choice": named})
        source = server.scheduler.requests[-1].sampling.grammar.grammar.source
        assert ("now" in source, '\\"add' in source) == (True, False)
    wrong: list[Any] = [
        allowed("auto"), allowed("never", "add"), allowed("auto", "sub"), {"type": "allowed_tools"}, "some",
        {"type": "allowed_tools", "mode": "auto", "tools": ["add"]}, {"type": "allowed_tools", "allowed_tools": 5},
    ]  # fmt: skip
    for choice in wrong:
        status, reply = await server.post("/v1/chat/completions", {**body, "tool_choice": choice})
        assert (status, "field 'tool_choice'" in reply["error"]["message"]) == (400, True), choice


async def test_functions_of_the_first_form(server: Running):
    says(server, CALL)
    body: dict[str, Any] = {"messages": ASK, "functions": [TOOL["function"]]}
    for choice in (None, "auto", {"name": "add"}):
        _, reply = await server.post("/v1/chat/completions", {**body, "function_call": choice})
        (answer,) = reply["choices"]
        assert answer["finish_reason"] == "function_call"
        assert answer["message"]["function_call"] == {"name": "add", "arguments": ARGUMENTS}
        assert "tool_calls" not in answer["message"]
        parts = (await events(server, "/v1/chat/completions", {**body, "function_call": choice}))[1:-2]
        calls = [chunk["choices"][0]["delta"]["function_call"] for chunk in parts]
        assert (calls[0]["name"], "".join(call["arguments"] for call in calls)) == ("add", ARGUMENTS)
    _, reply = await server.post("/v1/chat/completions", {**body, "function_call": "none"})
    assert reply["choices"][0]["finish_reason"] == "stop"
    again = [*ASK, answer["message"], {"role": "function", "name": "add", "content": "2"}]
    says(server, "2.")
    status, reply = await server.post("/v1/chat/completions", {**body, "messages": again})
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "2.")
    calls_ = [{"id": "add", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}]
    newer = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls_}]
    newer.append({"role": "tool", "tool_call_id": "add", "name": "add", "content": "2"})
    one, other = [
        (await server.post("/apply-template", asked))[1]["prompt"]
        for asked in ({**body, "messages": again}, {"messages": newer, "tools": [TOOL]})
    ]
    assert one == other
    for wrong, named in (
        ({"functions": 5}, "'functions'"), ({"functions": [{}]}, "'functions[0].name'"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "'functions[0].parameters'"),
        ({"function_call": {"name": "g"}}, "'function_call'"), ({"tools": [TOOL]}, "'functions'"),
        ({"messages": [*ASK, {"role": "function", "content": "2"}]}, "'messages[1].name'"),
    ):  # fmt: skip
        status, reply = await server.post("/v1/chat/completions", {**body, **wrong})
        assert (status, f"field {named}" in reply["error"]["message"]) == (400, True), reply
    assert (await server.post("/v1/completions", {"prompt": "x", "functions": body["functions"]}))[0] == 400


async def test_reasoning_that_is_not_shown(server: Running):
    says(server, f"{THOUGHT}Two.")
    body: dict[str, Any] = {"messages": ASK, "include_reasoning": False}
    _, reply = await server.post("/v1/chat/completions", body)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Two."}
    deltas = [c["choices"][0]["delta"] for c in (await events(server, "/v1/chat/completions", body))[1:-1]]
    assert "".join(d.get("content") or "" for d in deltas) == "Two."
    assert not any("reasoning_content" in d for d in deltas)


async def test_documents_are_for_the_template():
    template = "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    async with chatting(template) as server:
        said = {"messages": [{"role": "user", "content": "x"}], "documents": [{"title": "a", "text": "b"}]}
        for body, text in ((said, "[a: b]x"), ({**said, "documents": None}, "x")):
            assert (await server.post("/apply-template", body))[1]["prompt"] == text
        for wrong in ("b", ["b"]):
            status, reply = await server.post("/v1/chat/completions", {**said, "documents": wrong})
            assert (status, "field 'documents" in reply["error"]["message"]) == (400, True)


async def test_reasoning_that_the_prompt_began(server: Running):
    says(server, "I should add.\n</think>\n\nTwo.")
    body = {"messages": ASK, "chat_template_kwargs": {"force_thinking": True}, "verbose": True}
    _, reply = await server.post("/v1/chat/completions", body)
    assert reply["__verbose"]["prompt"].endswith("[assistant]<think>\n")
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Two.", "I should add.")


async def test_a_required_call_behind_reasoning_that_the_prompt_began_unasked(server: Running):
    """Where the template opens the reasoning whatever `enable_thinking` says."""
    kwargs = {"force_thinking": True, "enable_thinking": False}
    body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "chat_template_kwargs": kwargs}
    await server.post("/v1/chat/completions", body)
    constraint = server.scheduler.requests[-1].sampling.grammar
    assert constraint is not None
    assert constraint.grammar.matcher().accept_bytes(b"I should add.\n</think>\n\n<tool_call>")


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/v1/chat/completions", {"json_schema": SCHEMA}),
    ("/v1/chat/completions", {"guided_regex": r"\{\"x\": [0-9]\}"}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 99}),
    ("/api/chat", {"format": SCHEMA, "stream": False, "model": "fake"}),
]


@pytest.mark.parametrize(("path", "form"), FORMS)
async def test_an_answer_of_a_form_may_follow_reasoning(server: Running, path: str, form: dict[str, Any]):
    """Qwen 3's template does not open the tag: the model does, or answers at once."""

    async def grammar(**more: Any) -> Any:
        ask = {"input": "x"} if path == "/v1/responses" else {"messages": ASK}
        status, reply = await server.post(path, {"model": "m", **ask, **form, **more})
        assert status == 200, reply
        return server.scheduler.requests[-1].sampling.grammar.grammar

    made = await grammar()
    assert accepts(made, '<think>\nOne, {"x": "?"}.\n</think>\n\n{"x": 1}')
    assert accepts(made, '{"x": 1}')
    assert not accepts(made, '<think>\nOne.\n</think>\n\n{"x": "1"}')
    if path == "/v1/chat/completions":
        kwargs = {"enable_thinking": False}
        for more in ({"chat_template_kwargs": kwargs}, {"reasoning_budget_tokens": 0}, {"reasoning_format": "none"}):
            made = await grammar(**more)
            assert accepts(made, '{"x": 1}')
            if "reasoning_budget_tokens" not in more:
                assert not made.matcher().accept_bytes(b"<think>")


async def test_continuing_a_thought(server: Running):
    says(server, " add.\n</think>Two.")
    messages = [*ASK, {"role": "assistant", "content": "", "reasoning_content": "I should"}]
    _, reply = await server.post("/v1/chat/completions", {"messages": messages, "verbose": True})
    assert reply["__verbose"]["prompt"].endswith("[assistant]<think>\nI should")
    assert reply["choices"][0]["message"]["reasoning_content"] == " add."
    messages[-1]["content"] = "It is"
    says(server, " two.")
    _, reply = await server.post("/v1/chat/completions", {"messages": messages, "verbose": True})
    assert reply["__verbose"]["prompt"].endswith("[assistant]<think>\nI should\n</think>\n\nIt is")
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": " two."}


async def test_a_continued_answer_closes_reasoning_that_the_prompt_opened(server: Running):
    says(server, " two.")
    body = {
        "messages": [*ASK, {"role": "assistant", "content": "It is"}],
        "chat_template_kwargs": {"force_thinking": True},
        "verbose": True,
    }
    _, reply = await server.post("/v1/chat/completions", body)
    assert reply["__verbose"]["prompt"].endswith("[assistant]<think>\n</think>\n\nIt is")
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": " two."}


async def test_reasoning_whose_opening_is_a_line() -> None:
    """Apriel's: the prompt ends in a line that opens the reasoning."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{{ 'Here are my reasoning steps:\\n' }}{% endif %}"
    async with chatting(source + "{# [BEGIN FINAL RESPONSE] #}") as server:
        says(server, "Hm.\n[BEGIN FINAL RESPONSE]\nTwo.")
        _, reply = await server.post("/v1/chat/completions", {"messages": ASK})
        message = reply["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Two.", "Hm.")
        said = [*ASK, {"role": "assistant", "content": "It is"}]
        _, reply = await server.post("/apply-template", {"messages": said})
        assert reply["prompt"].endswith("reasoning steps:\n[BEGIN FINAL RESPONSE]It is")


async def test_a_tool_without_properties_takes_any_object_and_one_without_parameters_none(server: Running):
    for function, arguments in (
        ({"name": "any", "parameters": {"type": "object"}}, '{"x": 1}'),
        ({"name": "any"}, "{}"),
    ):
        says(server, f'<tool_call>\n{{"name": "any", "arguments": {arguments}}}\n</tool_call>')
        body = {"messages": ASK, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        _, reply = await server.post("/v1/chat/completions", body)
        assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        grammar = server.scheduler.requests[-1].sampling.grammar.grammar
        assert accepts(grammar, server.scheduler.answer)
        assert accepts(grammar, server.scheduler.answer.replace(arguments, '{"y": [2]}')) == (arguments != "{}")


async def test_reasoning_with_logprobs(server: Running):
    says(server, f"{THOUGHT}Two.")
    asked: Any = {"model": "m", "messages": ASK, "logprobs": True, "top_logprobs": 1}
    chunks = [c async for c in await server.openai.chat.completions.create(**asked, stream=True)]
    told = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert "".join(told) == f"{THOUGHT}Two."


async def test_a_template_that_knows_no_tools():
    async with chatting("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]") as server:
        says(server, '{"tool_call": {"name": "add", "arguments": {"a": 1}}}')
        tool = {"function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
        asked: Any = {"messages": ASK, "tools": [tool], "verbose": True}
        _, reply = await server.post("/v1/chat/completions", asked)
        assert prompt(server) == reply["__verbose"]["prompt"]
        assert prompt(server).startswith("<s>[system]You can call these tools:\n{")
        assert json.dumps(tool["function"]["parameters"]) in prompt(server)
        message = reply["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        says(server, '{"response": "It is \\"2\\"."}')
        asked["messages"] = [*ASK, message, {"role": "tool", "tool_call_id": "c", "content": "2"}]
        chunks = await events(server, "/v1/chat/completions", asked)
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1])
        assert text == 'It is "2".'
        assert '[user]{"tool_response": {"tool_call_id": "c", "content": "2"}}' in prompt(server)
        assert '[assistant]{"tool_call": {"name": "add", "arguments": {"a": 1}, "id": "call_' in prompt(server)


async def test_typed_parts(server: Running):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    says(server, "c")
    _, reply = await server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "verbose": True}
    )
    assert "[user]a\nb[assistant]" in reply["__verbose"]["prompt"]
    for kind in ("image_url", "input_audio", "file"):
        media = [{"role": "user", "content": [{"type": kind, kind: {}}]}]
        await refused(server, "/v1/chat/completions", {"messages": media}, 400, "messages[0].content[0]")


LOOP = """{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else -%}
{% for c in m.content %}{% if c.type == 'text' %}PART{% endif %}{% endfor %}{% endif %}{% endfor %}"""
PARTS = {
    "{{ c.text }}": "ab",
    "{{ c.text ~ ('' if loop.last else '\\n\\n') }}": "a\n\nb",
    "{{ c.text }}{% if not loop.last %}, {% endif %}": "a, b",
}


@pytest.mark.parametrize(("part", "text"), PARTS.items())
async def test_parts_are_joined_as_the_template_does(part: str, text: str):
    async with chatting(LOOP.replace("PART", part)) as server:
        said = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        assert (await server.post("/apply-template", {"messages": said}))[1]["prompt"] == f"[user]{text}"


BAD_TOOLS: list[Any] = [
    1, {}, {"type": "functoin", "function": {"name": "f"}}, {"function": 1}, {"function": {}},
    {"function": {"name": 1}},
    {"function": {"name": ""}}, {"function": {"name": "f", "parameters": []}},
    {"function": {"name": "f", "description": 1}},
]  # fmt: skip
BAD_CALLS: list[Any] = [
    1, [1], [{}], [{"function": 1}], [{"function": {"name": 1}}], [{"function": {"name": "f", "arguments": 1}}],
]  # fmt: skip


async def test_refusals(server: Running):
    for tool in BAD_TOOLS:
        await refused(server, "/v1/chat/completions", {"messages": ASK, "tools": [tool]}, 400, "tools[0]")
    for calls in BAD_CALLS:
        messages = [*ASK, {"role": "assistant", "tool_calls": calls}]
        named = "messages[1].tool_calls"
        await refused(server, "/v1/chat/completions", {"messages": messages}, 400, named)
    body = {"messages": ASK, "tools": [TOOL]}
    await refused(server, "/v1/chat/completions", {**body, "tools": [TOOL] * 257}, 400, "tools")
    await refused(server, "/v1/chat/completions", {**body, "tool_choice": {"function": {"name": "sub"}}}, 400, "sub")
    await refused(server, "/v1/chat/completions", {**body, "stream": True, "logprobs": True}, 400, "logprobs")
    await refused(server, "/completion", {"prompt": "x", "tools": [TOOL]}, 400, "tools")
    assert not server.scheduler.requests


QWEN3_CODER = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | dictsort %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}{% endfor %}"
)


async def test_alternatives_of_whole_calls_are_refused_where_parameters_are_apart():
    """Where a tool is strict; else they are not enforced."""
    one = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {"type": "object", "oneOf": [one, one | {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]}
    async with chatting(QWEN3_CODER) as server:
        says(server, "No.")
        for strict, status in ((True, 400), (False, 200)):
            tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}
            got, body = await server.post("/v1/chat/completions", {"messages": ASK, "tools": [tool]})
            assert got == status
            if strict:
                assert "tool 'f': the model's format of calls cannot enforce oneOf" in body["error"]["message"]


async def test_chatml_ends_a_turn_by_its_text_where_the_vocabulary_lacks_it():
    ask = {"messages": ASK}
    async with chatting("chatml") as server:
        says(server, "2.")
        for body, end in ((ask, "<|im_end|>"), (ask | {"ignore_eos": True}, "")):
            await server.post("/v1/chat/completions", body)
            assert server.scheduler.requests[-1].turn_end == end
