"""Job store: its contents are JSON that clients see; a full disk is an error of one line."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from logitless.cli.log import LogFile
from logitless.engine.errors import DiskFull, is_full
from logitless.engine.finetuning.job import checkpoint_path
from logitless.engine.finetuning.tuned_models import delete, find, tuned_models
from logitless.engine.kv_cache.slot_files import CacheKind, SlotFileState, save
from logitless.engine.records.store import RESERVE, Store
from logitless.frontend.replies.encoding import encode_json
from logitless.models.atomic_write import ABANDONED, private, unfinished
from logitless.server.api.openai.files import _keep

KIND = CacheKind("m", "f16", "f16", 16, 64)


def test_numbers_that_are_not_finite_are_kept_as_null(tmp_path: Path):
    store = Store(tmp_path)
    metrics = {
        "step": 3,
        "train_loss": math.nan,
        "gradient_norm": math.inf,
        "learning_rate": 0.5,
        "all": [-math.inf, 1],
    }
    store.add_event("job", "Step 3: training loss=nan", type="metrics", step=3, data=metrics)
    store.add_checkpoint("job", 3, {"id": "c", "metrics": {"full_valid_loss": math.inf}})
    store.put("jobs", {"id": "job", "loss": math.nan})
    ((_, event),) = store.events("job")
    expected = {"step": 3, "train_loss": None, "gradient_norm": None, "learning_rate": 0.5, "all": [None, 1]}
    assert event["data"] == expected
    assert store.checkpoints("job") == [{"id": "c", "metrics": {"full_valid_loss": None}}]
    assert store.get("jobs", "job") == {"id": "job", "loss": None}
    assert b"null" in encode_json(event)
    store.close()


def test_a_full_disk(tmp_path: Path):
    """Nothing half done stays, and when there is room all goes on."""
    store = Store(tmp_path)
    store.put("jobs", {"id": "j", "n": 0})
    (n_pages,) = store._db.execute("pragma page_count").fetchone()
    store._db.execute(f"pragma max_page_count = {n_pages}")
    large = "x" * 100_000
    with pytest.raises(OSError, match="disk is full") as refused:
        store.change("jobs", "j", lambda row: {**row, "n": large})
    assert refused.value.errno == ENOSPC
    desk: Any = SimpleNamespace(store=store, check=lambda path, filename, goes_on: None)
    with store.incoming() as part:
        part.write_bytes(b"text")
        with pytest.raises(DiskFull, match=r"^the file cannot be kept: database or disk is full$"):
            _keep(desk, part, large, "fine-tune")
    assert list((tmp_path / "files").iterdir()) == []
    assert store.change("jobs", "j", lambda row: {**row, "n": 1}) == {"id": "j", "n": 1}
    store._db.execute("pragma max_page_count = 1000")
    with store.incoming() as part:
        part.write_bytes(b"text")
        assert _keep(desk, part, large, "fine-tune")["bytes"] == 4
    store.close()


class FullDisk:
    """A database that has no room for a write as long as the store's reserve is there."""

    def __init__(self, store: Store) -> None:
        self.db, self.reserve = store._db, store.folder / "reserve"
        self.n_refused = 0

    def execute(self, sql: str, *values: Any) -> Any:
        if sql.startswith(("insert", "update", "delete")) and self.reserve.exists():
            self.n_refused += 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self.db.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)


def test_deletion_on_full_disk_succeeds(tmp_path: Path):
    store = Store(tmp_path)
    reserve = tmp_path / "reserve"
    assert reserve.stat().st_size == RESERVE
    store.put("files", {"id": "f"})
    store.put("jobs", {"id": "j", "status": "running"})
    store.add_event("j", "said", step=3)
    store.add_checkpoint("j", 3, {"id": "c", "path": "p"})
    store._connection = full = FullDisk(store)  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk is full"):
        store.add_event("j", "more")
    store.delete("files", "f")
    store.forget_events("j", 0)
    store.forget_checkpoints("j", ["p"])
    assert store.change("jobs", "j", lambda row: {**row, "status": "cancelled"}) is not None
    assert (store.all("files"), store.events("j"), store.checkpoints("j")) == ([], [], [])
    assert store.all("jobs") == [{"id": "j", "status": "cancelled"}]
    assert full.n_refused == 5
    assert reserve.stat().st_size == RESERVE  # there is room again
    store.close()


