"""Locked job store: it delays only requests of the store, and nothing else."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.engine.finetuning.job import set_status
from logitless.engine.records import store
from logitless.engine.records.store import Store
from tests.helpers.http_fakes import running


class Desk:
    """Of a job that runs elsewhere."""

    ready = pending = False
    weights = ()

    def __init__(self, folder: Path) -> None:
        self.store, self.base = Store(folder), "fake"
        self.engine = SimpleNamespace(hparams=SimpleNamespace(n_ctx_whole=64))

    def set_status(self, *args: Any) -> Any:
        return set_status(self.store, *args)

    def created(self) -> None:
        pass

    def close(self) -> None:
        self.store.close()


@pytest.mark.parametrize("what", ["pause", "create"])
async def test_others_do_not_wait(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOCK_TIMEOUT", 0.5)
    waits, goes_on, sleep = threading.Event(), threading.Event(), time.sleep

    def retry(seconds: float) -> None:
        waits.set()
        goes_on.wait(20)
        sleep(seconds)

    desk = Desk(tmp_path)
    file = desk.store.add_file(b'{"prompt": "a", "completion": "b"}\n' * 20, "rows.jsonl", "fine-tune")["id"]
    desk.store.put("jobs", {"id": "j", "status": "running", "training_file": file, "validation_file": None})
    other = sqlite3.connect(tmp_path / "logitless.sqlite", isolation_level=None)
    async with running(tuning=desk) as server:
        other.execute("begin immediate")
        if what == "pause":
            path, body = "/v1/fine_tuning/jobs/j/pause", {}
        else:
            path, body = "/v1/fine_tuning/jobs", {"model": "fake.gguf", "training_file": file}
        monkeypatch.setattr(store.time, "sleep", retry)
        asked = asyncio.create_task(server.post(path, body))
        assert await asyncio.to_thread(waits.wait, 20)
        assert (await server.get("/health"))[0] == 200
        assert not asked.done()
        goes_on.set()
        status, told = await asked
        assert (status, "database is locked" in told["error"]["message"]) == (500, True), told
        other.execute("rollback")
    other.close()
