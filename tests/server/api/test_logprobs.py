"""Log-probabilities match the shown text, in whole replies and in streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from logitless.engine.requests import CompletionRequest, TokenProb
from tests.helpers.http_fakes import BOS, EOS, HELLO, FakeScheduler, FakeSequence, Running, running
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


PLACES: list[tuple[list[int], str, list[int]]] = [  # answer, text, where each token begins
    ([BOS, BOS, *b"a", BOS, *b"b", EOS], "ab", [0, 0, 0, 1, 1]),  # special tokens have no text
    ([*FACE, *b"x", EOS], "😀x", [0, 0, 0, 0, 1]),
    ([*FACE[:2], *b"x", EOS], "\ufffdx", [0, 0, 1]),  # the character is broken off by what comes next
    ([*FACE[:3], *FACE, EOS], "\ufffd😀", [0, 0, 0, 1, 1, 1, 1]),
    ([0xE2, 0x82, 0xC3, 0xA9, EOS], "\ufffdé", [0, 0, 1, 1]),
    ([0xFF, 0xA9, *b"x", EOS], "\ufffd\ufffdx", [0, 1, 2]),
    ([0xEF, 0xBF, 0xBD, *b"x", EOS], "\ufffdx", [0, 0, 0, 1]),  # U+FFFD itself
    ([*b"a", *FACE[:2], BOS, *FACE[2:], EOS], "a😀", [0, 1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("answer", "text", "places"), PLACES)
async def test_places_of_tokens(answer: list[int], text: str, places: list[int]):
    async with running(scheduler=Tokens(answer=answer)) as server:
        for echo in (False, True):
            body = {"prompt": "é", "logprobs": 1, "echo": echo}
            _, reply = await server.post("/v1/completions", body)
            choice = reply["choices"][0]
            assert choice["text"] == "é" * echo + text
            assert choice["logprobs"]["text_offset"][-len(places) :] == [place + echo for place in places]
        _, reply = await server.post("/completion", {"prompt": "x", "n_probs": 1})
        assert [entry["id"] for entry in reply["completion_probabilities"]] == answer
        chunks = await events(server, "/completion", {"prompt": "x", "n_probs": 1})
        told = [entry["id"] for chunk in chunks for entry in chunk.get("completion_probabilities", ())]
        assert told == answer


async def test_the_chosen_token_is_always_told():
    async with running(scheduler=Unlikely()) as server:
        for n, many in ((0, 1), (2, 3), (True, 2)):
            _, reply = await server.post("/v1/completions", {"prompt": "say:ab", "logprobs": n})
            logprobs = reply["choices"][0]["logprobs"]
            for token, value, top in zip(
                logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
            ):
                assert top[token] == value
                assert len(top) == many
        body = {"prompt": "say:ab", "logprobs": True, "top_logprobs": 3}
        _, reply = await server.post("/v1/completions", body)
        assert [len(top) for top in reply["choices"][0]["logprobs"]["top_logprobs"]] == [4, 4]
        for wrong in ("yes", [1], {}):
            assert (await server.post("/v1/completions", {"prompt": "x", "logprobs": wrong}))[0] == 400


class Unlikely(FakeScheduler):
    """The chosen token is never among the likeliest."""

    def _top(self, id: int, n: int) -> TokenProb:
        return TokenProb(id, -9.0, tuple((other, -1.0) for other in range(60, 60 + n)))


@pytest.mark.parametrize("special", [False, True])
async def test_an_end_that_is_shown(special: bool):
    async with running(scheduler=Tokens(answer=[*b"ab", EOS]), special=special) as server:
        text, tokens = await told(server, "/v1/completions", {"prompt": "x", "logprobs": 1})
        assert text == ("ab</s>" if special else "ab")
        assert tokens == [("a", 0), ("b", 1), ("</s>", 2)][: 2 + special]
