"""Endpoints without generation: health, models, properties, slots, metrics, tokens, keys, CORS, page."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yarl
from aiohttp import web

from logitless.engine.async_engine import AsyncEngine, LoadedModel, ModelInfo
from logitless.engine.stats import TrainingStats
from logitless.models.chat.template import ChatTemplate
from logitless.server.app import make_app
from logitless.server.config import ServerConfig
from tests.helpers.http_fakes import N_CTX, FakeScheduler, FakeTemplate, FakeTokenizer, running, while_stepping

LLAMACPP_METRICS = [
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "prompt_seconds_total",
    "tokens_predicted_total",
    "tokens_predicted_seconds_total",
    "n_decode_total",
    "n_tokens_max",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "prompt_tokens_seconds",
    "predicted_tokens_seconds",
    "requests_processing",
    "requests_deferred",
    "n_busy_slots_per_decode",
]


async def test_health_says_loading_until_the_model_is_there():
    service, gate = AsyncEngine(), threading.Event()

    def build() -> LoadedModel:
        gate.wait(10)
        return LoadedModel(FakeScheduler(), FakeTokenizer(), FakeTemplate(), ModelInfo(N_CTX))  # type: ignore[arg-type]

    service.start(build)
    runner = web.AppRunner(make_app(service, ServerConfig()))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        import aiohttp

        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as http:
            for path in ("/health", "/v1/health", "/v1/models", "/props", "/slots"):
                async with http.get(url + path) as reply:
                    assert reply.status == 503
                    error = (await reply.json())["error"]
                    assert error == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
            async with http.post(url + "/completion", json={"prompt": "x"}) as reply:
                assert reply.status == 503
            gate.set()
            await service.loaded()
            async with http.get(url + "/health") as reply:
                assert (reply.status, await reply.json()) == (200, {"status": "ok"})
    finally:
        await service.stop()
        await runner.cleanup()


async def test_a_model_that_does_not_load_tells_why():
    service = AsyncEngine()

    def build() -> LoadedModel:
        raise ValueError("x.gguf: not a model")

    service.start(build)
    with pytest.raises(ValueError, match="not a model"):
        await service.loaded()
    await service.stop()


async def test_models():
    async with running(alias="first", aliases=("first", "second"), tags=("small",)) as server:
        for path in ("/models", "/v1/models"):
            status, body = await server.get(path)
            assert status == 200
            assert body["object"] == "list"
            assert [(model["name"], model["details"]["format"]) for model in body["models"]] == [("first", "gguf")]
            (model,) = body["data"]
            assert model["id"] == "first"
            assert model["aliases"] == ["first", "second"]
            assert model["tags"] == ["small"]
            assert set(model["meta"]) == {"vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size"}
        listed = await server.openai.models.list()
        assert [model.id for model in listed.data] == ["first"]
        assert (await server.openai.models.retrieve("first")).id == "first"
        assert (await server.get("/v1/models/other"))[0] == 404
    async with running(alias="tinyllama", aliases=("tinyllama", "fim", "code")) as server:
        assert (await server.get("/models"))[1]["data"][0]["id"] == "code"
        assert (await server.get("/props"))[1]["model_alias"] == "code"


async def test_props():
    async with running(alias="a", props=True) as server:
        status, body = await server.get("/props")
        assert status == 200
        assert body["default_generation_settings"]["n_ctx"] == N_CTX
        assert body["default_generation_settings"]["params"]["temperature"] == 0.8
        assert body["total_slots"] == 4
        assert body["model_path"] == "fake.gguf"
        assert (body["bos_token"], body["eos_token"]) == ("<s>", "</s>")
        assert body["chat_template"] == "{{ fake }}"
        assert body["build_info"].startswith("b")
        assert (await server.post("/props", {}))[0] == 200
        assert (body["endpoint_slots"], body["endpoint_props"], body["endpoint_metrics"]) == (True, True, False)
    async with running(props=None, metrics=None) as server:  # a switch that was not given
        assert (await server.post("/props", {}))[0] == 501
        _, body = await server.get("/props")
        assert (body["endpoint_props"], body["endpoint_metrics"]) == (False, False)


async def test_slots():
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(2, gate), n_parallel=2) as server:
        status, body = await server.get("/slots")
        assert status == 200
        assert body == [{"id": i, "n_ctx": N_CTX, "speculative": False, "is_processing": False} for i in range(2)]
        requests = [asyncio.create_task(server.post("/completion", {"prompt": "x", "n_predict": 3})) for _ in range(2)]
        await while_stepping(gate, asyncio.wait(requests))
        for request in requests:
            assert (await request)[0] == 200
        status, body = await server.get("/slots")
        assert body[0]["is_processing"] is False
        assert body[0]["params"]["n_predict"] == 3
        assert body[0]["next_token"] == [
            {"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}
        ]
        assert "prompt" not in body[0]
        assert (await server.get("/slots?fail_on_no_slot=1"))[0] == 200
        for path, code in (
            ("1?action=save", 501),
            ("1?action=x", 400),
            ("9?action=erase", 400),
            ("a?action=erase", 400),
        ):
            assert (await server.post(f"/slots/{path}", {}))[0] == code
    async with running(slots=False) as server:
        status, body = await server.get("/slots")
        assert (status, body["error"]["type"]) == (501, "not_supported_error")


async def test_fail_on_no_slot():
    gate = threading.Semaphore(0)
    scheduler = FakeScheduler(1, gate)
    async with running(scheduler=scheduler, n_parallel=1) as server:
        request = asyncio.create_task(server.post("/completion", {"prompt": "x"}))
        while not scheduler.running:  # the request is on its way
            await server.get("/health")
        status, body = await while_stepping(gate, server.get("/slots?fail_on_no_slot=1"))
        assert (status, body["error"]["type"]) == (503, "unavailable_error")
        request.cancel()


async def test_metrics():
    async with running(metrics=True) as server:
        await server.post("/completion", {"prompt": "x", "n_predict": 5})
        async with server.http.get(server.url + "/metrics") as reply:
            assert reply.status == 200
            assert reply.content_type == "text/plain"
            assert 0 <= time.time() - int(reply.headers["Process-Start-Time-Unix"]) < 3600
            text = await reply.text()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        for name in LLAMACPP_METRICS:
            assert f"llamacpp:{name}" in values
        assert float(values["llamacpp:tokens_predicted_total"]) == 5
        assert float(values["logitless:bytes_read_per_token"]) == 4
        assert float(values["logitless:time_to_first_token_seconds_count"]) == 1
        assert float(values["logitless:inter_token_seconds_count"]) == 4
        assert float(values['logitless:queue_seconds_bucket{le="+Inf"}']) == 1
        described = {words[2]: words[3] for line in text.splitlines() if (words := line.split())[:2] == ["#", "TYPE"]}
        assert {f"llamacpp:{name}" for name in LLAMACPP_METRICS} <= set(described)
        assert "_total_total" not in text
        assert {name for name, kind in described.items() if kind == "counter"} == {
            name for name in described if name.endswith(("_total", "n_tokens_max"))
        }
    async with running() as server:
        assert (await server.get("/metrics"))[0] == 501


async def test_rates_count_what_happened_since_the_last_look():
    async with running(metrics=True) as server:

        async def told() -> dict[str, float]:
            async with server.http.get(server.url + "/metrics") as reply:
                lines = (await reply.text()).splitlines()
            return {name: float(n) for name, n in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

        stats = server.scheduler.stats
        stats.prompt_tokens, stats.prompt_seconds = 10, 2.0
        stats.tokens_predicted, stats.tokens_decoded, stats.predicted_seconds = 7, 6, 3.0
        values = await told()
        assert values["llamacpp:prompt_tokens_seconds"] == 5
        assert values["llamacpp:predicted_tokens_seconds"] == 2  # the first token took no step
        values = await told()
        assert values["llamacpp:prompt_tokens_seconds"] == values["llamacpp:predicted_tokens_seconds"] == 0
        stats.tokens_decoded, stats.predicted_seconds = 16, 4.0
        assert (await told())["llamacpp:predicted_tokens_seconds"] == 10
        assert not any("per_pos" in name for name in values)
        stats.count_draft(3, 2)
        stats.count_draft(3, 0)
        stats.count_draft(1, 1)
        values = await told()
        assert [
            values[f"llamacpp:spec_decode_num_{n}_total"] for n in ("drafts", "draft_tokens", "accepted_tokens")
        ] == [3, 7, 3]
        by_position = {name: n for name, n in values.items() if "per_pos" in name}
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        assert by_position == {f'{name}{{position="0"}}': 2, f'{name}{{position="1"}}': 1}


async def test_metrics_of_training():
    stats = TrainingStats(steps=3, tokens=96, step=5, n_steps=9, loss=2.5)
    tuning = SimpleNamespace(stats=stats, ready=False, close=lambda: None)
    async with running(metrics=True, tuning=tuning) as server, server.http.get(server.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("logitless:training_"))
    names = ("steps_total", "tokens_total", "job_step", "job_steps", "loss")
    assert [float(values[f"logitless:training_{name}"]) for name in names] == [3, 96, 5, 9, 2.5]
    assert "logitless:training_valid_loss" not in values  # nothing has been validated


async def test_tokenize_and_back():
    async with running() as server:
        text = "<s>hello ü"
        status, body = await server.post("/tokenize", {"content": text})
        assert (status, body) == (200, {"tokens": [256, 258, 32, 195, 188]})
        assert await server.post("/detokenize", body) == (200, {"content": text, "prompt": text})
        _, body = await server.post("/tokenize", {"content": text, "with_pieces": True, "add_special": True})
        assert body["tokens"][0] == {"id": 256, "piece": "<s>"}
        assert body["tokens"][-1] == {"id": 188, "piece": [188]}
        assert len((await server.post("/tokenize", {"content": text, "parse_special": False}))[1]["tokens"]) == 7
        assert (await server.post("/tokenize", {"content": [1, "a"]}))[1] == {"tokens": [1, 97]}
        assert (await server.post("/tokenize", {}))[1] == {"tokens": []}
        for content in ({}, [None], [1, "a", None]):
            assert (await server.post("/tokenize", {"content": content}))[0] == 400
        for tokens in ([259], [-1], ["a"], "abc", [1.5], [10**40]):
            assert (await server.post("/detokenize", {"tokens": tokens}))[0] == 400


async def test_apply_template():
    async with running() as server:
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}] * 2},
        ]
        status, body = await server.post("/apply-template", {"messages": messages})
        assert (status, body) == (200, {"prompt": "[system]S[/][user]a\na[/][assistant]"})
        _, body = await server.post("/apply-template", {"messages": messages, "add_generation_prompt": False})
        assert body["prompt"].endswith("[/]")
        _, body = await server.post("/apply-template", {"messages": messages, "chat_template_kwargs": {"x": "KW"}})
        assert body["prompt"].startswith("KW")
        messages.append(
            {"role": "assistant", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]}
        )
        _, body = await server.post("/apply-template", {"messages": messages})
        assert body["prompt"].endswith("[assistant]Wh\n\nill")
        _, body = await server.post("/apply-template", {"messages": messages, "continue_final_message": False})
        assert body["prompt"].endswith("ill[/][assistant]")


async def test_efforts_and_reasoning_of_a_template_like_hunyuans():
    source = (
        "{% set e = reasoning_effort if reasoning_effort is defined else 'no_think' %}"
        "{% if e not in ['no_think', 'low', 'high'] %}{{ raise_exception('no ' + e) }}{% endif %}{{ e }}"
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}<think>{{ '</think>' if e == 'no_think' }}{% endif %}"
    )
    async with running(template=ChatTemplate(source, bos_token="", eos_token="")) as server:

        async def prompt(*more: dict[str, str], **fields: Any) -> str:
            messages = [{"role": "user", "content": "Hi"}, *more]
            status, body = await server.post("/apply-template", {"messages": messages, **fields})
            assert status == 200, body
            return body["prompt"]

        assert await prompt(reasoning_effort="none") == "no_think[Hi]<think></think>"
        assert await prompt(reasoning_effort="medium") == "high[Hi]<think>"
        assert await prompt(chat_template_kwargs={"reasoning_effort": "minimal"}) == "low[Hi]<think>"
        text, thought = {"role": "assistant", "content": "It is"}, {"reasoning_content": "Hm."}
        assert (await prompt({**text, **thought})).count("<think>") == 1
        assert (await prompt({**text, **thought})).endswith("[Hi]<think>\nHm.\n</think>\n\nIt is")
        assert (await prompt({**text, **thought}, reasoning_effort="high")).count("<think>") == 1
        assert (await prompt(text)).endswith("[Hi]<think></think>It is")
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "banana"}
        status, body = await server.post("/apply-template", body)
        assert status == 400
        assert "reasoning_effort" in body["error"]["message"]
        assert "no_think, low, high" in body["error"]["message"]


async def test_render_gives_the_token_ids_of_the_real_routes():
    async with running(alias="m") as server:
        asked = {"prompt": ["Once upon", [79, 110]], "max_tokens": 3, "seed": 5, "n": 2, "temperature": 0, "stop": "x"}
        status, found = await server.post("/v1/completions/render", asked)
        assert status == 200
        _, real = await server.post("/v1/completions", {**asked, "return_token_ids": True})
        assert [one["token_ids"] for one in found] == [choice["prompt_token_ids"] for choice in real["choices"][::2]]
        first = found[0]
        assert first["request_id"].startswith("cmpl-")
        assert first["request_id"] != found[1]["request_id"]
        assert (first["model"], first["stream"]) == ("m", False)
        expected = {"n": 2, "temperature": 0, "seed": 5, "max_tokens": 3, "stop": ["x"], "ignore_eos": False}
        assert expected.items() <= first["sampling_params"].items()
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        status, found = await server.post("/v1/chat/completions/render", chat)
        _, real = await server.post("/v1/chat/completions", {**chat, "return_token_ids": True})
        assert (status, found["token_ids"]) == (200, real["prompt_token_ids"])
        assert found["request_id"].startswith("chatcmpl-")
        assert (found["sampling_params"]["seed"], found["sampling_params"]["max_tokens"]) == (None, 2)
        for path, wrong, field in (
            ("/v1/completions/render", {"prompt": "x", "max_tokens": "many"}, "max_tokens"),
            ("/v1/completions/render", {"prompt": [10**9]}, "prompt"),
            ("/v1/chat/completions/render", {"messages": "Hi"}, "messages"),
        ):
            status, error = await server.post(path, wrong)
            assert (status, field in error["error"]["message"]) == (400, True)


async def test_lora_adapters():
    async with running() as server:
        assert await server.get("/lora-adapters") == (200, [])
        assert (await server.post("/lora-adapters", []))[0] == 200
        assert (await server.post("/lora-adapters", [{"id": 0, "scale": 1}]))[0] == 400


async def test_tools_are_forbidden_by_default():
    async with running() as server:
        for method, path in (("GET", "/tools"), ("POST", "/tools"), ("GET", "/cors-proxy?url=http://localhost")):
            async with server.http.request(method, server.url + path) as reply:
                assert (reply.status, (await reply.json())["error"]["type"]) == (403, "permission_error")


async def test_predictions_of_vertex(monkeypatch: pytest.MonkeyPatch):
    one = {"@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": "say:yes"}], "max_tokens": 9}
    async with running() as server:
        assert (await server.post("/predict", {"instances": [one]}))[0] == 404
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    async with running() as server:
        _, alone = await server.post("/v1/chat/completions", one)
        status, body = await server.post("/predict", {"instances": [one, {**one, "max_tokens": 1}]})
        assert status == 200
        told = [(p["object"], p["choices"][0]["message"]["content"]) for p in body["predictions"]]
        assert told[0] == ("chat.completion", alone["choices"][0]["message"]["content"])
        assert told[1][1] == told[0][1][:1]
        bad = ({}, {"instances": []}, {"instances": [7]}, {"instances": [{**one, "stream": True}]})
        for instances in (*bad, {"instances": [{**one, "@requestFormat": "x"}]}):
            assert (await server.post("/predict", instances))[0] == 400
        _, body = await server.post("/predict", {"instances": [one, {**one, "messages": 3}]})
        assert body["error"]["message"].startswith("instances[1]: field 'messages': ")


async def test_page_of_other_servers():
    async with running(api_keys=("k",)) as server:
        for path in ("/sw.js", "/manifest.webmanifest", "/_app/version.json"):
            async with server.http.get(server.url + path) as reply:
                assert reply.status == 200
    async with running(ui=False) as server:
        assert (await server.get("/sw.js"))[0] == 404


async def test_files_in_the_place_of_the_page(tmp_path: Path):
    folder = tmp_path / "site"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (folder / "index.html").write_text("<!doctype html>mine")
    (folder / "deep" / "a.css").write_text("a {}")
    (folder / "link").symlink_to(tmp_path / "secret")
    async with running(api_keys=("k",), static=str(folder), api_prefix="/api") as server:
        for path, status, text in (
            ("/api/", 200, "<!doctype html>mine"), ("/api/index.html", 200, "mine"), ("/api/deep/a.css", 200, "a {}"),
            ("/api/none", 404, "error"), ("/api/deep", 404, "error"), ("/api/link", 404, "error"),
            ("/api/..%2fsecret", 404, "error"), ("/api/%2e%2e/secret", 404, "error"), ("/api/health", 200, "ok"),
            ("/api/slots", 401, "error"), ("/", 404, "error"), ("/api//etc/passwd", 404, "error"),
            ("/api/%00", 404, "error"), ("/api/" + "x" * 999, 404, "error"),
        ):  # fmt: skip
            async with server.http.get(yarl.URL(server.url + path, encoded=True), headers={}) as reply:
                assert (reply.status, text in await reply.text()) == (status, True), path
        (folder / "index.html").unlink()
        async with server.http.get(server.url + "/api/") as reply:
            assert reply.status == 404


async def test_keys():
    async with running(api_keys=("one", "zwei-ü")) as server:
        for path in ("/health", "/v1/health", "/models", "/v1/models", "/api/tags"):
            assert (await server.get(path))[0] == 200
        good = [{"Authorization": "Bearer one"}, {"X-Api-Key": "one"}, {"authorization": "bearer zwei-ü"}]
        bad = [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "one"},
            {"X-Api-Key": "On"},
            {"Authorization": "Basic one"},
        ]
        for headers in good:
            assert (await server.get("/props", headers=headers))[0] == 200
        for headers in bad:
            status, body = await server.get("/props", headers=headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert (await server.post("/completion", {"prompt": "x"}))[0] == 401
        completion = await server.openai.completions.create(model="m", prompt="say:yes")
        assert completion.choices[0].text == "yes"


async def test_cors():
    async with running(api_keys=("k",)) as server:
        headers = {"Origin": "web.mydomain.fr", "Access-Control-Request-Method": "POST"}
        for path in ("/completions", "/v1/chat/completions", "/nowhere"):
            async with server.http.options(server.url + path, headers=headers) as reply:
                assert reply.status == 200
                assert reply.headers["Access-Control-Allow-Origin"] == "web.mydomain.fr"
                assert reply.headers["Access-Control-Allow-Credentials"] == "true"
                assert reply.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
                assert reply.headers["Access-Control-Allow-Headers"] == "*"
        async with server.http.get(server.url + "/health", headers=headers) as reply:
            assert reply.headers["Access-Control-Allow-Origin"] == "web.mydomain.fr"
        headers["Access-Control-Request-Method"] = "DELETE"
        async with server.http.options(server.url + "/v1/files/file-1", headers=headers) as reply:
            assert reply.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
        headers["Access-Control-Request-Headers"] = "authorization, x-request-id"
        async with server.http.options(server.url + "/v1/files/file-1", headers=headers) as reply:
            assert reply.headers["Access-Control-Allow-Headers"] == "authorization, x-request-id"


async def test_cors_methods_headers_and_credentials_are_those_of_the_flags():
    settings = {"cors_methods": ("GET", "PUT"), "cors_headers": ("X-A", "X-B"), "cors_credentials": False}
    async with running(api_keys=("k",), **settings) as server:
        headers = {"Origin": "http://a.example", "Access-Control-Request-Headers": "authorization"}
        async with server.http.options(server.url + "/completions", headers=headers) as reply:
            assert reply.headers["Access-Control-Allow-Methods"] == "GET, PUT"
            assert reply.headers["Access-Control-Allow-Headers"] == "X-A, X-B"
            assert reply.headers["Access-Control-Allow-Origin"] == "http://a.example"
            assert "Access-Control-Allow-Credentials" not in reply.headers


async def test_props_tell_settings_of_the_command_line():
    async with running(ui_settings={"theme": "dark"}, ignore_eos=True, reverse_prompts=("\n",)) as server:
        told = (await server.get("/props"))[1]
        params = told["default_generation_settings"]["params"]
        assert (told["ui_settings"], told["webui_settings"]) == ({"theme": "dark"}, {"theme": "dark"})
        assert (params["ignore_eos"], params["stop"]) == (True, ["\n"])
        for asked, expected in (({}, True), ({"ignore_eos": None}, True), ({"ignore_eos": False}, False)):
            reply = (await server.post("/completion", {"prompt": "x", "n_predict": 1, **asked}))[1]
            assert reply["generation_settings"]["ignore_eos"] is expected
            banned = {entry["token"] for entry in reply["generation_settings"]["logit_bias"]}
            assert bool(banned) is expected


@pytest.mark.parametrize(
    ("allowed", "origin", "reflected"),
    [
        ("localhost", "http://localhost:3000", True),
        ("localhost", "http://127.0.0.1", True),
        ("localhost", "http://[::1]:80", True),
        ("localhost", "localhost", True),
        ("localhost", "http://localhost.evil.org", False),
        ("localhost", "http://[", False),
        ("http://a.org, http://b.org", "http://b.org", True),
        ("http://a.org, http://b.org", "http://c.org", False),
    ],
)
async def test_cors_origins(allowed: str, origin: str, reflected: bool):
    async with (
        running(cors_origins=allowed) as server,
        server.http.get(server.url + "/health", headers={"Origin": origin}) as reply,
    ):
        assert (reply.headers.get("Access-Control-Allow-Origin") == origin) is reflected


async def test_prefix():
    async with running(api_prefix="/api", api_keys=("k",)) as server:
        assert (await server.get("/api/health"))[0] == 200
        assert (await server.get("/health", headers={"X-Api-Key": "k"}))[0] == 404


async def test_each_route_of_get_answers_head():
    async with running(metrics=True, slots=True) as server:
        for method, path in server.routes:
            if method != "GET":
                continue
            assert ("HEAD", path) in server.routes
            url = server.url + path.replace("{id}", "0").replace("{item}", "0").replace("{version}/{name}", "0/0")
            async with server.http.get(url) as got, server.http.head(url) as reply:
                assert (reply.status, await reply.read()) == (got.status, b""), path
                assert reply.content_type == got.content_type, path
