"""Log-probabilities are those of the text that is shown, of the same tokens in a whole reply and in a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from logitless.engine.requests import CompletionRequest
from tests.helpers.http_fakes import EOS, HELLO, FakeScheduler, FakeSequence, Running, running
from tests.server.api.test_completion import events


@dataclass
class Tokens(FakeScheduler):
    """Every request is answered with these."""

    answer: list[int] = field(default_factory=list)

    def submit(self, request: CompletionRequest, client: str = "") -> FakeSequence:
        sequence = super().submit(request)
        sequence.script = self.answer
        return sequence


async def told(server: Running, path: str, body: dict[str, Any]) -> tuple[str, list[Any]]:
    """The text and the tokens of a whole reply, which are those of the stream, too."""

    def of(choice: dict[str, Any]) -> tuple[str, list[Any]]:
        logprobs = choice.get("logprobs") or {}
        if "text" in choice:
            return choice["text"], list(zip(logprobs.get("tokens", ()), logprobs.get("text_offset", ()), strict=True))
        message = choice.get("message") or choice["delta"]
        return message.get("content") or "", [tuple(entry["bytes"]) for entry in logprobs.get("content", ())]

    status, reply = await server.post(path, body)
    assert status == 200
    whole = of(reply["choices"][0])
    parts = [of(chunk["choices"][0]) for chunk in await events(server, path, body) if chunk and chunk["choices"]]
    assert ("".join(text for text, _ in parts), [token for _, tokens in parts for token in tokens]) == whole
    return whole


FACE = list("😀".encode())
CASES: list[tuple[list[int], list[str], str, int]] = [  # answer, stop texts, what is shown, of how many tokens
    ([0xA9, 0xA9, *b"end", EOS], ["e"], "\ufffd\ufffd", 2),
    ([*b"a", *FACE[:2], *b"Xb", EOS], ["X"], "a\ufffd", 3),
    ([*b"a", *FACE, 0xA9, *b"Xb", EOS], ["XY", "Xb"], "a😀\ufffd", 6),
    ([*FACE, *b"X", EOS], ["😀X"], "", 0),
    ([*b"ab", HELLO, EOS], ["llo"], "abhe", 3),
    ([*b"ab", HELLO, EOS], ["hello"], "ab", 2),
    ([HELLO, *b"Y", EOS], ["oZ", "Y"], "hello", 1),
    ([0xA9, *b"ab", EOS], ["z"], "\ufffdab", 3),
]


@pytest.mark.parametrize(("answer", "stop", "shown", "n_tokens"), CASES)
async def test_a_stop_text(answer: list[int], stop: list[str], shown: str, n_tokens: int):
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 0}
    async with running(scheduler=Tokens(answer=answer)) as server:
        for path, body in (("/v1/completions", {"prompt": "x", "logprobs": 1}), ("/v1/chat/completions", chat)):
            text, tokens = await told(server, path, {**body, "stop": stop, "max_tokens": 20})
            assert (text, len(tokens)) == (shown, n_tokens)


@pytest.mark.parametrize("special", [False, True])
async def test_an_end_that_is_shown(special: bool):
    async with running(scheduler=Tokens(answer=[*b"ab", EOS]), special=special) as server:
        text, tokens = await told(server, "/v1/completions", {"prompt": "x", "logprobs": 1})
        assert text == ("ab</s>" if special else "ab")
        assert tokens == [("a", 0), ("b", 1), ("</s>", 2)][: 2 + special]
