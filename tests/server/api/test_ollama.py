"""Ollama's API through the real port and Ollama's own client, on a fake engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import ollama
import pytest

from logitless.frontend.dialects.ollama import OllamaChatMessage, _messages
from logitless.frontend.dialects.ollama_names import candidates, seconds, tagged
from logitless.frontend.dialects.ollama_template import prompt_of
from tests.engine.test_sleep import Nap
from tests.helpers.chat_fakes import HERMES_LIKE, THOUGHT, chatting, prompt, says
from tests.helpers.http_fakes import N_CTX, FakeAdapters, Running, running

ASK: Any = [{"role": "user", "content": "What is 1 + 1?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture
async def client(server: Running) -> AsyncIterator[ollama.AsyncClient]:
    async with client_of(server) as made:
        yield made


def client_of(server: Running) -> ollama.AsyncClient:
    return ollama.AsyncClient(server.url)


async def test_generate(server: Running, client: ollama.AsyncClient) -> None:
    says(server, "Two.")
    whole = await client.generate("fake", "What is 1 + 1?", system="Be short.")
    assert (whole.response, whole.done, whole.done_reason, whole.thinking) == ("Two.", True, "stop", None)
    assert "[system]Be short." in prompt(server)
    assert "[user]What is 1 + 1?" in prompt(server)
    assert (whole.eval_count, whole.prompt_eval_count) == (5, len(server.scheduler.requests[-1].prompt))
    assert (whole.prompt_eval_duration, whole.eval_duration) == (2_000_000, 4_000_000)  # of the fake: 2 and 4 ms
    assert whole.total_duration is not None
    assert whole.created_at is not None
    lines = [part async for part in await client.generate("fake", "What is 1 + 1?", stream=True)]
    assert "".join(line.response for line in lines) == "Two."
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].done_reason == "stop"
    assert lines[-1].context == [*server.scheduler.requests[-1].prompt, *b"Two.", 257]
    again = await client.generate("fake", "And 2 + 2?", context=lines[-1].context)
    assert again.done_reason == "stop"
    assert prompt(server).index("Two.") < prompt(server).index("And 2 + 2?")
    raw = await client.generate("fake", "just this", raw=True)
    assert prompt(server) == "<s>just this"
    assert raw.response == "Two."
    await client.generate(
        "fake", "hi", template="{{ if .System }}S {{ .System }} {{ end }}U {{ .Prompt }} A", system="s"
    )
    assert prompt(server) == "<s>S s U hi A"


async def test_chat_with_reasoning_and_calls(server: Running, client: ollama.AsyncClient) -> None:
    says(server, f"{THOUGHT}Sum: {CALL}")
    whole = (await client.chat("fake", ASK, tools=[TOOL], think=True)).message
    assert (whole.content, whole.thinking) == ("Sum:", "I should add.")
    assert whole.tool_calls is not None
    assert [(c.function.name, c.function.arguments) for c in whole.tool_calls] == [("add", {"a": 1, "b": "é"})]
    lines = [line async for line in await client.chat("fake", ASK, tools=[TOOL], think="low", stream=True)]
    assert "".join(line.message.content or "" for line in lines).strip() == "Sum:"
    assert "".join(line.message.thinking or "" for line in lines).strip() == "I should add."
    (calls,) = [line.message.tool_calls for line in lines if line.message.tool_calls]
    assert [(c.function.name, c.function.arguments) for c in calls] == [("add", {"a": 1, "b": "é"})]
    assert lines[-1].done_reason == "stop"
    said = [*ASK, whole.model_dump(), {"role": "tool", "tool_name": "add", "content": "2"}]
    says(server, "2.")
    assert (await client.chat("fake", said, tools=[TOOL])).message.content == "2."
    assert '{"name": "add", "arguments": {"a": 1, "b": "é"}}' in prompt(server)
    assert "[tool]2" in prompt(server)
    says(server, "Yes.")
    assert (await client.chat("fake", ASK, think=False)).message.thinking is None


async def test_options_reach_the_engine(server: Running, client: ollama.AsyncClient) -> None:
    says(server, "one two three")
    given = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.6, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.2,
        "repeat_last_n": 33, "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 5, "mirostat": 2,
        "mirostat_tau": 4.0, "mirostat_eta": 0.2,
    }  # fmt: skip
    more = {"num_predict": 99, "num_keep": 3, "stop": [" three"], "num_thread": 2, "num_gpu": 1}
    answer = await client.generate("fake", "x", options={**given, **more})
    assert answer.response == "one two"
    (request,) = server.scheduler.requests
    assert {name: getattr(request.sampling, name) for name in given} == given
    assert (request.n_predict, request.n_keep, request.stop) == (99, 3, (" three",))
    cut = await client.generate("fake", "x", options={"num_predict": 3})
    assert (cut.response, cut.done_reason, cut.eval_count) == ("one", "length", 3)
    await client.generate("fake", "x", options={"num_predict": -2})
    assert server.scheduler.requests[-1].n_predict == -1


async def test_format(server: Running, client: ollama.AsyncClient) -> None:
    says(server, "{}")
    await client.chat("fake", ASK, format="json")
    assert server.scheduler.requests[-1].sampling.grammar is not None
    await client.generate("fake", "x", format={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert "integer" in server.scheduler.requests[-1].sampling.grammar.text or server.scheduler.requests
    status, body = await server.post("/api/chat", {"model": "fake", "messages": ASK, "format": "xml"})
    assert (status, body) == (400, {"error": "field 'format': must be json or a JSON schema"})


async def test_logprobs(server: Running, client: ollama.AsyncClient) -> None:
    says(server, "ab stop c")
    asked: Any = {"logprobs": True, "top_logprobs": 2, "options": {"stop": [" stop"]}}
    whole = await client.generate("fake", "x", **asked)
    lines = [line async for line in await client.generate("fake", "x", stream=True, **asked)]
    told = [entry for line in lines for entry in line.logprobs or []]
    assert whole.response == "ab"
    assert [entry.token for entry in whole.logprobs or []] == ["a", "b"]
    assert told == list(whole.logprobs or [])
    assert [len(entry.top_logprobs or []) for entry in told] == [2, 2]


async def test_context_that_is_too_long(server: Running, client: ollama.AsyncClient) -> None:
    says(server, "ok")
    long = [{"role": "user", "content": f"message {i} " + "x" * 60} for i in range(20)]
    await client.chat("fake", [{"role": "system", "content": "Rules."}, *long], options={"num_ctx": 300})
    assert "[system]Rules." in prompt(server)
    assert "message 19" in prompt(server)
    assert "message 5 " not in prompt(server)
    (request,) = server.scheduler.requests
    assert 200 < len(request.prompt) < 300
    assert request.n_predict == 300 - len(request.prompt)
    await client.generate("fake", "y" * 2000, raw=True)
    assert len(server.scheduler.requests[-1].prompt) == N_CTX - N_CTX // 4
    await client.chat("fake", [{"role": "user", "content": "z" * 2000 + " the end"}])  # one message, cut as well
    assert len(server.scheduler.requests[-1].prompt) == N_CTX - N_CTX // 4
    assert "z the end" in bytes(id for id in server.scheduler.requests[-1].prompt if id < 256).decode()
    for path, body in (("chat", {"messages": long}), ("generate", {"prompt": "y" * 2000})):
        status, told = await server.post(f"/api/{path}", {"model": "fake", "truncate": False, **body})
        assert status == 400
        assert "exceeds the available context size (512 tokens)" in told["error"]


async def test_loading(server: Running, client: ollama.AsyncClient) -> None:
    assert (await client.generate("fake")).done_reason == "load"
    answer = await client.chat("fake", [])
    assert (answer.message.content, answer.done, answer.done_reason) == ("", True, "load")
    assert (await client.generate("fake", keep_alive=0)).done_reason == "unload"
    assert server.scheduler.requests == []


async def test_models(server: Running, client: ollama.AsyncClient) -> None:
    (model,) = (await client.list()).models
    (loaded,) = (await client.ps()).models
    assert (model.model, loaded.model, loaded.context_length) == ("fake:latest", "fake:latest", N_CTX)
    for name in ("fake", "fake:latest", "fake.gguf"):
        shown = await client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.template == HERMES_LIKE
    assert (await server.get("/api/version"))[1]["version"].count(".") == 2
    for method, path in (("GET", "/"), ("HEAD", "/")):
        async with server.http.request(method, server.url + path) as reply:
            assert reply.status == 200
    for ask in (client.generate("other", "x"), client.chat("other:latest", ASK), client.show("fake:1b")):
        with pytest.raises(ollama.ResponseError, match="not found") as found:
            await ask
        assert found.value.status_code == 404


async def test_lmstudio_lists_the_model(server: Running) -> None:
    status, listed = await server.get("/api/v0/models")
    assert (status, listed["object"]) == (200, "list")
    (model,) = listed["data"]
    assert model | {"id": "fake", "state": "loaded", "type": "llm", "compatibility_type": "gguf"} == model
    assert (model["loaded_context_length"], model["capabilities"]) == (N_CTX, ["tool_use"])


async def test_embeddings_prepared_at_start_are_a_capability() -> None:
    for embeddings in (False, True):
        async with running(embeddings=embeddings) as server:
            (native,) = (await server.get("/v1/models"))[1]["models"]
            (tagged_model,) = (await server.get("/api/tags"))[1]["models"]
            for listed in (native, tagged_model):
                assert "completion" in listed["capabilities"]
                assert ("embedding" in listed["capabilities"]) == embeddings


@pytest.mark.parametrize(
    ("path", "body"),
    [("generate", {}), ("generate", {"prompt": ""}), ("chat", {"messages": []}), ("embed", {"input": ""}),
     ("embeddings", {"prompt": ""})],
)  # fmt: skip
async def test_the_only_model_is_unloaded_until_the_next_request(path: str, body: Any) -> None:
    nap = Nap()
    embedder = SimpleNamespace(n_ctx=N_CTX, n_embd=8, default="mean")
    async with running(embedder=embedder, scheduler=nap.scheduler, sleep=nap.sleep) as server:
        for n, keep in enumerate((0, "0s")):
            status, reply = await server.post(f"/api/{path}", {"model": "fake", "keep_alive": keep, **body})
            assert (status, reply.get("done_reason", "unload")) == (200, "unload")
            assert await asyncio.to_thread(nap.slept.acquire, timeout=10)
            await server.service.ask(lambda _: None, wakes=False)
            assert (await server.get("/props"))[1]["is_sleeping"] is True
            assert (await server.get("/api/ps"))[1] == {"models": []}
            if path in ("generate", "chat"):
                assert (await server.post(f"/api/{path}", {"model": "fake", "keep_alive": "5m", **body}))[0] == 200
            else:
                assert (await server.post("/completion", {"prompt": "say:yes"}))[0] == 200
            assert nap.log == ["sleeps", "engine wakes"] * (n + 1)
            assert len((await server.get("/api/ps"))[1]["models"]) == 1


async def test_unloading_takes_the_admin_key_where_there_is_one() -> None:
    nap = Nap()
    options = {"api_keys": ("user",), "admin_api_key": "admin"}
    async with running(scheduler=nap.scheduler, sleep=nap.sleep, **options) as server:
        for key, status in (("user", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": "fake", "keep_alive": 0}
            async with server.http.post(f"{server.url}/api/generate", json=body, headers=headers) as reply:
                assert reply.status == status, await reply.text()
        assert await asyncio.to_thread(nap.slept.acquire, timeout=10)


async def test_an_adapter_by_its_name() -> None:
    async with running(adapters=FakeAdapters()) as server, client_of(server) as client:
        await client.generate(FakeAdapters.NAME, "x", raw=True)
        assert server.scheduler.requests[-1].lora == ((0, 1.0),)


async def test_changes_are_refused_in_one_line(server: Running, client: ollama.AsyncClient) -> None:
    one, never = "this server has one model; a router", "models are files here"
    for ask, why in (
        (client.pull("a/b"), one),
        (client.delete("fake"), one),
        (client.copy("fake", "b"), "--models-dir FOLDER"),
        (client.create("b", from_="fake"), "--models-dir FOLDER"),
        (client.push("fake"), never),
    ):
        with pytest.raises(ollama.ResponseError, match=why) as found:
            await ask
        assert found.value.status_code == 501
    async with server.http.head(f"{server.url}/api/blobs/sha256:{'0' * 64}") as reply:
        assert reply.status == 501


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("generate", {"model": None}, "model"),
        ("generate", {"prompt": 5}, "prompt"),
        ("generate", {"prompt": "x", "options": {"top_k": "many"}}, "options.top_k"),
        ("generate", {"prompt": "x", "options": {"num_predict": 1.5}}, "options.num_predict"),
        ("generate", {"prompt": "x", "options": []}, "options"),
        ("generate", {"prompt": "x", "keep_alive": "soon"}, "keep_alive"),
        ("generate", {"prompt": "x", "keep_alive": True}, "keep_alive"),
        ("generate", {"prompt": "x", "format": 7}, "format"),
        ("generate", {"prompt": "x", "format": {"type": "nothing"}}, "format"),
        ("generate", {"prompt": "x", "think": "hard"}, "think"),
        ("generate", {"prompt": "x", "context": [1, 9999]}, "context"),
        ("generate", {"prompt": "x", "context": "abc"}, "context"),
        ("generate", {"prompt": "x", "raw": True, "system": "s"}, "raw"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images[0]"),
        ("generate", {"prompt": "x", "images": "aGk="}, "images"),
        ("generate", {"prompt": "x", "template": "{{ range .Messages }}"}, "template"),
        ("generate", {"prompt": "x", "template": "{{ if .System }}"}, "template"),
        ("generate", {"prompt": "x", "top_logprobs": 3}, "top_logprobs"),
        ("generate", {"prompt": "x", "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("generate", {"prompt": "x", "stream": "yes"}, "stream"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images[0]"),
        ("chat", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("chat", {"messages": {}}, "messages"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ("chat", {"messages": ASK, "tools": [{"function": {}}]}, "tools[0].function.name"),
        ("embed", {"input": 5}, "input"),
        ("show", {"model": 5}, "model"),
    ],
)
async def test_bad_fields_are_named(server: Running, path: str, body: dict[str, Any], field: str) -> None:
    status, told = await server.post(f"/api/{path}", {"model": "fake", **body})
    assert status == 400, told
    assert set(told) == {"error"}
    if path != "embed":  # this model makes no vectors: told first
        assert told["error"].startswith(f"field '{field}'"), told
    assert "\n" not in told["error"]
    assert server.scheduler.requests == []


async def test_errors_have_ollamas_shape() -> None:
    async with running(api_keys=("k",)) as server:
        assert (await server.get("/api/tags"))[0] == 200
        status, told = await server.post("/api/chat", {"model": "fake"})
        assert (status, told) == (401, {"error": "Invalid API Key"})
        headers = {"Authorization": "Bearer k"}
        async with server.http.get(f"{server.url}/api/chat", headers=headers) as reply:
            assert (reply.status, await reply.json()) == (405, {"error": "GET is not allowed here"})
        assert (await server.post("/api/none", {}, headers=headers))[1]["error"]["code"] == 404
        async with server.http.post(f"{server.url}/api/chat", data="{", headers=headers) as reply:
            assert (reply.status, set(await reply.json())) == (400, {"error"})


async def test_an_error_in_a_stream_is_a_line() -> None:
    async with running() as server:
        body = {"model": "fake", "prompt": "step-boom", "raw": True}
        async with server.http.post(f"{server.url}/api/generate", json=body) as reply:
            assert (reply.status, reply.content_type) == (200, "application/x-ndjson")
            lines = [json.loads(line) async for line in reply.content]
        assert [set(line) for line in lines] == [{"error"}]
        async with client_of(server) as client:
            with pytest.raises(ollama.ResponseError):
                await client.generate("fake", "step-boom", raw=True)


async def test_a_model_without_a_template_continues_the_prompt() -> None:
    async with chatting("{{ messages[0].content }}") as server, client_of(server) as client:
        says(server, "x")
        with pytest.raises(ollama.ResponseError, match="field 'think': this model does not support thinking"):
            await client.generate("fake", "x", think=True)


def test_names_and_durations() -> None:
    assert [tagged(name) for name in ("a", "a:7b", "u/a", "h:80/a")] == [
        "a:latest",
        "a:7b",
        "u/a:latest",
        "h:80/a:latest",
    ]
    assert candidates("hf.co/u/r:latest") == ("hf.co/u/r:latest", "u/r:latest", "u/r")
    told = {"5m": 300, "1h30m": 5400, "-1": -1, "0": 0, "250ms": 0.25, "-1m": -60, "10": 10, "1.5s": 1.5}
    assert {text: seconds("k", text) for text in told} == told
    assert (seconds("k", 5), seconds("k", -3.5), seconds("k", 1e300)) == (5, -1, 1e15)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ .Prompt }}", "p"),
        ("a {{- .Prompt -}} b", "apb"),
        ("{{ if .Suffix }}x{{ else }}y{{ end }}{{ .System }}", "ys"),
        ("{{ if .System }}{{ if .Suffix }}n{{ else }}m{{ end }}{{ end }}", "m"),
        ("{{ if .Suffix }}{{ if .System }}n{{ else }}m{{ end }}{{ end }}.", "."),
        ("{{/* note */}}{{ .Prompt }} A:{{ .Response }}<end>", "p A:"),
    ],
)
def test_templates(template: str, text: str) -> None:
    assert prompt_of(template, "p", "s") == text


def test_results_get_the_id_of_the_first_open_call_of_their_name() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a", "c")]
    results = [OllamaChatMessage(role="tool", tool_name=name) for name in ("b", "a", "none", "a", "c", "a")]
    messages = _messages([OllamaChatMessage(role="assistant", tool_calls=calls), *results], {})
    assert [m["tool_call_id"][-1] for m in messages[1:]] == ["1", "0", "2", "3", "0", "0"]
    n = 30_000
    calls = [{"function": {"name": f"f{i}", "arguments": {}}} for i in range(n)]
    results = [OllamaChatMessage(role="tool", tool_name=f"f{i}") for i in reversed(range(n))]
    began = time.process_time()
    messages = _messages([OllamaChatMessage(role="assistant", tool_calls=calls), *results], {})
    assert time.process_time() - began < 3  # comparing each call with each result takes a minute
    assert messages[1]["tool_call_id"] == f"call_0_{n - 1}"
