"""POST /completion: llama-server's shapes, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.engine.requests import CompletionRequest, Progress, Timings, Token
from logitless.engine.sampling.params import FLOAT_MAX, SamplingParams
from logitless.frontend import fields
from logitless.frontend.replies.native import NativeReply
from logitless.frontend.replies.reply import Result, timings
from tests.helpers.http_fakes import N_CTX, FakeScheduler, Running, running, while_stepping

FINAL = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated", "prompt",
    "generation_settings", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached", "timings",
}  # fmt: skip
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


async def events(server: Running, path: str, body: Any) -> list[Any]:
    """The data of a stream's events."""
    async with server.http.post(server.url + path, json={**body, "stream": True}) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.content_type == "text/event-stream"
        blocks = (await reply.text()).split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) if block != "data: [DONE]" else None for block in blocks]


async def test_whole():
    async with running() as server:
        status, body = await server.post("/completion", {"prompt": "say:hé", "return_tokens": True})
        assert status == 200
        assert set(body) == FINAL
        assert set(body["timings"]) == TIMINGS
        assert body["content"] == "hé"
        assert body["tokens"] == [104, 195, 169, 257]
        assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "eos", "")
        assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens_cached"]) == (4, 8, 12)
        assert body["prompt"] == "<s>say:hé"
        assert body["generation_settings"]["seed"] == 0xFFFFFFFF
        for path in ("/completion", "/completions"):
            _, body = await server.post(path, {"prompt": "x", "n_predict": 3})
            assert (body["content"], body["tokens"], body["stop_type"]) == ("abc", [], "limit")


async def test_stream():
    async with running() as server:
        *chunks, last = await events(server, "/completion", {"prompt": "say:hé", "n_predict": 9})
        assert [chunk["content"] for chunk in chunks] == ["h", "", "é", ""]
        assert [chunk["tokens"] for chunk in chunks] == [[104], [195], [169], [257]]
        assert all(chunk["stop"] is False for chunk in chunks)
        assert [chunk["tokens_predicted"] for chunk in chunks] == [1, 2, 3, 4]
        for i in (1, 2):  # every chunk tells the slot that was chosen, on the short path and on the other
            body = {"prompt": "x", "n_predict": 2, "return_progress": i == 2, "timings_per_token": i == 2}
            assert {chunk["id_slot"] for chunk in await events(server, "/completion", body)} == {i}
        assert set(last) == FINAL
        assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
        assert last["generation_settings"]["stream"] is True


def test_chunk_counts_the_start_token_behind_an_encoders_prompt():
    """As the last object of the stream does."""
    reply = NativeReply.__new__(NativeReply)
    reply.job, reply.params = SimpleNamespace(top=None), SimpleNamespace(timings_per_token=False)
    result = Result(0, CompletionRequest((5, 6), SamplingParams()), "")
    chunks = [reply.token(result, Token(7, "a", timings=Timings(2, 1))), reply.progress(result, Progress(3, 2, 3, 0.0))]
    assert [json.loads(chunk.removeprefix(b"data: "))["tokens_evaluated"] for chunk in chunks] == [3, 3]


