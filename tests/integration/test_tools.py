"""Tools with a real model: grammar-constrained calls that fit their schemas."""

from __future__ import annotations

import json
import struct
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from logitless.models.gguf.file import GGUFFile

TEMPLATE = """\
{%- if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}
{%- for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}
{%- endfor %}{% if force_thinking %}<think>{% endif %}"""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "note": {"type": "string", "maxLength": 8},
            },
            "required": ["a", "unit", "note"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ASK: Any = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def server(serve_here_module: Any, shared_data: Path) -> Any:
    model = shared_data / "models" / "stories260K.gguf"
    return serve_here_module(model, "--ctx-size", "2048", "--chat-template", TEMPLATE)


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def fits(arguments: str) -> bool:
    found = json.loads(arguments)
    assert set(found) == {"a", "unit", "note"}
    assert isinstance(found["a"], int)
    assert found["unit"] in ("C", "F")
    return isinstance(found["note"], str) and len(found["note"]) <= 8


def test_a_required_call_fits_its_schema(client: openai.OpenAI) -> None:
    for seed in range(6):
        reply = client.chat.completions.create(
            model="m", messages=ASK, tools=[TOOL], tool_choice="required", seed=seed, temperature=1.5, max_tokens=400
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls or []:
            assert call.type == "function"
            assert call.function.name == "add"
            assert fits(call.function.arguments)
        assert choice.message.tool_calls


def test_tools_or_a_format(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(4):
        reply = client.chat.completions.create(
            model="m", messages=ASK, tools=[TOOL], response_format=form, seed=seed, max_tokens=400
        )
        message = reply.choices[0].message
        if message.tool_calls:
            assert all(fits(call.function.arguments) for call in message.tool_calls)  # type: ignore[union-attr]
        else:
            assert json.loads(message.content or "")["x"] in (True, False)


def test_a_choice_after_reasoning_or_beside_tools(server: Any) -> None:
    asked: Any = {"messages": ASK, "max_tokens": 60, "temperature": 0, "guided_choice": ["Maybe (yes)", "No/no"]}
    thinking = {"chat_template_kwargs": {"force_thinking": True}, "reasoning_budget_tokens": 5}
    for more in ({}, thinking):
        message = server.post("/v1/chat/completions", {**asked, **more})["choices"][0]["message"]
        assert message["content"] in asked["guided_choice"]
        assert bool(message.get("reasoning_content")) == bool(more)
    for seed in range(3):
        body = {**asked, "tools": [TOOL], "seed": seed, "temperature": 1, "max_tokens": 400}
        (choice,) = server.post("/v1/chat/completions", body)["choices"]
        called = choice["message"].get("tool_calls")
        assert called if choice["message"]["content"] is None else choice["message"]["content"] in body["guided_choice"]


def test_auto_is_held_to_the_schema_once_a_call_begins(serve_here: Any, shared_data: Path, tmp_path: Path) -> None:
    """A model that has tokens for <tool_call>, and begins with them: from there on the lazy grammar chooses."""
    source = shared_data / "models" / "stories260K.gguf"
    with GGUFFile.open(source) as gguf:
        names = [bytes(name) for name in gguf.metadata["tokenizer.ggml.tokens"]]
    raw, ids = source.read_bytes(), []
    for part in (b"<tool_", b"call>"):
        size = struct.pack("<Q", len(part))
        id = next(i for i, name in enumerate(names) if len(name) == len(part) and name[:1] != b"<")
        assert raw.count(size + names[id]) == 1
        raw = raw.replace(size + names[id], size + part)
        ids.append(id)
    model = tmp_path / "calls.gguf"
    model.write_bytes(raw)
    server = serve_here(model, "--ctx-size", "1024", "--chat-template", TEMPLATE)
    body = {"messages": ASK, "max_tokens": 300, "temperature": 1.5, "presence_penalty": 40}
    body["logit_bias"] = {str(ids[0]): 100, str(ids[1]): 80}  # the first, and after that the second
    for seed in range(4):
        asked = {**body, "seed": seed, "tools": [TOOL, NOW], "tool_choice": "auto"}
        (choice,) = server.post("/v1/chat/completions", asked)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert fits(call["function"]["arguments"]) if call["function"]["name"] == "add" else True
        assert choice["message"]["content"] is None
    free = server.post("/v1/chat/completions", {**body, "seed": 0, "tools": [TOOL], "tool_choice": "none"})
    assert free["choices"][0]["message"]["content"].startswith("<tool_call><tool_<tool_")  # nothing holds it here


def test_a_broken_schema_is_refused_where_it_is_strict(client: openai.OpenAI) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    broken = {"type": "function", "function": {"name": "bad", "parameters": parameters, "strict": True}}
    lenient = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    reply = client.chat.completions.create(
        model="m",
        messages=ASK,
        tools=[NOW, lenient],  # type: ignore[list-item]
        tool_choice="required",
        max_tokens=200,
        temperature=0,
    )
    assert reply.choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.function\.parameters"):
        client.chat.completions.create(model="m", messages=ASK, tools=[NOW, broken])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="only JSON"):
        client.chat.completions.create(
            model="m",
            messages=ASK,
            tools=[NOW],
            response_format={"type": "grammar", "grammar": 'root ::= "a"'},  # type: ignore[call-overload]
        )


def test_a_reasoning_budget(server: Any, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 30, "temperature": 0, "verbose": True}
    body["chat_template_kwargs"] = {"force_thinking": True}
    for budget in (1, 7):
        reply = server.post("/v1/chat/completions", {**body, "reasoning_budget_tokens": budget, "return_tokens": True})
        message = reply["choices"][0]["message"]
        tokens = reply["__verbose"]["tokens"]
        n_closing = len(server.post("/tokenize", {"content": "</think>"})["tokens"])
        assert len(tokens) == reply["usage"]["completion_tokens"] == 30
        text = server.post("/apply-template", body)["prompt"]
        prompt = server.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        assert len(prompt) == reply["usage"]["prompt_tokens"]
        again = {
            "prompt": prompt + tokens[: budget + n_closing],
            "n_predict": 30 - budget - n_closing,
            "temperature": 0,
        }
        rest = server.post("/completion", {**again, "return_tokens": True, "cache_prompt": False})
        assert rest["tokens"] == tokens[budget + n_closing :]  # it goes on as if it had stopped by itself
        assert message["content"]
        shown = server.post("/detokenize", {"tokens": tokens[:budget]})["content"]
        assert message["reasoning_content"].split() == shown.split()
    warned = {**body, "reasoning_budget_tokens": 2, "reasoning_budget_message": "No more."}
    message = server.post("/v1/chat/completions", warned)["choices"][0]["message"]
    assert message["reasoning_content"].endswith("No more.")
    assert message["content"]
    reply = server.post("/v1/chat/completions", {**body, "reasoning_budget_tokens": 0})
    assert reply["__verbose"]["prompt"].endswith("<think></think>\n\n")
    assert "reasoning_content" not in reply["choices"][0]["message"]


def test_the_client_ends_the_reasoning(server: Any, client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"force_thinking": True}, "reasoning_control": True}
    told, said = "", ""
    with client.chat.completions.create(
        model="m", messages=ASK, max_tokens=1500, temperature=0, stream=True, extra_body=extra
    ) as stream:
        for chunk in stream:
            delta = chunk.choices[0].delta if chunk.choices else None
            thought = getattr(delta, "reasoning_content", None) or ""
            if thought and not told:
                reply = server.post("/v1/chat/completions/control", {"id": chunk.id, "action": "reasoning_end"})
                assert reply == {"id": chunk.id, "success": True}
            told += thought
            said += (delta.content if delta else None) or ""
            if len(said) > 20:
                break
    assert told
    assert len(said) > 20
    reply = server.post("/v1/chat/completions/control", {"id": "x", "action": "reasoning_end"})
    assert (reply["success"], reply["message"]) == (False, "no completion with id 'x' is running")
    for body in ({"id": "x"}, {"action": "reasoning_end"}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post("/v1/chat/completions/control", body)
        with caught.value as error:
            assert error.code == 400
