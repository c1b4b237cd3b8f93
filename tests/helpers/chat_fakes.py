"""Chat test doubles: a server with scripted replies, and templates like those of models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from logitless.engine.requests import CompletionRequest
from logitless.models.chat.template import ChatTemplate
from tests.helpers.http_fakes import N_CTX, FakeScheduler, FakeSequence, Running, running

HERMES_LIKE = """\
{%- if tools %}{% for tool in tools %}[tools]<tool_call> {{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- if m.tool_calls %}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if force_thinking %}<think>
{% endif %}{% endif %}"""
"""Tools and reasoning as Qwen's templates have them, in few words."""
THOUGHT = "<think>\nI should add.\n</think>\n\n"


@dataclass
class Scripted(FakeScheduler):
    """Scheduler that answers every request with the same text."""

    answer: str = ""

    def submit(self, request: CompletionRequest, client: str = "") -> FakeSequence:
        sequence = super().submit(request)
        sequence.script = [*self.tokenizer.encode(self.answer, add_special=False, parse_special=False), 257]
        return sequence


def says(server: Running, text: str) -> None:
    """Set the reply of a server with a Scripted scheduler."""
    assert isinstance(server.scheduler, Scripted)
    server.scheduler.answer = text


def prompt(server: Running) -> str:
    """Text of the last request's prompt."""
    return server.scheduler.tokenizer.pieces(server.scheduler.requests[-1].prompt).decode()


async def named_events(server: Running, path: str, body: Any) -> list[dict[str, Any]]:
    """Data of an SSE stream with named events; checks that each name is the data's type."""
    async with server.http.post(server.url + path, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        blocks = (await reply.text()).split("\n\n")
    assert blocks.pop() == ""
    data = []
    for block in blocks:
        name, _, text = block.partition("\n")
        data.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {data[-1]['type']}"
    return data


@asynccontextmanager
async def chatting(template: str, n_ctx: int = N_CTX, **settings: Any) -> AsyncIterator[Running]:
    """A server with this chat template."""
    chat = ChatTemplate(template, bos_token="", eos_token="</s>")
    async with running(scheduler=Scripted(n_ctx=n_ctx), template=chat, **settings) as server:
        yield server
