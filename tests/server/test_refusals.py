"""Refusals: one line that names the field, in the API's error shape, never a 500."""

from __future__ import annotations

import asyncio
import errno
import io
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from logitless.engine.errors import InvalidRequest
from logitless.server.api.openai.files import listed
from logitless.server.auth import ApiKeys
from logitless.server.config import ServerConfig
from logitless.server.middleware import Guard
from tests.helpers.http_fakes import N_CTX, FakeTokenizer, Running, running

NUMBERS = [
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier",
    "dry_base", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "t_max_predict_ms",
]  # fmt: skip
INTEGERS = [
    "n_predict", "max_tokens", "max_completion_tokens", "top_k", "repeat_last_n", "dry_allowed_length",
    "dry_penalty_last_n", "mirostat", "min_keep", "seed", "n_probs", "n", "n_cmpl", "n_keep", "n_discard", "n_indent",
    "n_cache_reuse", "id_slot", "sse_ping_interval",
]  # fmt: skip
BOOLEANS = [
    "stream", "cache_prompt", "return_tokens", "timings_per_token", "return_progress", "ignore_eos", "verbose",
    "post_sampling_probs", "backend_sampling", "grammar_lazy",
]  # fmt: skip
HARD = [
    ("n_predict", -2), ("n_predict", 2**31), ("max_tokens", -2), ("n", 0), ("n", 5), ("n_cmpl", 99), ("id_slot", 4),
    ("id_slot", -2), ("repeat_last_n", -2), ("dry_allowed_length", -1), ("dry_penalty_last_n", -2), ("min_keep", -1),
    ("adaptive_decay", 1.0), ("n_keep", -2), ("n_discard", -1), ("n_indent", -1), ("sse_ping_interval", -2),
    ("n_cache_reuse", -1), ("t_max_predict_ms", -2),
]  # fmt: skip
NOTHING = [[id, False] for id in range(259)]  # of the vocabulary
FIELDS: list[tuple[str, Any]] = [
    *[(name, value) for name in NUMBERS for value in ("1", True, [], {})],
    *[(name, value) for name in INTEGERS for value in ("1", True, [], 1.5)],
    *[(name, value) for name in BOOLEANS for value in ("true", 1, [], {})],
    *HARD,
    *[("stop", value) for value in (1, {}, [1], [None], True, ["z"] * 257)],
    *[("samplers", value) for value in (1, {}, [1], "k" * 99)],
    *[
        ("logit_bias", value)
        for value in (1, "x", [1], [[1]], [[1, 2, 3]], [[1, True]], [[1, None]], {"1": "x"}, [[{}, 1]], NOTHING)
    ],
    *[("dry_sequence_breakers", value) for value in ([], "x", [1], {}, ["z"] * 65)],
    *[("speculative.type", value) for value in (1, [], "nope", "ngram-simple,nope", "draft-simple")],
    *[("speculative.n_max", value) for value in (-1, "x", 4097, 1.5)],
    *[("speculative.n_min", value) for value in (-1, "x", 4097)],
    *[("speculative.p_min", value) for value in (-0.1, 1.1, "x")],
    *[("speculative", value) for value in (1, "x", [])],
    *[("draft_tokens", value) for value in (1, "x", {}, ["x"], [-1], [259], [1.5], [None], [10**30])],
    *[("response_fields", value) for value in ("x", [1], {})],
    *[("stream_options", value) for value in ("x", [], 1)],
    ("tools", [1]),
    *[("response_format", value) for value in ("x", {"type": "sound"}, [], {"type": 1}, {"type": []})],
    *[("grammar", value) for value in (1, [], "root ::= foo", "root", '"')],
    *[("json_schema", value) for value in ([], "x", 1, False, {"type": "x"}, {"items": {"pattern": 1}})],
    *[("grammar_triggers", value) for value in ("x", {}, [{"type": "word", "value": "a"}] * 257)],
    *[("preserved_tokens", value) for value in ("x", 1, {})],
]
PROMPTS: list[Any] = [
    None, 1, True, [], [259], [-1], [1.5], [None], [True], [{}], [[None]], ["a", [1, 999]], {"prompt_string": 1}, {},
    [10**30], [[[1]]],
]  # fmt: skip
UNSUPPORTED: list[tuple[str, Any]] = [
    ("speculative.type", "draft-eagle3"), ("speculative.n_ctx", 9), ("web_search_options", {}),
    ("web_search_options", {"search_context_size": "low"}),
]  # fmt: skip
HARMLESS = {
    "grammar": "", "json_schema": None, "tools": [], "tool_choice": "none", "lora": [], "functions": None,
    "response_format": {"type": "text"}, "grammar_lazy": False, "speculative.n_max": 0, "speculative.type": "none",
    "user": "me", "logit_bias": {}, "stop": None, "temperature": None, "n": None, "samplers": [], "seed": 2**63,
    "web_search_options": None, "mcp_servers": [], "watermark": False,
}  # fmt: skip
MESSAGES: list[Any] = [
    None, [], "string", {}, [123], [None], [{}], [{"role": 123}], [{"role": "user"}], [{"content": "x"}],
    [{"role": "system", "content": 123}], [{"role": "user", "content": "a"}, {}], [{"role": "", "content": "a"}],
    [{"role": "user", "content": [1]}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "poem", "text": "x"}]}], [{"role": "villain", "content": "x"}],
    [{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2],
    [{"role": "assistant", "content": "a", "tool_calls": 1}],
]  # fmt: skip
CHAT: list[tuple[str, Any]] = [
    ("top_logprobs", 3), ("logprobs", 3), ("chat_template_kwargs", []), ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"self": 1}), ("continue_final_message", True), ("continue_final_message", "yes"),
    ("tools", "x"), ("tool_choice", "required"), ("tool_choice", 1), ("tool_choice", {"function": {"name": "f"}}),
    ("reasoning_format", "x"), ("reasoning_format", 1), ("reasoning_effort", 1), ("parse_tool_calls", 1),
    ("chat_template_kwargs", {"enable_thinking": "yes"}),
    ("add_generation_prompt", 1), ("reasoning_budget_tokens", -2), ("parallel_tool_calls", 1), ("temperature", "hot"),
]  # fmt: skip
BODIES = [
    b"", b"{", b"[]", b"null", b'"x"', b"1", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
    b"[" * 100_000, b'{"temperature": NaN, "prompt": "a"}', b'{"temperature": Infinity, "prompt": "a"}', b"9" * 5000,
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "top_k": ' + b"9" * 5000 + b"}",
]  # fmt: skip


