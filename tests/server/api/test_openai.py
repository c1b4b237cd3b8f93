"""OpenAI's completions and chat completions, through its own client and as raw JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.helpers.http_fakes import N_CTX, running
from tests.server.api.test_completion import TIMINGS, events

ASK: Any = [{"role": "user", "content": "say:hé!"}]


async def test_completion():
    async with running() as server:
        reply = await server.openai.completions.create(model="any", prompt="say:hé", max_tokens=9)
        assert reply.id.startswith("cmpl-")
        assert reply.object == "text_completion"
        assert (reply.system_fingerprint or "").startswith("b")
        assert reply.model == "fake"
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == ("hé", "stop", None)
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (8, 4, 12)
        assert set(reply.timings) == TIMINGS  # type: ignore[attr-defined]
        reply = await server.openai.completions.create(model="any", prompt="x", max_tokens=2)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("ab", "length")


async def test_completion_stream():
    async with running() as server:
        stream = await server.openai.completions.create(
            model="m", prompt=["say:one", "say:two"], n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert len({chunk.id for chunk in chunks}) == 1
        usage = chunks.pop().usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (16, 16)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        for i, text in enumerate(("one", "one", "two", "two")):
            assert "".join(c.text for c in choices if c.index == i) == text
            assert [c.finish_reason for c in choices if c.index == i][-1] == "stop"
        *_, last, done = await events(server, "/v1/completions", {"prompt": "say:x"})
        assert done is None
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["usage"]["completion_tokens"] == 2
        assert set(last["timings"]) == TIMINGS


async def test_legacy_logprobs():
    async with running() as server:
        reply = await server.openai.completions.create(model="m", prompt="say:hé!", logprobs=2)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert logprobs.text_offset == [0, 1, 1, 2]
        assert logprobs.token_logprobs == [pytest.approx(-0.5 - id / 1000) for id in (104, 195, 169, 33)]
        assert [len(top) for top in logprobs.top_logprobs or []] == [2] * 4
        chunks = [c async for c in await server.openai.completions.create(
            model="m", prompt="say:hé!", logprobs=2, stream=True)]  # fmt: skip
        told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        assert [token for part in told for token in part.tokens or []] == logprobs.tokens
        assert [offset for part in told for offset in part.text_offset or []] == logprobs.text_offset
        reply = await server.openai.completions.create(model="m", prompt="say:h", logprobs=0)
        assert reply.choices[0].logprobs is not None
        assert reply.choices[0].logprobs.top_logprobs == [{"h": pytest.approx(-0.604)}]


async def test_echo_scores_the_prompt():
    async with running() as server:
        reply = await server.openai.completions.create(model="m", prompt="hello é", echo=True, max_tokens=0, logprobs=1)
        (choice,) = reply.choices
        assert choice.text == "hello é"
        assert choice.logprobs is not None
        tokens = ["<s>", "hello", " ", "bytes:\\xc3", "bytes:\\xa9"]
        assert choice.logprobs.tokens == tokens
        assert choice.logprobs.text_offset == [0, 0, 5, 6, 6]
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert all(isinstance(value, float) for value in choice.logprobs.token_logprobs[1:])
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] is None
        reply = await server.openai.completions.create(model="m", prompt="hello", echo=True, max_tokens=2, logprobs=1)
        assert reply.choices[0].text == "helloab"
        assert reply.choices[0].logprobs is not None
        assert reply.choices[0].logprobs.text_offset == [0, 0, 5, 6]
        reply = await server.openai.completions.create(model="m", prompt="hello", echo=True, max_tokens=1)
        assert (reply.choices[0].text, reply.choices[0].logprobs) == ("helloa", None)
        chunks = await events(server, "/v1/completions", {"prompt": "hello", "echo": True, "max_tokens": 1})
        assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["hello", "a", ""]


@pytest.mark.parametrize("more", [{}, {"max_tokens": 0}, {"prompt": ["hé", "say:ab"]}, {"return_progress": True}])
async def test_a_stream_with_echo_and_logprobs_adds_up_to_the_whole(more: dict[str, Any]):
    async with running() as server:
        body: dict[str, Any] = {"prompt": "hello é", "echo": True, "logprobs": 2, "max_tokens": 3, **more}
        _, reply = await server.post("/v1/completions", body)
        chunks = [c for c in await events(server, "/v1/completions", body) if c]
        for whole in reply["choices"]:
            deltas = [d for c in chunks for d in c["choices"] if d["index"] == whole["index"]]
            assert "".join(d["text"] for d in deltas) == whole["text"]
            told = [d["logprobs"] for d in deltas if d["logprobs"]]
            for key, values in whole["logprobs"].items():
                assert [value for part in told for value in part[key]] == values, key
            assert told[0]["token_logprobs"][0] is None
            texts = [d["text"] for d in deltas if d["text"]]
            assert whole["text"].startswith(texts[0])


async def test_best_of():
    async with running() as server:
        reply = await server.openai.completions.create(model="m", prompt="say:a", n=1, best_of=3)
        assert [choice.text for choice in reply.choices] == ["a"]
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 6)
        assert len(server.scheduler.requests) == 3


async def test_chat():
    async with running() as server:
        reply = await server.openai.chat.completions.create(model="m", messages=ASK, max_completion_tokens=50)
        assert "cmpl" in reply.id
        assert reply.object == "chat.completion"
        (choice,) = reply.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hé!", "stop")
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
        assert server.scheduler.requests[-1].prompt[:2] == (256, ord("["))  # one BOS, not two
        reply = await server.openai.chat.completions.create(model="m", messages=ASK, n=3, seed=1)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]


async def test_chat_stream():
    async with running(alias="llama-test-model") as server:
        first, *chunks, done = await events(server, "/v1/chat/completions", {"messages": ASK})
        assert done is None
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
        assert "timings" not in first
        assert [c["choices"][0]["delta"] for c in chunks] == [{"content": "h"}, {"content": "é"}, {"content": "!"}, {}]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert set(chunks[-1]["timings"]) == TIMINGS
        assert {c["model"] for c in chunks} == {"llama-test-model"}
        assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
        stream = await server.openai.chat.completions.create(
            model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        parsed = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in parsed if c.choices) == "hé!"
        assert parsed[-1].choices == []
        assert parsed[-1].usage is not None
        assert parsed[-1].usage.completion_tokens == 5
        assert set(parsed[-1].timings) == TIMINGS  # type: ignore[attr-defined]


async def test_chat_logprobs():
    async with running() as server:
        asked: Any = {"model": "m", "messages": ASK, "logprobs": True, "top_logprobs": 2}
        reply = await server.openai.chat.completions.create(**asked)
        assert reply.choices[0].logprobs is not None
        content = reply.choices[0].logprobs.content
        assert content is not None
        assert [entry.bytes for entry in content] == [[104], [195], [169], [33]]
        assert all(len(entry.top_logprobs) == 2 and entry.logprob < 0 for entry in content)
        told = []
        async for chunk in await server.openai.chat.completions.create(**asked, stream=True):
            choice = chunk.choices[0]
            if choice.finish_reason is None and choice.delta.role is None:
                assert choice.logprobs is not None
                assert choice.logprobs.content is not None
                told += choice.logprobs.content
        assert told == content
        _, body = await server.post("/v1/chat/completions", {"messages": ASK, "logprobs": True, "max_tokens": 1})
        assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
        asked["top_logprobs"] = 0
        reply = await server.openai.chat.completions.create(**asked)
        assert reply.choices[0].logprobs is not None
        assert (reply.choices[0].logprobs.content or [])[0].top_logprobs == []


async def test_chat_stop_word_with_logprobs():
    async with running() as server:
        body = {"messages": [{"role": "user", "content": "say:abcXY"}], "logprobs": True, "stop": "XY"}
        chunks = await events(server, "/v1/chat/completions", body)
        choices = [c["choices"][0] for c in chunks[:-1]]
        assert "".join(c["delta"].get("content") or "" for c in choices) == "abc"
        assert "".join(e["token"] for c in choices for e in c.get("logprobs", {}).get("content", [])) == "abc"
        chunks = await events(server, "/v1/chat/completions", {**body, "max_tokens": 4, "stop": "XYZ"})
        choices = [c["choices"][0] for c in chunks[:-1]]
        assert "".join(c["delta"].get("content") or "" for c in choices) == "abcX"
        assert "".join(e["token"] for c in choices for e in c.get("logprobs", {}).get("content", [])) == "abcX"


async def test_prefill():
    async with running(verbose=True) as server:
        messages = [*ASK, {"role": "assistant", "content": "Wh"}]
        for extra in (
            {},
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ):
            _, body = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **extra})
            assert body["__verbose"]["prompt"] == "<s>[user]say:hé![/][assistant]Wh"
        _, body = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "echo": True})
        assert body["choices"][0]["message"]["content"] == "Whh"
    async with running(prefill_assistant=False, verbose=True) as server:
        _, body = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert body["__verbose"]["prompt"].endswith("[assistant]Wh[/][assistant]")


async def test_progress_comes_after_the_role():
    async with running() as server:
        chunks = await events(server, "/v1/chat/completions", {"messages": ASK, "return_progress": True})
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[1]["prompt_progress"]["processed"] == chunks[1]["prompt_progress"]["total"]
        assert chunks[1]["timings"]["prompt_n"] == chunks[1]["prompt_progress"]["total"]


async def test_errors_are_the_client_s_own_exceptions():
    async with running(api_keys=("k",)) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai.chat.completions.create(model="m", messages=[])
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "invalid_request_error"
        with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
            await server.openai.completions.create(model="m", prompt="x" * N_CTX, stream=True)
        with pytest.raises(openai.AuthenticationError):
            await server.openai.with_options(api_key="wrong").completions.create(model="m", prompt="x")
        with pytest.raises(openai.APIError, match="step that computed"):
            async for _ in await server.openai.completions.create(model="m", prompt="step-boom", stream=True):
                pass


async def test_leaving_a_stream_early_cancels_it():
    async with running() as server:
        stream = await server.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        assert await asyncio.to_thread(server.scheduler.n_cancelled.acquire, timeout=5) or not server.scheduler.running


async def test_the_servers_effort_is_of_requests_that_do_not_say():
    async with running(reasoning_effort="low") as server:
        for more, effort in (({}, "low"), ({"reasoning_effort": "high"}, "high")):
            _, body = await server.post("/apply-template", {"messages": ASK, **more})
            assert effort in body["prompt"].partition("[user]")[0]