async def test_stop_words():
    async with running(reverse_prompts=("Q",)) as server:
        body = {"prompt": "say:abcXYZdef", "stop": ["XYQ", "XYZ"]}
        _, whole = await server.post("/completion", {**body, "n_probs": 1})
        assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == ("abc", "word", "XYZ")
        assert len(whole["completion_probabilities"]) == 3
        assert "".join(chunk["content"] for chunk in await events(server, "/completion", body)) == "abc"
        _, whole = await server.post("/completion", {"prompt": "say:abcXYdef", "stop": "XYZ"})
        assert whole["content"] == "abcXYdef"
        chunks = await events(server, "/completion", {"prompt": "say:abcXY", "n_predict": 5, "stop": "XYZ"})
        assert "".join(chunk["content"] for chunk in chunks) == "abcXY"
        for stop in ([], [""], "", None):  # then the server's own
            _, whole = await server.post("/completion", {"prompt": "say:abcQdef", "stop": stop})
            assert whole["content"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_results(stream: bool):
    async with running() as server:
        body = {"prompt": ["say:one", [256, *b"say:two"], "say:three"], "n": 2, "seed": 7}
        if stream:
            chunks = await events(server, "/completion", body)
            texts = ["".join(c["content"] for c in chunks if c["index"] == i) for i in range(6)]
            finals = sorted((c for c in chunks if c["stop"]), key=lambda c: c["index"])
        else:
            _, finals = await server.post("/completion", body)
            texts = [final["content"] for final in finals]
        assert texts == ["one", "one", "two", "two", "three", "three"]
        assert [final["index"] for final in finals] == list(range(6))
        assert [final["generation_settings"]["seed"] for final in finals] == [7, 8] * 3
        assert isinstance((await server.post("/completion", {"prompt": ["x"], "n_predict": 1}))[1], list)


async def test_prompts():
    async with running() as server:
        for prompt, ids in (
            ("ab", [256, 97, 98]),
            ([97, 98], [97, 98]),
            ([97, "b<s>", 99, "hello"], [97, 98, 256, 99, 258]),
            (["b", 99], [256, 98, 99]),
            ({"prompt_string": "a"}, [256, 97]),
            ({"prompt_string": "a", "multimodal_data": []}, [256, 97]),
            ("", [256]),
            ([97.0], [97]),
        ):
            assert (await server.post("/completion", {"prompt": prompt, "n_predict": 1}))[0] == 200
            assert list(server.scheduler.requests[-1].prompt) == ids
        assert (await server.post("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}))[
            0
        ] == 400


async def test_probabilities():
    async with running() as server:
        body = {"prompt": "x", "n_predict": 2, "n_probs": 3}
        _, whole = await server.post("/completion", body)
        probs = whole["completion_probabilities"]
        assert len(probs) == 2
        assert set(probs[0]) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert (probs[0]["id"], probs[0]["token"], probs[0]["bytes"]) == (97, "a", [97])
        assert set(probs[0]["top_logprobs"][0]) == {"id", "token", "bytes", "logprob"}
        assert len(probs[0]["top_logprobs"]) == 3
        chunks = await events(server, "/completion", body)
        assert [len(c["completion_probabilities"]) for c in chunks if not c["stop"]] == [1, 1]
        assert [c["completion_probabilities"][0] for c in chunks if not c["stop"]] == probs
        _, whole = await server.post("/completion", {**body, "post_sampling_probs": True, "logprobs": 1})
        (first, _) = whole["completion_probabilities"]
        assert set(first) == {"id", "token", "bytes", "prob", "top_probs"}
        assert first["prob"] == 0.5
        assert len(first["top_probs"]) == 3


async def test_response_fields():
    async with running() as server:
        fields = ["content", "generation_settings/n_predict", "timings", "nothing", "content/x"]
        _, body = await server.post("/completion", {"prompt": "x", "n_predict": 2, "response_fields": fields})
        assert set(body) == {"content", "generation_settings/n_predict", "timings"}
        assert body["generation_settings/n_predict"] == 2


async def test_progress_and_timings():
    async with running() as server:
        body = {"prompt": "x", "n_predict": 2, "return_progress": True, "timings_per_token": True}
        first, *chunks, last = await events(server, "/completion", body)
        assert first["prompt_progress"] == {"total": 2, "cache": 0, "processed": 2, "time_ms": 1.5}
        assert all(set(chunk["timings"]) == TIMINGS for chunk in (first, *chunks, last))
        told = {name: first["timings"][name] for name in ("cache_n", "prompt_n", "prompt_ms", "predicted_n")}
        assert told == {"cache_n": 0, "prompt_n": 2, "prompt_ms": 1.5, "predicted_n": 0}


@pytest.mark.parametrize(("n", "ms", "per_token", "per_second"), [(0, 0, 0, 0), (1, 0, 0, 0), (16, 30, 2, 500)])
def test_the_first_token_costs_no_decode_step(n: int, ms: float, per_token: float, per_second: float):
    told = timings(Timings(predicted_n=n, predicted_ms=ms))
    assert (told.predicted_per_token_ms, told.predicted_per_second) == (per_token, per_second)


async def test_samplers_that_nobody_knows_are_left_out(caplog):
    """As llama-server does: SillyTavern's chain still names some that have gone. The log tells each once."""
    fields.forget()
    chain = ["top_k", "tfs_z", "typical_p", "Top-P", "temperature"]
    async with running() as server:
        for _ in range(2):
            status, reply = await server.post("/completion", {"prompt": "x", "n_predict": 1, "samplers": chain})
            assert status == 200
            assert reply["generation_settings"]["samplers"] == ["top_k", "top_p", "temperature"]
    told = [record.getMessage() for record in caplog.records if "samplers" in record.getMessage()]
    assert told == [f"samplers: there is none named {name!r}; it is left out" for name in ("tfs_z", "typical_p")]


async def test_no_client_fills_the_log(caplog):
    fields.forget()
    async with running() as server:
        body = {"prompt": "x", "n_predict": 1, "samplers": [f"sampler {i}" for i in range(500)]}
        assert (await server.post("/completion", body))[0] == 200
    assert sum("there is none" in record.getMessage() for record in caplog.records) == fields.MOST


async def test_settings_reach_the_scheduler():
    async with running(n_predict=100) as server:
        body = {
            "prompt": "x", "max_tokens": 7, "temperature": -1, "top_p": 3, "top_k": -5, "min_p": None, "seed": -1,
            "dry_base": 0.5, "mirostat": 9, "logit_bias": [[97, False], ["hello!", 2], [9999, 1]], "ignore_eos": True,
            "samplers": "kt", "cache_prompt": False, "id_slot": 2, "n_indent": 1, "t_max_predict_ms": 10,
        }  # fmt: skip
        status, reply = await server.post("/completion", body)
        assert status == 200
        request = server.scheduler.requests[-1]
        sampling = request.sampling
        assert (request.n_predict, request.cache_prompt, request.id_slot, request.n_indent) == (7, False, 2, 1)
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0, 0.05)
        assert (sampling.dry_base, sampling.mirostat, sampling.samplers) == (1.75, 2, ("top_k", "temperature"))
        inf = float("inf")
        assert sampling.logit_bias == ((97, -inf), (258, 2), (33, 2), (257, -inf))
        shown = reply["generation_settings"]
        assert {"bias": None, "token": 257} in shown["logit_bias"]
        assert (shown["n_predict"], shown["max_tokens"], shown["ignore_eos"]) == (7, 7, True)
        for asked, got in ((None, 100), (-1, 100), (99, 99), (101, 101), (0, 0)):
            _, reply = await server.post("/completion", {"prompt": "x", "n_predict": asked})
            assert reply["generation_settings"]["n_predict"] == got
        _, reply = await server.post("/completion", {"prompt": "x", "n_predict": 0})
        assert (reply["content"], reply["tokens_predicted"]) == ("", 0)
        _, reply = await server.post("/completion", {"prompt": "x", "n_predict": 1, "logit_bias": {"97": -100, "b": 1}})
        assert server.scheduler.requests[-1].sampling.logit_bias == ((97, -100), (98, 1))
        bias = [[97, 2], [98, 1e38], ["a", -0.5], [98, 3e38], [99, 1], [99, False], [99, 5]]  # they add up
        await server.post("/completion", {"prompt": "x", "n_predict": 1, "logit_bias": bias})
        assert server.scheduler.requests[-1].sampling.logit_bias == ((97, 1.5), (98, FLOAT_MAX), (99, -inf))


async def test_context_exceeded():
    async with running() as server:
        for stream in (False, True):
            status, body = await server.post("/completion", {"prompt": "x" * N_CTX, "stream": stream})
            assert status == 400
            assert body["error"]["type"] == "exceed_context_size_error"
            assert (body["error"]["n_prompt_tokens"], body["error"]["n_ctx"]) == (N_CTX + 1, N_CTX)


async def test_one_bad_prompt_refuses_all():
    async with running() as server:
        status, _ = await server.post("/completion", {"prompt": ["say:a", "x" * N_CTX]})
        assert status == 400
        assert not server.scheduler.running


async def test_a_broken_step_fails_its_requests_only(caplog: pytest.LogCaptureFixture):
    async with running() as server:
        for prompt in ("step-boom", "submit-boom"):
            status, body = await server.post("/completion", {"prompt": prompt})
            assert (status, body["error"]["type"]) == (500, "server_error")
            assert "\n" not in body["error"]["message"]
            assert "fire" not in body["error"]["message"]
        *_, error = await events(server, "/completion", {"prompt": "step-boom"})
        assert error["error"]["code"] == 500
        assert (await server.post("/completion", {"prompt": "say:ok"}))[1]["content"] == "ok"
    assert "the device is on fire" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(stream: bool):
    gate = threading.Semaphore(0)
    scheduler = FakeScheduler(1, gate)
    async with running(scheduler=scheduler, n_parallel=1) as server:
        task = asyncio.create_task(server.post("/completion", {"prompt": "x", "stream": stream}))
        while not scheduler.running:
            await server.get("/health")
        task.cancel()
        await asyncio.wait([task])
        assert await while_stepping(gate, asyncio.to_thread(scheduler.n_cancelled.acquire, timeout=60))
        assert len(scheduler.cancelled) == 1
        assert not scheduler.running
        _, body = await while_stepping(gate, server.post("/completion", {"prompt": "say:next"}))
        assert body["content"] == "next"


async def test_many_streams_at_once_share_a_connection_pool():
    async with running(n_parallel=16) as server:
        bodies = [{"prompt": f"say:{'abc' * i}"} for i in range(32)]
        streams = await asyncio.gather(*[events(server, "/completion", body) for body in bodies])
        for i, chunks in enumerate(streams):
            assert "".join(chunk["content"] for chunk in chunks) == "abc" * i


async def test_a_connection_is_used_again_after_streams_and_errors():
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        for body, status in (
            (b'{"prompt":"say:a","stream":true}', b"200"),
            (b"{", b"400"),
            (b'{"prompt":"say:b"}', b"200"),
        ):
            head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            reply = await reader.readuntil(b"\r\n\r\n")
            assert reply.split()[1] == status
            if b"chunked" in reply:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                length = int(reply.lower().split(b"content-length:")[1].split()[0])
                await reader.readexactly(length)
        writer.close()
        await writer.wait_closed()


async def test_silence_is_filled_with_comments():
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(1, gate)) as server:
        body = {"prompt": "say:a", "stream": True, "sse_ping_interval": 1}
        async with server.http.post(server.url + "/completion", json=body) as reply:
            assert await reply.content.readuntil(b"\n\n") == b":\n\n"
            gate.release(10)
            assert b'"content":"a"' in await reply.content.read()