async def refused(server: Running, path: str, body: Any, code: int = 400, named: str = "", **kwargs: Any) -> None:
    """The reply is an error object of this code, of one line, naming the field."""
    status, reply = await server.post(path, body, **kwargs)
    assert status == code, (body, reply)
    assert set(reply) == {"error"}
    error = reply["error"]
    assert error["code"] == code
    assert error["type"] == {400: "invalid_request_error", 501: "not_supported_error"}.get(code, error["type"])
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert named in error["message"], error


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running() as started:
        yield started


async def test_fields(server: Running):
    for name, value in FIELDS:
        for path, body in (("/completion", {"prompt": "say:a"}), ("/v1/completions", {"prompt": "say:a"})):
            await refused(server, path, {**body, name: value}, named=f"'{name}'")
    message = (await server.post("/completion", {"prompt": "a", "temperature": "hot"}))[1]["error"]["message"]
    assert message == "field 'temperature': expected a number, got a string"
    assert not server.scheduler.requests


async def test_streams_are_refused_before_they_begin(server: Running):
    for name, value in HARD:
        await refused(server, "/completion", {"prompt": "a", "stream": True, name: value}, named=f"'{name}'")


async def test_prompts(server: Running):
    for prompt in PROMPTS:
        for path in ("/completion", "/v1/completions"):
            await refused(server, path, {"prompt": prompt}, named="'prompt'")
    await refused(server, "/completion", {}, named="'prompt'")
    await refused(server, "/completion", {"prompt": ["a"] * 3000}, named="'prompt'")
    server.scheduler.tokenizer.__class__.bos_id, bos = None, server.scheduler.tokenizer.bos_id  # type: ignore[assignment]
    try:
        await refused(server, "/completion", {"prompt": ""}, named="'prompt'")
    finally:
        server.scheduler.tokenizer.__class__.bos_id = bos


