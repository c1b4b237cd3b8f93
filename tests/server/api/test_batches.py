"""Batches in both APIs, with their clients, through the real port."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from logitless.engine.records.store import Store
from logitless.engine.requests import BATCH_PRIORITY
from logitless.server.api.batches import batch as batches
from tests.helpers.http_fakes import FakeScheduler, Running, running

ENDPOINT = "/v1/chat/completions"


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[Running, Store]]:
    store = Store(folder)
    tuning: Any = SimpleNamespace(ready=False, pending=False, close=lambda: None, store=store)
    try:
        async with running(tuning=tuning, **settings) as server:
            yield server, store
    finally:
        store.close()


def chat(id: str, said: str, **fields: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": ENDPOINT, "body": {"messages": [_user(said)], **fields}}


def _user(said: str) -> dict[str, str]:
    return {"role": "user", "content": said}


async def upload(client: AsyncOpenAI, *lines: Any) -> str:
    content = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    return (await client.files.create(file=("lines.jsonl", content), purpose="batch")).id


async def ended(client: AsyncOpenAI, id: str) -> Any:
    while (found := await client.batches.retrieve(id)).status in batches.OPEN:
        await asyncio.sleep(0.01)
    return found


async def rows(client: AsyncOpenAI, file: str | None) -> list[Any]:
    assert file is not None
    return [json.loads(line) for line in (await client.files.content(file)).text.splitlines()]


async def test_openai_s_client(tmp_path: Path) -> None:
    async with serving(tmp_path, alias="tiny") as (server, store):
        client = server.openai
        lines = [chat(f"r{i}", f"say:answer {i}") for i in range(20)]
        file = await upload(client, *lines, b"", chat("wrong", "say:x", temperature="hot"))
        made = await client.batches.create(
            input_file_id=file, endpoint=ENDPOINT, completion_window="24h", metadata={"a": "b"}
        )
        assert (made.status, made.object, made.metadata) == ("validating", "batch", {"a": "b"})
        assert made.expires_at == made.created_at + 24 * 3600
        done = await ended(client, made.id)
        assert (done.status, done.errors) == ("completed", None)
        assert done.request_counts.to_dict() == {"total": 21, "completed": 20, "failed": 1}
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        answers = await rows(client, done.output_file_id)
        for i, row in enumerate(answers):
            assert (row["custom_id"], row["error"], row["response"]["status_code"]) == (f"r{i}", None, 200)
            assert row["response"]["request_id"] == f"{done.id}-{i}"
            assert row["response"]["body"]["choices"][0]["message"]["content"] == f"answer {i}"
            assert row["response"]["body"]["model"] == "tiny"
        (failed,) = await rows(client, done.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("wrong", 400)
        assert "temperature" in failed["response"]["body"]["error"]["message"]
        assert [b.id for b in (await client.batches.list(limit=1)).data] == [done.id]
        assert (await client.files.retrieve(done.output_file_id)).purpose == "batch_output"
        with pytest.raises(BadRequestError, match="is completed"):
            await client.batches.cancel(done.id)
        await client.files.delete(file)
        assert store.count_lines(done.id) == (0, 0)  # they are in the files
        assert {request.priority for request in server.scheduler.requests} == {BATCH_PRIORITY}


@pytest.mark.parametrize(
    ("endpoint", "body", "text"),
    [
        ("/v1/completions", {"prompt": "say:hi"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "say:hi"}, lambda body: body["output"][-1]["content"][0]["text"]),
    ],
)
async def test_other_endpoints(tmp_path: Path, endpoint: Any, body: Any, text: Any) -> None:
    async with serving(tmp_path, api_prefix="/x") as (server, _):
        client = server.openai.with_options(base_url=f"{server.url}/x/v1")
        file = await upload(client, {"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
        made = await client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h")
        done = await ended(client, made.id)
        (row,) = await rows(client, done.output_file_id)
        assert text(row["response"]["body"]) == "hi"


async def test_anthropic_s_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, store):
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            asked: Any = [
                {"custom_id": f"r{i}", "params": {"model": "m", "max_tokens": 20, "messages": [_user(f"say:{i}")]}}
                for i in range(5)
            ]
            asked.append({"custom_id": "bad", "params": {"model": "m", "max_tokens": 5, "messages": []}})
            made = await client.messages.batches.create(requests=asked)
            assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
            while (done := await client.messages.batches.retrieve(made.id)).processing_status != "ended":
                await asyncio.sleep(0.01)
            assert done.request_counts.to_dict() == {
                **dict.fromkeys(("processing", "canceled", "expired"), 0),
                "succeeded": 5,
                "errored": 1,
            }
            assert done.ended_at is not None
            told = {row.custom_id: row.result async for row in await client.messages.batches.results(made.id)}
            assert list(told) == [*(f"r{i}" for i in range(5)), "bad"]
            answer: Any = told["r3"]
            assert (answer.type, answer.message.content[0].text) == ("succeeded", "3")
            wrong: Any = told["bad"]
            assert (wrong.type, wrong.error.error.type) == ("errored", "invalid_request_error")
            assert [b.id async for b in client.messages.batches.list(limit=1)] == [made.id]
            assert (await server.openai.batches.list()).data == []
            with pytest.raises(NotFoundError):
                await server.openai.batches.retrieve(made.id)
            gone = await client.messages.batches.delete(made.id)
            assert (gone.id, gone.type) == (made.id, "message_batch_deleted")
        assert (store.all("batches"), store.all("files")) == ([], [])


async def test_cancelled_and_expired(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    async with serving(tmp_path, scheduler=FakeScheduler(gate=gate)) as (server, store):
        client = server.openai
        file = await upload(client, *(chat(f"r{i}", "x", max_tokens=50) for i in range(9)))
        made = await client.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="1h")  # type: ignore[arg-type]
        while not server.scheduler.running:
            await client.batches.retrieve(made.id)
        with pytest.raises(BadRequestError, match="is in use by"):
            await client.files.delete(file)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        gate.release(1000)
        done = await ended(client, made.id)
        assert (done.status, done.output_file_id, done.error_file_id) == ("cancelled", None, None)
        assert done.request_counts.to_dict() == {"total": 9, "completed": 0, "failed": 0}
        row = store.get("batches", made.id)
        assert row is not None
        late = {k: v for k, v in row.items() if not k.endswith(("_id", "outputs", "counts", "ends_as"))}
        late |= {"id": "batch_late", "status": "in_progress", "expires_at": 1, "input_file_id": file}
        store.put("batches", late)
        store.add_lines("batch_late", [(2, True, b'{"custom_id":"r2"}')])
    async with serving(tmp_path) as (server, _):
        done = await ended(server.openai, "batch_late")
        assert done.status == "expired"
        assert [row["custom_id"] for row in await rows(server.openai, done.output_file_id)] == ["r2"]
        errors = await rows(server.openai, done.error_file_id)
        assert [row["custom_id"] for row in errors] == [f"r{i}" for i in range(9) if i != 2]
        assert {row["error"]["code"] for row in errors} == {"batch_expired"}
        assert not server.scheduler.requests


async def test_lines_with_a_record_are_not_asked_again(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    async with serving(tmp_path, scheduler=FakeScheduler(gate=gate)) as (server, store):
        file = await upload(server.openai, *(chat(f"r{i}", f"say:{i}") for i in range(6)))
        made = await server.openai.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
        while not server.scheduler.running:
            await server.openai.batches.retrieve(made.id)
        store.add_lines(made.id, [(1, True, b'{"custom_id":"kept"}'), (4, False, b'{"custom_id":"failed"}')])
    assert store is not None
    async with serving(tmp_path) as (server, _):  # the first one ended in the middle
        done = await ended(server.openai, made.id)
        assert done.request_counts.to_dict() == {"total": 6, "completed": 5, "failed": 1}
        answers = await rows(server.openai, done.output_file_id)
        assert [row["custom_id"] for row in answers] == ["r0", "kept", "r2", "r3", "r5"]
        assert len(server.scheduler.requests) == 4


async def test_as_many_lines_wait_as_run(tmp_path: Path) -> None:
    """All slots may become free in one step, and the next one is as full."""
    gate = threading.Semaphore(0)
    async with serving(tmp_path, scheduler=FakeScheduler(4, gate=gate), n_parallel=4) as (server, _):
        file = await upload(server.openai, *(chat(f"r{i}", f"say:{i}") for i in range(20)))
        made = await server.openai.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
        while server.service.n_streams < 8:
            await server.openai.batches.retrieve(made.id)
        for _ in range(5):
            await server.openai.batches.retrieve(made.id)
        assert server.service.n_streams == 8


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (b"{", "invalid_json_line", "line 2: is not JSON"),
        (b"[]", "invalid_json_line", "line 2: is no JSON object"),
        ({"body": {}}, "missing_required_parameter", "custom_id"),
        (chat("a", "x"), "duplicate_custom_id", "'a' is another line's"),
        ({**chat("b", "x"), "url": "/v1/completions"}, "invalid_url", "the batch's endpoint"),
        ({**chat("b", "x"), "method": "GET"}, "invalid_method", "must be POST"),
        ({**chat("b", "x"), "body": []}, "missing_required_parameter", "must be an object"),
        (chat("b", "x", stream=True), "invalid_body", "are no streams"),
    ],
)
async def test_a_file_with_a_wrong_line_fails(tmp_path: Path, line: Any, code: str, said: str) -> None:
    async with serving(tmp_path) as (server, _):
        file = await upload(server.openai, chat("a", "x"), line)
        made = await server.openai.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
        done = await ended(server.openai, made.id)
        assert done.status == "failed"
        (error,) = done.errors.data
        assert (error.code, error.line) == (code, 2)
        assert said in error.message
        assert not server.scheduler.requests


async def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (server, _):
        file = await upload(server.openai, chat("a", "x"))
        picture = (await server.openai.files.create(file=("a.png", b"x"), purpose="vision")).id
        right = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"}
        for wrong, message in (
            ({"input_file_id": "file-none"}, "there is no file 'file-none'"),
            ({"input_file_id": picture}, "the purpose of the file is 'vision'"),
            ({"endpoint": "/v1/x"}, "field 'endpoint': must be one of"),
            ({"completion_window": "1000h"}, "must be hours, from 1h to 720h"),
            ({"metadata": {"a": 1}}, "field 'metadata"),
        ):
            status, told = await server.post("/v1/batches", right | wrong)
            assert (status, message in told["error"]["message"]) == (400, True), told
        monkeypatch.setattr(batches, "MAX_OPEN", 0)
        assert (await server.post("/v1/batches", right))[0] == 429
        for requests, message in (
            ([], "non-empty"),
            ([{"custom_id": "a"}], "params"),
            ([{"custom_id": "a", "params": {}}] * 2, "requests[1].custom_id"),
            ([{"custom_id": "a", "params": {"stream": True}}], "params.stream"),
        ):
            status, told = await server.post("/v1/messages/batches", {"requests": requests})
            assert (status, message in told["error"]["message"]) == (400, True), told
    async with running() as server:
        for path in ("/v1/batches", "/v1/messages/batches"):
            status, told = await server.get(path)
            assert (status, "--data-dir" in told["error"]["message"]) == (501, True)


async def test_each_key_sees_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=("one", "two"), cache_isolation="on") as (server, store):
        other = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0)
        file = await upload(server.openai, chat("a", "say:hi"))
        made = await server.openai.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
        done = await ended(server.openai, made.id)
        for ask in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(NotFoundError):
                await ask(made.id)
        with pytest.raises(BadRequestError, match="there is no file"):
            await other.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
        with pytest.raises(NotFoundError):
            await other.files.content(done.output_file_id)
        assert (await other.batches.list()).data == []
        await other.close()
        row = store.get("batches", made.id)
        assert row is not None
        assert [request.cache_salt for request in server.scheduler.requests] == [f"{row['owner']}/"]
