"""POST /slots/{id} over a real port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.helpers.http_fakes import FakeTokenizer, running
from tests.helpers.scheduler_fakes import FakeEngine, FakeSampler


def make_scheduler() -> Scheduler:
    engine = FakeEngine(0)
    scheduler = Scheduler(engine, FakeTokenizer(), SchedulerConfig(n_slots=2, n_ctx=256), make_sampler=FakeSampler)  # type: ignore[arg-type]
    engine.full_kv.__init__(scheduler.cache.pool.n_blocks)  # type: ignore[misc]
    return scheduler


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler()


async def test_save_restore_erase_fork(scheduler: Scheduler, tmp_path: Path) -> None:
    async with running(scheduler=scheduler, n_parallel=2, slot_save_path=str(tmp_path)) as server:
        body = {"prompt": "hello there, how are you", "n_predict": 4, "id_slot": 0, "ignore_eos": True}
        _, answer = await server.post("/completion", body)
        n, n_prompt = answer["tokens_cached"], answer["tokens_evaluated"]
        assert n == n_prompt + 3
        status, saved = await server.post("/slots/0?action=save", {"filename": "x.bin"})
        assert (status, saved["id_slot"], saved["filename"], saved["n_saved"]) == (200, 0, "x.bin", n)
        assert saved["n_written"] == os.path.getsize(tmp_path / "x.bin")
        assert saved["timings"]["save_ms"] > 0
        assert await server.post("/slots/0?action=erase", None) == (200, {"id_slot": 0, "n_erased": n})
        assert await server.post("/slots/0?action=erase", {}) == (200, {"id_slot": 0, "n_erased": 0})
        status, restored = await server.post("/slots/1?action=restore", {"filename": "x.bin"})
        assert (status, restored["id_slot"], restored["n_restored"], restored["n_read"]) == (
            200, 1, n, saved["n_written"],
        )  # fmt: skip
        assert restored["timings"]["restore_ms"] > 0
        status, answer = await server.post("/completion", {**body, "id_slot": 1})
        assert answer["timings"]["cache_n"] == n_prompt - 1
        status, forked = await server.post("/slots/1?action=fork", {"id_slot_to": 0})
        assert (status, forked) == (200, {"id_slot": 1, "id_slot_to": 0, "n_forked": n})


@pytest.mark.parametrize(
    ("path", "body", "code", "message"),
    [
        ("0?action=save", {}, 400, "field 'filename': is required"),
        ("0?action=save", {"filename": 3}, 400, "field 'filename': expected a string, got a number"),
        ("0?action=save", {"filename": "../x"}, 400, "field 'filename': must be the name of a file"),
        ("0?action=restore", {"filename": "none"}, 404, "there is no slot file 'none'"),
        ("0?action=restore", {"filename": "bad"}, 400, "'bad' is not a slot file"),
        ("0?action=restore", [], 400, "must be a JSON object"),
        ("2?action=restore", {"filename": "bad"}, 400, "no slot '2'"),
        ("-1?action=save", {"filename": "a"}, 400, "no slot '-1'"),
        ("0?action=fork", {}, 400, "field 'id_slot_to': is required"),
        ("0?action=fork", {"id_slot_to": 2}, 400, "field 'id_slot_to': must be between 0 and 1"),
        ("0?action=", {}, 400, "query 'action'"),
        ("0", {}, 400, "query 'action'"),
    ],
)
async def test_refusals(scheduler: Scheduler, tmp_path: Path, path: str, body: object, code: int, message: str) -> None:
    (tmp_path / "bad").write_bytes(b"x" * 100)
    async with running(scheduler=scheduler, n_parallel=2, slot_save_path=str(tmp_path)) as server:
        status, answer = await server.post(f"/slots/{path}", body)
        assert (status, answer["error"]["code"]) == (code, code)
        assert message in answer["error"]["message"]
        assert os.listdir(tmp_path) == ["bad"]


@pytest.mark.parametrize(
    "name", ["/tmp/x", "a/../../x", "..", ".", "", "a\0b", "a/b", "a\\..\\b", "x" * 300, None, ["a"]], ids=repr
)
async def test_slot_file_outside_the_folder_is_refused(scheduler: Scheduler, tmp_path: Path, name: object) -> None:
    (folder := tmp_path / "slots").mkdir()
    async with running(scheduler=scheduler, n_parallel=2, slot_save_path=str(folder)) as server:
        for action in ("save", "restore"):
            status, _ = await server.post(f"/slots/0?action={action}", {"filename": name})
            assert status in (400, 404)
    assert os.listdir(tmp_path) == ["slots"]
    assert os.listdir(folder) == []


async def test_without_a_folder(scheduler: Scheduler) -> None:
    async with running(scheduler=scheduler, n_parallel=2) as server:
        for action in ("save", "restore"):
            status, answer = await server.post(f"/slots/0?action={action}", {"filename": "a"})
            assert (status, answer["error"]["type"]) == (501, "not_supported_error")
            assert "--slot-save-path" in answer["error"]["message"]
        assert (await server.post("/slots/0?action=erase", {}))[0] == 200