def test_wait_for_another_process_blocks_no_other_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("logitless.engine.records.store.LOCK_TIMEOUT", -1.0)
    store = Store(tmp_path)
    store.put("jobs", {"id": "j", "n": 0})
    other = sqlite3.connect(tmp_path / "logitless.sqlite", isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(OSError, match="database is locked"):
        store.add_event("j", "told")
    tried = threading.Event()
    monkeypatch.setattr("logitless.engine.records.store.time.sleep", lambda _: tried.set())
    writer = threading.Thread(target=store.patient().change, args=("jobs", "j", lambda row: {**row, "n": 1}))
    writer.start()
    assert tried.wait(60)
    assert store.get("jobs", "j") == {"id": "j", "n": 0}
    other.execute("rollback")
    writer.join(60)
    assert store.get("jobs", "j") == {"id": "j", "n": 1}
    other.close()
    store.close()
    with pytest.raises(OSError, match="closed database"):
        store.patient().add_event("j", "too late")


def test_abandoned_part_files_are_removed_and_young_ones_stay(tmp_path: Path):
    Store(tmp_path).close()
    for name, age in (("files/old.part", ABANDONED + 60), ("files/young.part", 60), ("checkpoints/old.part", 1e6)):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    Store(tmp_path).close()
    assert [path.name for path in tmp_path.glob("*/*")] == ["young.part"]


def test_only_the_user_may_read_what_is_kept(tmp_path: Path):
    before = os.umask(0o022)
    try:
        folder = tmp_path / "made" / "data"
        (tmp_path / "old" / "files").mkdir(parents=True)  # of a version that did not care
        for store in (Store(folder), Store(tmp_path / "old")):
            row = store.add_file(b"text", "a.jsonl", "fine-tune")
            store.put("jobs", {"id": "j"})
            with unfinished(private(store.folder / "checkpoints" / "j.gguf")) as part:
                part.write_bytes(b"weights")
            own = [path for path in store.folder.rglob("*") if path.is_file()]
            assert {path.name for path in own} >= {row["id"], "j.gguf", "logitless.sqlite", "logitless.sqlite-wal"}
            assert {path.stat().st_mode & 0o777 for path in own} == {0o600}
            assert {(store.folder / name).stat().st_mode & 0o777 for name in ("files", "checkpoints")} == {0o700}
            store.close()
        assert folder.stat().st_mode & 0o777 == 0o700
        save(tmp_path, "slot", KIND, SlotFileState([], []))
        log = LogFile(tmp_path / "log")
        log.close()
        (tmp_path / "open.log").touch(0o640)
        LogFile(tmp_path / "open.log").close()
        modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("slot", "log", "open.log")}
        assert modes == {"slot": 0o600, "log": 0o600, "open.log": 0o640}  # the last is as its owner wants it
    finally:
        os.umask(before)


def test_a_kill_during_a_delete_leaves_no_row_without_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path)
    files = [store.add_file(b"content", f"{i}.jsonl", "batch")["id"] for i in range(3)]
    store.put("batches", {"id": "b"})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", Mock(side_effect=KeyboardInterrupt))  # as far as a kill lets it come
        with pytest.raises(KeyboardInterrupt):
            store.delete_files(files[:2], "b")
    store.close()
    again = Store(tmp_path)
    assert [row["id"] for row in again.all("files")] == files[2:]
    assert again.all("batches") == []
    assert again.file_path(files[2]).read_bytes() == b"content"
    again.close()
    for id in files:
        os.utime(tmp_path / "files" / id, (0, 0))
    Store(tmp_path).close()
    assert [path.name for path in (tmp_path / "files").iterdir()] == files[2:]  # contents without a row are swept


def test_a_kill_in_the_delete_of_a_model_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path)
    for job in ("a", "b"):
        store.put("jobs", {"id": job, "status": "succeeded", "model_name": job, "hyperparameters": {}})
        checkpoint_path(store, job).write_bytes(b"state")
        for step in (4, 8):
            path = tmp_path / "checkpoints" / f"{job}@{step}.gguf"
            path.write_bytes(b"weights")
            row = {"id": f"{job}{step}", "fine_tuned_model_checkpoint": f"{job}@{step}", "path": str(path)}
            store.add_checkpoint(job, step, row)

    def kill(path: Path, missing_ok: bool = False) -> None:
        if "@" in path.name:
            raise KeyboardInterrupt
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        model = find(store, "a")
        assert model is not None
        with pytest.raises(KeyboardInterrupt):
            delete(store, model)
    assert [model.name for model in tuned_models(store)] == ["b@4", "b@8", "b"]
    store.close()
    for path in (tmp_path / "checkpoints").iterdir():
        os.utime(path, (0, 0))
    Store(tmp_path).close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["b.gguf", "b@4.gguf", "b@8.gguf"]


def test_a_file_can_be_deleted_on_a_disk_without_any_room(tmp_path: Path):
    store = Store(tmp_path)
    id = store.add_file(b"content", "a.jsonl", "batch")["id"]

    class Full(FullDisk):
        def execute(self, sql: str, *values: Any) -> Any:
            self.reserve.touch()
            path = store.file_path(id)
            has_room = not path.exists() or not path.stat().st_size
            return self.db.execute(sql, *values) if has_room else super().execute(sql, *values)

        def executemany(self, sql: str, *values: Any) -> Any:
            return self.execute(sql.replace("?", repr(id)))

    store._connection = Full(store)  # type: ignore[assignment]
    store.delete_files([id])
    assert store.all("files") == []
    assert not store.file_path(id).exists()
    store.close()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_store_opens_on_a_full_disk_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_new: bool
):
    if not is_new:
        old = Store(tmp_path)
        old.put("jobs", {"id": "j"})
        old.close()
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_prepare", Mock(side_effect=error))
        store = Store(tmp_path)
        assert "the disk is full: files, jobs and batches wait for room" in caplog.text
        with pytest.raises(OSError, match="disk is full") as refused:
            store.all("jobs")
        assert is_full(refused.value)
    assert store.all("jobs") == ([] if is_new else [{"id": "j"}])  # there is room again
    assert not store._reserve.exists()
    store.put("jobs", {"id": "k"})
    assert store._reserve.stat().st_size == RESERVE  # what frees space works when the disk is full again
    store.close()
