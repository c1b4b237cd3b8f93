"""Isolation of API keys: cache, slots, slot files, files, jobs and running answers of each."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from logitless.router.jobs import RouterJobs
from logitless.server.api.openai import files, fine_tuning
from logitless.server.api.openai.tuning_context import DESK, LISTENERS, SILENCE
from logitless.server.auth import ApiKeys, owner_of
from logitless.server.clients import HttpClient
from logitless.server.config import ServerConfig
from logitless.server.middleware import Guard
from tests.helpers.http_fakes import FakeScheduler, Running, running, while_stepping
from tests.server.api.test_http_slots import make_scheduler

KEYS = ("ann", "bob")
TEXT = "hello there, how are you"


def of(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


async def say(server: Running, key: str, prompt: str = TEXT, **more: Any) -> Any:
    """Answer to a prompt of 21 tokens with BOS."""
    body = {"prompt": prompt, "n_predict": 2, "ignore_eos": True, **more}
    status, answer = await server.post("/completion", body, **of(key))
    assert status == 200
    return answer


async def cached(server: Running, key: str, **more: Any) -> int:
    return int((await say(server, key, **more))["timings"]["cache_n"])


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"api_keys": KEYS}, False),
        ({"api_keys": KEYS, "admin_api_key": "admin"}, False),
        ({"api_keys": KEYS, "cache_isolation": "off"}, True),
        ({"api_keys": ("ann",), "admin_api_key": "bob"}, True),
        ({"api_keys": ("ann",), "admin_api_key": "bob", "cache_isolation": "on"}, False),
        ({}, True),
    ],
)
async def test_prefixes_are_shared_without_several_keys(settings: dict[str, Any], shared: bool) -> None:
    async with running(scheduler=make_scheduler(), n_parallel=2, **settings) as server:
        assert await cached(server, "ann") == 0
        assert await cached(server, "bob") == (20 if shared else 0)
        assert await cached(server, "ann") == 20


async def test_a_second_key_in_the_file_begins_the_isolation(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann\n")
    async with running(scheduler=make_scheduler(), n_parallel=2, api_key_file=str(file)) as server:
        await say(server, "ann")
        file.write_text("ann\nbob\n")
        assert await cached(server, "bob") == 0


async def test_salts_and_shared_names() -> None:
    async with running(scheduler=make_scheduler(), n_parallel=2, api_keys=KEYS, cache_shared=("team",)) as server:
        await say(server, "ann", cache_salt="team")
        assert await cached(server, "bob", cache_salt="team") == 20
        await say(server, "ann", cache_salt="x")
        assert await cached(server, "bob", cache_salt="x") == 0
        assert await cached(server, "ann", cache_salt="x") == 20
        assert await cached(server, "ann") == 0
        for salt in (f"{owner_of('ann')}/", f"{owner_of('ann')}/x", "/team", f"../{owner_of('ann')}/"):
            assert await cached(server, "bob", cache_salt=salt) == 0
        for path, body in (
            ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}),
        ):
            for salt, hit in ((f"{path}1", False), (f"{path}1", True), (f"{path}2", False)):
                _, answer = await server.post(
                    path, {**body, "cache_salt": salt, "timings_per_token": True}, **of("ann")
                )
                assert (answer["timings"]["cache_n"] > 0) is hit
        for bad in (5, "x" * 257):
            status, answer = await server.post("/completion", {"prompt": "a", "cache_salt": bad}, **of("ann"))
            assert (status, "cache_salt" in answer["error"]["message"]) == (400, True)


async def test_another_keys_slot_looks_empty(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"api_keys": KEYS, "slot_save_path": str(tmp_path), "verbose": True, "n_parallel": 2}
    async with running(scheduler=make_scheduler(), admin_api_key="admin", **settings) as server:
        held = (await say(server, "ann", id_slot=0))["tokens_cached"]
        draft = {"id_slot": 0, "draft_tokens": [1, 2]}
        status, answer = await server.post("/v1/verify", draft, **of("bob"))
        assert (status, "holds nothing" in answer["error"]["message"]) == (400, True)
        assert (await server.post("/v1/verify", draft, **of("ann")))[0] == 200
        _, shown = await server.get("/slots", **of("bob"))
        assert [set(slot) for slot in shown] == [{"id", "n_ctx", "speculative", "is_processing"}] * 2
        for key in ("ann", "admin"):
            _, shown = await server.get("/slots", **of(key))
            assert TEXT in shown[0]["prompt"]
        assert held == 22
    async with running(scheduler=make_scheduler(), **settings) as server:
        await say(server, "ann", id_slot=0)
        for action, name, told in (("erase", "n_erased", 0), ("save", "n_saved", 0)):
            status, answer = await server.post(f"/slots/0?action={action}", {"filename": "empty"}, **of("bob"))
            assert (status, answer[name]) == (200, told)
        _, answer = await server.post("/slots/0?action=fork", {"id_slot_to": 1}, **of("bob"))
        assert answer["n_forked"] == 0
        assert await cached(server, "ann", id_slot=0) == 20


async def test_slot_files_are_their_keys(tmp_path: Path) -> None:
    async with running(scheduler=make_scheduler(), n_parallel=2, api_keys=KEYS, slot_save_path=str(tmp_path)) as server:

        async def act(key: str, action: str, id: int = 0) -> tuple[int, Any]:
            return await server.post(f"/slots/{id}?action={action}", {"filename": "f"}, **of(key))

        await say(server, "ann", id_slot=0, cache_salt="x")
        assert (await act("ann", "save"))[0] == 200
        status, answer = await act("bob", "restore")
        assert (status, answer["error"]["message"]) == (404, "there is no slot file 'f'")
        status, answer = await act("bob", "save")
        assert (status, "is another key's" in answer["error"]["message"]) == (403, True)
        assert (await act("ann", "restore", 1))[0] == 200
        assert await cached(server, "ann", id_slot=1, cache_salt="x") == 20
    async with running(scheduler=make_scheduler(), n_parallel=2, slot_save_path=str(tmp_path)) as server:  # no keys
        for action in ("restore", "save"):
            assert (await act("", action))[0] == 200
    async with running(scheduler=make_scheduler(), n_parallel=2, api_keys=KEYS, slot_save_path=str(tmp_path)) as server:
        assert (await act("bob", "restore"))[0] == 200  # what has no owner is everybody's


async def test_another_keys_answer_cannot_be_cut_short() -> None:
    gate = threading.Semaphore(0)
    async with running(scheduler=FakeScheduler(gate=gate), api_keys=KEYS) as server:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": 400,
            "reasoning_control": True,
        }
        async with server.http.post(server.url + "/v1/chat/completions", json=body, **of("ann")) as reply:
            gate.release(1)
            line = await reply.content.readline()
            id = line.decode().partition('"id":"')[2].partition('"')[0]
            order = {"id": id, "action": "reasoning_end"}
            assert not (await server.post("/v1/chat/completions/control", order, **of("bob")))[1]["success"]
            asked = server.post("/v1/chat/completions/control", order, **of("ann"))
            assert (await while_stepping(gate, asked))[0] == 200


# -- files and jobs


@asynccontextmanager
async def desk(folder: Path, **settings: Any) -> AsyncIterator[SimpleNamespace]:
    """The endpoints of files and jobs, with a store."""
    config = ServerConfig(**settings)
    app = Guard(config, ApiKeys(config.api_keys), frozenset()).application()
    own = RouterJobs(str(folder))
    app[DESK], app[LISTENERS], app[SILENCE] = own, own.listeners, 60.0
    job = "/v1/fine_tuning/jobs/{id}"
    app.add_routes(
        [
            web.post("/v1/files", files.upload),
            web.get("/v1/files", files.files),
            web.get("/v1/files/{id}", files.file),
            web.delete("/v1/files/{id}", files.delete),
            web.get("/v1/files/{id}/content", files.content),
            web.get("/v1/fine_tuning/jobs", fine_tuning.jobs),
            web.get(job, fine_tuning.job),
            web.get(f"{job}/events", fine_tuning.events),
            web.get(f"{job}/checkpoints", fine_tuning.checkpoints),
            *(web.post(f"{job}/{act}", getattr(fine_tuning, act)) for act in ("cancel", "pause", "resume")),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as http:

        async def ask(key: str, method: str, path: str, data: Any = None) -> tuple[int, Any]:
            headers = {"X-Api-Key": key} if key else {}
            async with http.request(method, url + path, headers=headers, data=data) as reply:
                text = await reply.read()
                return reply.status, await reply.json() if reply.content_type == "application/json" else text

        async def upload(key: str) -> str:
            form = aiohttp.FormData()
            form.add_field("purpose", "fine-tune")
            form.add_field("file", b'{"text": "secret"}\n', filename="rows.jsonl")
            status, row = await ask(key, "POST", "/v1/files", form)
            assert (status, "owner" in row) == (200, False)
            return str(row["id"])

        async def listed(key: str, path: str = "/v1/files") -> list[str]:
            return [row["id"] for row in (await ask(key, "GET", path))[1]["data"]]

        yield SimpleNamespace(ask=ask, upload=upload, listed=listed, store=own.store)
    await runner.cleanup()
    own.store.close()


async def test_files_are_their_keys(tmp_path: Path) -> None:
    async with desk(tmp_path) as open_desk:
        old = await open_desk.upload("")  # before there were keys: everybody's
    async with desk(tmp_path, api_keys=KEYS) as server:
        mine, other = await server.upload("ann"), await server.upload("bob")
        assert (await server.listed("ann"), await server.listed("bob")) == ([mine, old], [other, old])
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            status, answer = await server.ask("bob", method, f"/v1/files/{mine}{path}")
            assert (status, answer["error"]["message"]) == (404, f"No such File object: {mine}")
        assert await server.ask("ann", "GET", f"/v1/files/{mine}/content") == (200, b'{"text": "secret"}\n')
        status, row = await server.ask("ann", "GET", f"/v1/files/{mine}")
        assert (status, row["id"], "owner" in row) == (200, mine, False)
    async with desk(tmp_path, api_keys=KEYS, admin_api_key="admin") as server:
        assert set(await server.listed("admin")) == {mine, other, old}
        assert (await server.ask("admin", "DELETE", f"/v1/files/{mine}"))[0] == 200
        assert await server.listed("ann") == [old]
    async with desk(tmp_path, api_keys=("new",)) as server:  # the only key has been changed
        assert set(await server.listed("new")) == {other, old}


async def test_jobs_are_their_keys(tmp_path: Path) -> None:
    async with desk(tmp_path, api_keys=KEYS) as server:
        row = {"id": "ftjob-1", "status": "queued", "model": "m", "model_name": "ft:m", "owner": owner_of("ann")}
        server.store.put("jobs", row)
        assert (
            await server.listed("ann", "/v1/fine_tuning/jobs"),
            await server.listed("bob", "/v1/fine_tuning/jobs"),
        ) == (["ftjob-1"], [])
        for method, path in (
            *(("GET", path) for path in ("", "/events", "/events?stream=true", "/checkpoints")),
            *(("POST", f"/{act}") for act in ("cancel", "pause", "resume")),
        ):
            assert (await server.ask("bob", method, f"/v1/fine_tuning/jobs/ftjob-1{path}"))[0] == 404, path
        assert (await server.ask("ann", "GET", "/v1/fine_tuning/jobs/ftjob-1/checkpoints"))[0] == 200
        status, job = await server.ask("ann", "POST", "/v1/fine_tuning/jobs/ftjob-1/cancel")
        assert (status, job["status"], "owner" in job) == (200, "cancelled", False)


def test_a_router_passes_its_clients_on() -> None:
    for client in (
        HttpClient(),
        HttpClient("o", False, False, "o"),
        HttpClient("o", True, False, ""),
        HttpClient("", False, True, "", False),
    ):
        request: Any = SimpleNamespace(headers=client.headers())
        assert HttpClient.passed_on(request) == client
    assert HttpClient.passed_on(SimpleNamespace(headers={})) == HttpClient("", False, False, "", False)  # type: ignore[arg-type]
