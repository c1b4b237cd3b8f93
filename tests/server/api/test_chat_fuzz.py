"""Chat bodies that are almost right: refused in one line, never a 500."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.chat_fakes import HERMES_LIKE, chatting

ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["", "x", "auto", "function", "text", "user", "é\n"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "text", "name", "function", "content", "role", "parameters", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | ANY
FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"]) | ANY}, optional={"parameters": ANY, "arguments": ANY, "strict": ANY}
)
CALL = st.fixed_dictionaries({"function": FUNCTION | ANY}, optional={"id": ANY, "type": ANY})
TOOL = st.fixed_dictionaries(
    {"type": st.just("function") | ANY},
    optional={"function": FUNCTION | ANY, "name": st.just("f") | ANY, "input_schema": ANY, "parameters": ANY},
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "tool_use", "tool_result", "thinking", "image"]) | ANY},
    optional={
        "text": st.just("x") | ANY,
        "id": ANY,
        "name": ANY,
        "input": ANY,
        "tool_use_id": ANY,
        "content": ANY,
        "thinking": ANY,
    },
)
CONTENT = st.just("x") | st.lists(PART, max_size=2) | ANY
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": CONTENT},
    optional={
        "tool_calls": st.lists(CALL, max_size=2) | ANY,
        "reasoning_content": ANY,
        "tool_call_id": ANY,
        "name": ANY,
    },
)
ITEM = MESSAGE | st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | ANY},
    optional={
        "call_id": ANY,
        "name": ANY,
        "arguments": ANY,
        "output": ANY,
        "summary": ANY,
        "content": CONTENT,
        "role": ROLE,
    },
)
CHOICE = (
    st.sampled_from(["auto", "none", "required", {"type": "any"}, {"type": "function", "function": {"name": "f"}}])
    | ANY
)
FIELDS: dict[str, Any] = {
    "messages": st.lists(MESSAGE | ANY, max_size=3) | ANY,
    "input": st.lists(ITEM | ANY, max_size=3) | st.just("x") | ANY,
    "tools": st.lists(TOOL | ANY, max_size=2) | ANY,
    "tool_choice": CHOICE,
    "stream": st.booleans(),
    "system": CONTENT,
    "instructions": ANY,
    "thinking": st.just({"type": "enabled", "budget_tokens": 3}) | ANY,
    "reasoning": ANY,
    "text": ANY,
    "reasoning_format": st.sampled_from(["none", "auto", "deepseek-legacy"]) | ANY,
    "reasoning_budget_tokens": ANY,
    "chat_template_kwargs": ANY,
    "continue_final_message": ANY,
    "add_generation_prompt": ANY,
    "parallel_tool_calls": ANY,
    "response_format": st.just({"type": "json_object"}) | ANY,
    "stop_sequences": ANY,
}
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 4}
BODY = st.lists(st.one_of([st.tuples(st.just(name), value) for name, value in FIELDS.items()]), max_size=2).map(
    lambda changes: {**GOOD, **dict(changes)}
)
PATHS = [
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/control",
]


def test_no_body_gives_a_500() -> None:
    with asyncio.Runner() as runner:
        server = chatting(HERMES_LIKE)
        started = runner.run(server.__aenter__())
        answered = {200: 0, 400: 0}

        async def ask(path: str, body: Any) -> None:
            async with started.http.post(started.url + path, json=body) as reply:
                text = await reply.text()
                assert reply.status in (200, 400, 404), (path, body, text)
                answered[reply.status] = answered.get(reply.status, 0) + 1
                if reply.status != 200:
                    assert "\n" not in (await reply.json())["error"]["message"]

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(PATHS), BODY)
        def fuzz(path: str, body: Any) -> None:
            runner.run(ask(path, body))

        fuzz()
        assert min(answered.values()) > 3
        runner.run(server.__aexit__(None, None, None))
