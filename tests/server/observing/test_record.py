"""Access lines, request ids and prompt files, of a server and of ASGI hosts."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from logitless.server.observing.start_block import log_start
from tests.helpers.asgi_hosts import HOSTS
from tests.helpers.http_fakes import FakeScheduler, Running, running, while_stepping

SECRET = "xyzzy-plugh"


@pytest.fixture(autouse=True)
def log_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="logitless")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "logitless.access"]


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.name == "logitless.access"]


async def line_after(caplog: pytest.LogCaptureFixture, n: int) -> dict[str, Any]:
    """The access line behind the first n; a client has its answer before the line is written."""
    while len(fields(caplog)) <= n:
        await asyncio.sleep(0)
    return fields(caplog)[n]


@pytest.mark.parametrize("host", HOSTS)
async def test_a_line_for_each_request(host: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running(http_host=host, alias="tiny") as server:
        chat = {"messages": [{"role": "user", "content": "say:hi"}], "stream": True}
        url = f"{server.url}/v1/chat/completions?key=hidden"
        async with server.http.post(url, json=chat, headers={"X-Request-Id": "mine/1"}) as reply:
            await reply.read()
            assert reply.headers["X-Request-Id"] == "mine/1"
        told = await line_after(caplog, 0)
        assert 0 < told["ttft_s"] <= told["total_s"] < 60
        prompt = len(server.scheduler.requests[0].prompt)
        assert told == {
            "message": "request",
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "request_id": "mine/1",
            "model": "tiny",
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "completion_tokens": 3,
            "ttft_s": told["ttft_s"],
            "total_s": told["total_s"],
            "finish": "stop",
        }
        assert lines(caplog)[0] == (
            f"POST /v1/chat/completions 200 request_id=mine/1 model=tiny prompt_tokens={prompt} cached_tokens=0 "
            f"completion_tokens=3 ttft_s={told['ttft_s']} total_s={told['total_s']} finish=stop"
        )

        _, body = await server.post("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 2, "n": 2})
        told = await line_after(caplog, 1)
        assert (told["finish"], told["completion_tokens"]) == ("length", 8)
        assert told["prompt_tokens"] == body["usage"]["prompt_tokens"]

        await server.get("/nope%0aFORGED")
        assert re.fullmatch(r"GET /nope%0[aA]FORGED 404 request_id=req_\w{24} total_s=\S+", lines(caplog)[2])
        assert (await server.post("/v1/completions", {"prompt": "step-boom"}))[0] == 500
        assert (await line_after(caplog, 3))["finish"] == "error"
        await server.get("/health")
    levels = [record.levelname for record in caplog.records if record.name == "logitless.access"]
    assert levels == ["INFO"] * 4 + ["DEBUG"]
    assert "hidden" not in caplog.text


@pytest.mark.parametrize("path", ["/props", "/slots", "/v1/models", "/api/tags", "/v1/fine_tuning/jobs"])
async def test_polling_is_logged_with_v_only_while_it_succeeds(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "logitless.access")
    async with running(api_keys=("k",)) as server:
        headers = {"Authorization": "Bearer k"}
        async with server.http.get(server.url + path, headers=headers) as reply:
            status = reply.status
        async with server.http.get(server.url + "/slots") as reply:
            assert reply.status == 401
        await server.post("/tokenize", {"content": "x"}, headers=headers)
    levels = [record.levelname for record in caplog.records if record.name == "logitless.access"]
    assert levels == ["DEBUG" if status < 400 else "INFO", "INFO", "INFO"]


@pytest.mark.parametrize(
    ("given", "taken"),
    [("a", True), ("Root=1-67891233-abc;x/y+z==", True), ("x" * 128, True), ("x" * 129, False), ("", False),
     ("a b", False), ("é", False), ("a\tb", False)],
)  # fmt: skip
async def test_ids_are_taken_if_they_are_short_and_plain(given: str, taken: bool) -> None:
    async with running() as server, server.http.get(f"{server.url}/v1/models", headers={"X-Request-Id": given}) as got:
        id = got.headers["X-Request-Id"]
    assert (id == given) == taken
    assert taken or re.fullmatch(r"req_[0-9a-f]{24}", id)


async def test_ids_as_the_clients_of_both_apis_read_them() -> None:
    async with running() as server:
        completion = await server.openai.completions.create(model="x", prompt="x", max_tokens=1)
        assert re.fullmatch(r"req_\w+", completion._request_id or "")
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            message = await client.messages.create(
                model="x",
                max_tokens=1,
                messages=[{"role": "user", "content": "x"}],
                extra_headers={"X-Request-Id": "m"},
            )
        assert message._request_id == "m"


@pytest.mark.parametrize("host", HOSTS)
async def test_a_client_that_leaves(host: str, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(gate=gate), http_host=host) as server:
        body = {"prompt": "x", "stream": True}
        reply = await while_stepping(gate, server.http.post(f"{server.url}/v1/completions", json=body))
        gate.release()
        await reply.content.readany()
        reply.close()
        await while_stepping(gate, left(server))
        told = await line_after(caplog, 0)
        generation = server.scheduler.cancelled[0]
    assert (told["finish"], told["prompt_tokens"]) == ("abort", generation.n_prompt)
    assert 1 <= told["completion_tokens"] <= generation.n_generated
    assert told["status"] in (200, 499)


async def test_a_client_that_leaves_before_its_whole_answer(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(gate=gate)) as server:
        asked = asyncio.create_task(
            server.http.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 99}).__aenter__()
        )
        gate.release(20)  # fewer steps than tokens, so that the client leaves before the end
        while not server.scheduler.running or server.scheduler.running[0].n_generated < 5:
            await asyncio.sleep(0)
        asked.cancel()
        await while_stepping(gate, left(server))
        told = await line_after(caplog, 0)
        generation = server.scheduler.cancelled[0]
    assert told["finish"] == "abort"
    assert 5 <= told["completion_tokens"] + 1 <= generation.n_generated + 1


async def left(server: Running) -> None:
    while not server.scheduler.cancelled:
        await asyncio.sleep(0)


async def test_bytes_that_are_no_request_have_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    from logitless.server.app import make_app
    from logitless.server.config import ServerConfig
    from logitless.server.listen import accepting

    async with running() as server:
        app = make_app(server.service, ServerConfig(port=0))
        async with accepting(app, ServerConfig(port=0)) as sockets:
            reader, writer = await asyncio.open_connection(*sockets[0].getsockname())
            writer.write(f"{SECRET}\r\n\r\n".encode())
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()
    assert lines(caplog) == ["- - 400"]
    assert SECRET not in caplog.text


async def test_files_are_logged_and_counted_by_the_status_that_was_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("content")
    async with running(static=str(tmp_path), metrics=True) as server:
        url = f"{server.url}/a.txt"
        async with server.http.get(url) as reply:
            etag = reply.headers["ETag"]
        parts = [{"Range": "bytes=1-2"}, {"If-None-Match": etag}, {"Range": "bytes=70-"}, {"If-Match": '"x"'}, {}]
        for headers, status in zip(parts, (206, 304, 416, 412, 200), strict=True):
            async with server.http.get(url, headers=headers) as reply:
                assert reply.status == status
        async with server.http.head(url) as reply:
            assert reply.status == 200
        (tmp_path / "none").mkdir()
        assert (await server.get("/none"))[0] == 404
        async with server.http.get(f"{server.url}/metrics") as reply:
            counts = await reply.text()
    told = [line.split()[2] for line in lines(caplog)]
    assert told[:8] == ["200", "206", "304", "416", "412", "200", "200", "404"]
    assert all(f'status="{status}"' in counts for status in told)


async def test_prompts_are_in_their_files_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(server: Running) -> None:
        content = f"{SECRET} say:hi"
        chat = {"messages": [{"role": "user", "content": content}]}
        await server.post("/v1/chat/completions", chat, headers={"X-Request-Id": "../a"})
        async with server.http.post(f"{server.url}/v1/chat/completions", json={**chat, "stream": True}) as reply:
            await reply.read()
        for wrong in ({"messages": [{"role": "villain", "content": SECRET}]}, {"messages": SECRET}, {SECRET: 1}):
            await server.post("/v1/chat/completions", wrong)
        await server.post("/completion", {"prompt": f"{SECRET} step-boom"})
        await server.post("/completion", {"prompt": f"{SECRET} submit-boom"})

    async with running(log_prompts_dir=str(tmp_path), verbose=True) as server:
        await ask(server)
    assert SECRET not in caplog.text
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    told = json.loads(files[0].read_text())
    assert told["prompts"] == [f"<s>[user]{SECRET} say:hi[/][assistant]"]
    assert (told["request_id"], told["path"], told["model"]) == ("../a", "/v1/chat/completions", "fake")
    assert files[0].name.endswith("-.._a.json")
    async with running(verbose=True) as server:
        await ask(server)
    assert SECRET not in caplog.text
    assert len(list(tmp_path.iterdir())) == 4


async def test_a_folder_that_cannot_be_written_to_fails_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(log_prompts_dir=str(tmp_path / "gone")) as server:
        assert (await server.post("/completion", {"prompt": "x", "n_predict": 1}))[0] == 200
    assert f"--log-prompts-dir {tmp_path / 'gone'}: No such file or directory" in caplog.text


async def test_the_start_block(caplog: pytest.LogCaptureFixture) -> None:
    from logitless.server.config import ServerConfig

    async with running() as server:
        assert server.service.served is not None
        log_start(server.service.served, ServerConfig(alias="tiny"), "http://127.0.0.1:1")
    record = next(record for record in caplog.records if record.getMessage().startswith("model loaded"))
    told = record.getMessage().splitlines()
    assert [line.split()[0] for line in told] == ["model", "model", "context", "memory", "address"]
    assert told[1] == "  model    tiny (F32, 0.0 M parameters, 0.0 MiB)"
    assert told[2] == "  context  512 tokens a request, 4 slots"
    assert record.__dict__["fields"]["address"] == "http://127.0.0.1:1"
