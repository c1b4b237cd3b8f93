"""Files, fine-tuning jobs, their events and checkpoints, in SQLite and beside it, under one folder.

Any thread may call, and several processes may share the folder: a router and the servers of its models do. What has
been written is there after a kill: every call is one transaction.
"""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from errno import ENOSPC
from pathlib import Path
from typing import Any, TypeVar

from logitless.models.gguf.atomic_write import settle, sweep

VERSION = 1
PATIENCE = 5.0  # seconds that another process may keep us from writing
RETRY = 0.02
_SCHEMA = """
create table if not exists files (id text primary key, data text not null, seq integer unique);
create table if not exists jobs (id text primary key, data text not null, seq integer unique);
create table if not exists events (seq integer primary key autoincrement, id text unique, job text, step integer,
    data text not null);
create index if not exists events_of_job on events (job, seq);
create table if not exists checkpoints (seq integer primary key autoincrement, id text unique, job text, step integer,
    data text not null, unique (job, step));
"""
Row = dict[str, Any]
T = TypeVar("T")


class Store:
    """`folder` is made if it is not there. OSError says that it cannot be used."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        for name in ("files", "checkpoints"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            sweep((self.folder / name).glob("*.part"))  # other processes write here, too
        self._lock = threading.Lock()
        self._patience = PATIENCE
        try:
            self._db = sqlite3.connect(self.folder / "logitless.sqlite", check_same_thread=False, isolation_level=None)
            self._db.execute("pragma journal_mode = wal")
            (version,) = self._db.execute("pragma user_version").fetchone()
            if version > VERSION:
                raise OSError(f"{self.folder}: was written by a newer version ({version}, this one knows {VERSION})")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"pragma user_version = {VERSION}")
            self._db.execute("pragma busy_timeout = 0")  # from now on `_do` waits
        except sqlite3.Error as error:
            raise OSError(f"{self.folder}: {error}") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def patient(self) -> Store:
        """The same, for threads that nobody waits for: however long another process keeps it from writing."""
        other = copy(self)
        other._patience = math.inf
        return other

    def _do(self, call: Callable[[], T]) -> T:
        """Something with the database, which is this thread's meanwhile, but not while another process writes to it."""
        until = time.monotonic() + self._patience
        while True:
            with self._lock:
                try:
                    return call()
                except sqlite3.Error as error:
                    code = getattr(error, "sqlite_errorcode", 0)  # none of sqlite3's own, such as after `close`
                    if code & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                        raise self._refused(error, code) from None
            time.sleep(RETRY)

    def _refused(self, error: sqlite3.Error, code: int) -> OSError:
        if code == sqlite3.SQLITE_FULL:
            return OSError(ENOSPC, str(error), str(self.folder))
        return OSError(f"{self.folder}: {error}")

    def _run(self, sql: str, *values: object, durable: bool = True) -> list[tuple[Any, ...]]:
        """`durable`: not even a power failure takes it back, for which the disk is waited for."""

        def run() -> list[tuple[Any, ...]]:
            self._db.execute(f"pragma synchronous = {'full' if durable else 'normal'}")
            return self._db.execute(sql, values).fetchall()

        return self._do(run)

    # -- files and jobs: rows that change

    def put(self, table: str, row: Mapping[str, Any]) -> None:
        """Write a row, new or not."""
        self._run(
            f"insert into {table} (id, data, seq) values (?, ?, (select coalesce(max(seq), 0) + 1 from {table})) "
            "on conflict (id) do update set data = excluded.data",
            row["id"],
            _json(row),
        )

    def get(self, table: str, id: str) -> Row | None:
        found = self._run(f"select data from {table} where id = ?", id)
        return json.loads(found[0][0]) if found else None

    def change(self, table: str, id: str, change: Callable[[Row], Row | None]) -> Row | None:
        """Put what `change` makes of a row in its place, and let nobody come between, in no process. None: it is left
        as it is, because `change` says so or because there is none."""

        def run() -> Row | None:
            self._db.execute("pragma synchronous = full")
            self._db.execute("begin immediate")
            try:
                found = self._db.execute(f"select data from {table} where id = ?", (id,)).fetchone()
                row = change(json.loads(found[0])) if found else None
                if row is not None:
                    self._db.execute(f"update {table} set data = ? where id = ?", (_json(row), id))
                self._db.execute("commit")
            finally:
                if self._db.in_transaction:  # or no other could ever begin
                    self._db.execute("rollback")
            return row

        return self._do(run)

    @property
    def version(self) -> int:
        """Another number whenever another process has written."""
        return int(self._run("pragma data_version")[0][0])

    def all(self, table: str) -> list[Row]:
        """Every row, the newest first."""
        return [json.loads(data) for (data,) in self._run(f"select data from {table} order by seq desc")]

    def delete(self, table: str, id: str) -> None:
        self._run(f"delete from {table} where id = ?", id)

    def file_path(self, id: str) -> Path:
        return self.folder / "files" / id

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A path to write a file to that may be kept. Nothing is left there when the block ends."""
        part = self.file_path(f"{new_id('file')}.part")
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)

    def add_file(self, content: bytes, filename: str, purpose: str) -> Row:
        """Keep a file of a few bytes."""
        with self.incoming() as part:
            part.write_bytes(content)
            return self.keep_file(part, filename, purpose)

    def keep_file(self, part: Path, filename: str, purpose: str) -> Row:
        """Keep what was written to an `incoming` path; it is on the disk before it is known."""
        row: Row = {
            "id": new_id("file"),
            "object": "file",
            "bytes": part.stat().st_size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        path = self.file_path(row["id"])
        settle(part, path)
        try:
            self.put("files", row)
        except OSError:
            path.unlink()
            raise
        return row

    # -- events and checkpoints: rows that only come

    def add_event(
        self,
        job: str,
        message: str,
        *,
        level: str = "info",
        type: str = "message",
        step: int = 0,
        data: Row | None = None,
    ) -> Row:
        row = {
            "id": new_id("ftevent"),
            "object": "fine_tuning.job.event",
            "created_at": int(time.time()),
            "level": level,
            "message": message,
            "type": type,
            "data": data or {},
        }
        sql = "insert into events (id, job, step, data) values (?, ?, ?, ?)"
        # the job waits for it after each optimizer step, which is done again after a power failure
        self._run(sql, row["id"], job, step, _json(row), durable=type != "metrics")
        return row

    def events(self, job: str, after: int = 0) -> list[tuple[int, Row]]:
        """(number, event) of a job, the oldest first, from the one after a number on."""
        found = self._run("select seq, data from events where job = ? and seq > ? order by seq", job, after)
        return [(seq, json.loads(data)) for seq, data in found]

    def forget_events(self, job: str, step: int) -> None:
        """Drop the metrics of steps after `step`: they will be done again."""
        self._run("delete from events where job = ? and step > ?", job, step)

    def add_checkpoint(self, job: str, step: int, row: Row) -> None:
        self._run(
            "insert or replace into checkpoints (id, job, step, data) values (?, ?, ?, ?)",
            row["id"],
            job,
            step,
            _json(row),
        )

    def checkpoints(self, job: str) -> list[Row]:
        """Of a job, the newest first."""
        found = self._run("select data from checkpoints where job = ? order by step desc", job)
        return [json.loads(data) for (data,) in found]


def _json(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN, such as the loss of a job that diverges: they become null."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_urlsafe(18).replace('-', 'x').replace('_', 'y')}"


def page(rows: Iterable[Row], after: str | None, limit: int) -> tuple[list[Row], bool]:
    """`limit` rows after the one with this id, and whether there are more."""
    rows = list(rows)
    if after is not None:
        at = next((i for i, row in enumerate(rows) if row["id"] == after), -1)
        rows = rows[at + 1 :] if at >= 0 else []
    return rows[:limit], len(rows) > limit