async def test_openai_s_own_fields(server: Running):
    for name, value in (("best_of", 0), ("best_of", 99), ("logprobs", "1"), ("echo", 1), ("suffix", 1)):
        await refused(server, "/v1/completions", {"prompt": "a", name: value}, named=f"'{name}'")
    await refused(server, "/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, named="'best_of'")
    await refused(server, "/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "'suffix'")
    status, _ = await server.post("/v1/completions", {"prompt": "say:a", "logprobs": False, "suffix": ""})
    assert status == 200


async def test_unsupported_field_is_refused_by_name(server: Running):
    messages = [{"role": "user", "content": "say:a"}]
    for name, value in UNSUPPORTED:
        await refused(server, "/completion", {"prompt": "a", name: value}, 400, f"'{name}'")
        await refused(server, "/v1/chat/completions", {"messages": messages, name: value}, 400, f"'{name}'")
    for part in ({"type": "image_url", "image_url": {}}, {"type": "input_audio"}):
        await refused(
            server, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}, 400, part["type"]
        )
    assert (await server.post("/completion", {"prompt": "say:a", **HARMLESS}))[0] == 200
    assert (await server.post("/v1/chat/completions", {"messages": messages, **HARMLESS}))[0] == 200


async def test_messages(server: Running):
    for messages in MESSAGES:
        for path in ("/v1/chat/completions", "/apply-template"):
            await refused(server, path, {"messages": messages}, named="messages")
    for name, value in CHAT:
        body = {"messages": [{"role": "user", "content": "say:a"}], name: value}
        await refused(server, "/v1/chat/completions", body, named=f"'{name}'")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    await refused(server, "/v1/chat/completions", {"messages": messages, **both}, named="continue_final_message")


async def test_bodies(server: Running):
    for raw in BODIES:
        await refused(server, "/completion", None, data=raw)
        await refused(server, "/v1/chat/completions", None, data=raw)


async def test_paths_and_methods(server: Running):
    for path in ("/nope", "/v1", "/completion/x", "/v1/embeddings%00", "/%2e%2e/etc/passwd"):
        status, reply = await server.get(path)
        assert (status, reply["error"]["type"]) == (404, "not_found_error")
    for method, path in (("GET", "/completion"), ("DELETE", "/v1/models"), ("PUT", "/props")):
        async with server.http.request(method, server.url + path) as reply:
            assert reply.status == 405
            assert "Allow" in reply.headers
            assert (await reply.json())["error"]["code"] == 405


async def test_a_hopeless_text_is_not_tokenized(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeTokenizer, "encode", None)
    text = "a" * (1 << 20)
    for path, body in (
        ("/completion", {"prompt": text}),
        ("/v1/completions", {"prompt": [text, [1, text]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "stream": True}),
    ):
        async with server.http.post(server.url + path, data=io.BytesIO(json.dumps(body).encode())) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", N_CTX)
        assert N_CTX < error["n_prompt_tokens"] <= len(text)


@pytest.mark.parametrize("limit", ["", "0", "-1", "x", "10001", "9" * 5000, "²"])
def test_limits_of_lists(limit: str):
    request = make_mocked_request("GET", f"/v1/files?limit={limit}")
    with pytest.raises(InvalidRequest, match="'limit': must be from 1 to 10000"):
        listed(request, [])


@pytest.mark.parametrize(
    ("coding", "status"),
    [("chunked", 200), ("Chunked", 200), ("gzip, chunked", 400), ("deflate,chunked", 400), ("chunked, chunked", 400)],
)
async def test_a_transfer_coding_that_nobody_undoes_is_refused(coding: str, status: int):
    async with running() as server:
        address = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = b'{"prompt": "x", "n_predict": 1}'
        head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: {coding}\r\n\r\n"
        writer.write(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert (await reader.readline()).split()[1] == str(status).encode()
        writer.close()
        await writer.wait_closed()


async def test_full_disk_is_507() -> None:
    async with running() as server:

        def full(*_: object) -> Any:
            raise OSError(errno.ENOSPC, "no space left")

        server.scheduler.submit = full
        status, reply = await server.post("/completion", {"prompt": "x"})
    assert (status, reply["error"]["message"]) == (507, "the server's disk is full")


async def test_connection_of_a_client_that_left_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    app = Guard(ServerConfig(), ApiKeys((), ""), frozenset()).application()

    async def leaves(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("the client has left")

    app.router.add_get("/leaves", leaves)
    async with TestClient(TestServer(app)) as client:
        with pytest.raises(ClientError):
            await client.get("/leaves")
    assert " failed: " not in caplog.text
