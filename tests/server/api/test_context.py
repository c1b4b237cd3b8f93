"""JSON serialization of answers; parsing that runs beside the event loop."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from logitless.frontend.grammar import _SOURCES
from logitless.frontend.replies.encoding import encode_json, sse
from logitless.models.chat.template import ChatTemplate
from logitless.models.grammar import Grammar
from tests.helpers.chat_fakes import HERMES_LIKE, chatting
from tests.helpers.http_fakes import running

SCHEMA = {"type": "integer"}
SOURCES: dict[str, Any] = {
    "grammar": 'root ::= "a"',
    "json_schema": SCHEMA,
    "response_format": {"type": "json_object"},
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "structured_outputs": {"choice": ["a"]},
}
OTHERS = {"regex": "b", "ebnf": 'root ::= "b"'}  # SGLang's names


def test_a_text_that_utf8_lacks_and_a_number_that_json_lacks_are_replaced():
    assert encode_json({"file": "a\udcff.gguf", "n": [1.5, 2]}) == b'{"file":"a?.gguf","n":[1.5,2]}'
    assert encode_json([math.nan, math.inf, "é\n"]) == '[null,null,"é\\n"]'.encode()


def test_an_event_may_have_a_name():
    assert sse({"a": 1}) == b'data: {"a":1}\n\n'
    assert sse({"a": 1}, "ping") == b'event: ping\ndata: {"a":1}\n\n'


async def test_no_grammar_is_compiled_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def compile(*_: Any) -> None:
        threads.append(threading.get_ident())
        raise ValueError

    monkeypatch.setattr(Grammar, "compile", compile)
    assert SOURCES.keys() == _SOURCES.keys()
    bodies = [("/v1/completions", {"prompt": "a", name: value}) for name, value in (SOURCES | OTHERS).items()]
    bodies.append(("/api/generate", {"model": "fake", "prompt": "a", "raw": True, "format": SCHEMA}))
    async with running() as server:
        for path, body in bodies:
            assert (await server.post(path, body))[0] == 500, body
    assert len(threads) == len(bodies)
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    "name", ["grammar", "json_schema", "guided_json", "guided_regex", "guided_grammar", "ebnf", "regex"]
)
async def test_an_empty_text_is_no_grammar(name: str) -> None:
    async with running() as server:
        status, _ = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, name: ""})
        assert status == 200
        assert server.scheduler.requests[-1].sampling.grammar is None


async def test_no_template_is_rendered_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def render(*_: Any, **__: Any) -> None:
        threads.append(threading.get_ident())
        raise ValueError

    async with chatting(HERMES_LIKE) as server:
        monkeypatch.setattr(ChatTemplate, "render", render)
        messages = [{"role": "user", "content": "a"}]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 1}),
            ("/v1/responses", {"input": "a"}),
            ("/api/chat", {"model": "fake", "messages": messages}),
            ("/api/generate", {"model": "fake", "prompt": "a"}),
            ("/apply-template", {"messages": messages}),
        ]
        for path, body in asked:
            assert (await server.post(path, body))[0] == 500, path
    assert len(threads) == len(asked)
    assert threading.get_ident() not in threads
