"""First messages (--first-messages): in front of the conversations of every API; a system message is a default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.flags.flags import CliError
from logitless.cli.setup.server import first_messages
from tests.helpers.http_fakes import running

EXAMPLES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
FIRST = ({"role": "system", "content": "own"}, *EXAMPLES)
USER = {"role": "user", "content": "x"}
SHOWN = "<s>[system]own[/][user]a[/][assistant]b[/][user]x[/][assistant]"


async def test_every_chat_has_them() -> None:
    async with running(first_messages=FIRST) as server:
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": [USER]}),
            ("/v1/messages", {"messages": [USER], "max_tokens": 9}),
            ("/v1/responses", {"input": "x"}),
            ("/api/chat", {"model": "fake", "messages": [USER], "stream": False}),
            ("/api/generate", {"model": "fake", "prompt": "x", "stream": False}),
        ]
        for path, body in calls:
            assert (await server.post(path, body))[0] == 200
            ids = server.scheduler.requests[-1].prompt
            assert "<s>" + bytes(id for id in ids if id < 256).decode() == SHOWN, path
        assert (await server.post("/apply-template", {"messages": [USER]}))[1]["prompt"] in (SHOWN, SHOWN[3:])
        assert (await server.post("/completion", {"prompt": "x"}))[0] == 200
        assert bytes(id for id in server.scheduler.requests[-1].prompt if id < 256) == b"x"


async def test_a_system_message_replaces_theirs() -> None:
    async with running(first_messages=FIRST) as server:
        for role in ("system", "developer"):
            said = [{"role": role, "content": "new"}, USER]
            _, told = await server.post("/apply-template", {"messages": said})
            assert f"[{role}]new[/][user]a[/][assistant]b[/][user]x[/]" in told["prompt"]
            assert "own" not in told["prompt"]
        _, told = await server.post("/apply-template", {"messages": [USER, {"role": "assistant", "content": "go on"}]})
        assert told["prompt"].endswith("[user]x[/][assistant]go on")


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    path.write_text(json.dumps(FIRST))
    assert first_messages(str(path)) == FIRST
    assert first_messages(None) == ()
    for text, problem in (
        ("[", "Expecting"),
        ("{}", "item 0"),
        ("[1]", "item 0"),
        ('[{"role": "user"}]', "item 0"),
        ('[{"role": "user", "content": 1}]', "item 0"),
        ('[{"role": "user", "content": ""}, {"role": "system", "content": ""}]', "item 1"),
    ):
        path.write_text(text)
        with pytest.raises(CliError, match=f"^--first-messages: {path}: .*{problem}"):
            first_messages(str(path))
