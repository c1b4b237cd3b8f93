"""Record store: uploaded files, fine-tuning jobs, batches, events and checkpoints, in one folder.

Rows are in SQLite, contents in files beside it. Any thread may call, and several processes may
share the folder: a router and its servers do. Every call is one transaction, so that a kill loses
nothing that was written."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from errno import ENOSPC
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar
from weakref import finalize

from logitless.engine.errors import is_full
from logitless.models.atomic_write import open_private, settle, sweep
from logitless.models.vision.images import FileError

log = logging.getLogger("logitless.store")
VERSION = 1
LOCK_TIMEOUT = 5.0  # seconds to wait while another process locks the database
RETRY = 0.02  # seconds between attempts
MEDIA_PURPOSES = ("vision", "user_data")  # of images and sounds
RESERVE = 1 << 18  # bytes of a file that gives way when the disk is full: deleting a row takes some
# SQLite's errors that a full disk may be the reason of
_NO_ROOM = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_ADD_EVENT = "insert into events (id, job, step, data) values (?, ?, ?, ?)"
_SCHEMA = """
create table if not exists files (id text primary key, data text not null, seq integer unique);
create table if not exists jobs (id text primary key, data text not null, seq integer unique);
create table if not exists events (seq integer primary key autoincrement, id text unique, job text, step integer,
    data text not null);
create index if not exists events_of_job on events (job, seq);
create table if not exists checkpoints (seq integer primary key autoincrement, id text unique, job text, step integer,
    data text not null, unique (job, step));
create table if not exists batches (id text primary key, data text not null, seq integer unique);
create table if not exists batch_lines (batch text, line integer, answered integer, data blob not null,
    primary key (batch, line)) without rowid;
"""
Row = dict[str, Any]
T = TypeVar("T")


def _private_folder(folder: Path) -> None:
    """A folder that only the user may enter, also one of an earlier version."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with suppress(OSError):  # another user's
        folder.chmod(0o700)


class Turn:
    """Lock of a store by which one process of several runs a model's jobs. It ends with its process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._close: finalize[[int], Turn] | None = None  # closes the locked file

    @property
    def is_held(self) -> bool:
        return self._close is not None

    def take(self) -> bool:
        """Take the lock unless another process has it; returns whether this one has it now."""
        if self._close is None:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            try:
                from fcntl import LOCK_EX, LOCK_NB, lockf

                lockf(file, LOCK_EX | LOCK_NB)
            except ImportError:  # Windows: nobody else may use the folder
                pass
            except OSError:
                os.close(file)
                return False
            self._close = finalize(self, os.close, file)
        return True

    def close(self) -> None:
        """Give the lock to others."""
        if self._close is not None:
            self._close()
            self._close = None


def event_of(message: str, level: str = "info", type: str = "message", data: Row | None = None) -> Row:
    """A job's event, as OpenAI's API has it."""
    return {
        "id": new_id("ftevent"),
        "object": "fine_tuning.job.event",
        "created_at": int(time.time()),
        "level": level,
        "message": message,
        "type": type,
        "data": data or {},
    }


class Store:
    """Job store in `folder`, which is created if needed. Raises OSError if it cannot be used."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._lock_timeout = LOCK_TIMEOUT
        self._connection: sqlite3.Connection | None = None  # None: the disk has been full so far
        try:
            try:
                self._open()
            except OSError as error:
                if not is_full(error):
                    raise
                self._reserve.unlink(missing_ok=True)
                self._open()
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("%s: the disk is full: files, jobs and batches wait for room", self.folder)
        else:
            self._refill()
            if not self._reserve.exists():
                log.warning("%s: the disk is full", self.folder)

    def _open(self) -> None:
        """Open the database, and create its folders and tables. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = self.folder / "logitless.sqlite"
        database.touch(mode=0o600)  # SQLite's other files get its mode
        for name in ("files", "checkpoints"):
            _private_folder(self.folder / name)
            sweep((self.folder / name).glob("*.part"))  # keeps files that other processes write
        try:
            db = sqlite3.connect(database, check_same_thread=False, isolation_level=None)
            with ExitStack() as undo:
                undo.callback(db.close)
                self._prepare(db)
                names = {id for (id,) in db.execute("select id from files")}
                rows = [json.loads(data) for (data,) in db.execute("select data from checkpoints")]
                undo.pop_all()
        except sqlite3.Error as error:
            raise self._refused(error, getattr(error, "sqlite_errorcode", 0)) from None
        self._connection = db
        names |= {Path(row.get("path", "")).name for row in rows}
        contents = [*(self.folder / "files").iterdir(), *(self.folder / "checkpoints").glob("*@*.gguf")]
        sweep(path for path in contents if path.suffix != ".part" and path.name not in names)

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Create the tables. Raises OSError for a newer version's database."""
        db.execute("pragma journal_mode = wal")
        (version,) = db.execute("pragma user_version").fetchone()
        if version > VERSION:
            raise OSError(f"{self.folder}: was written by a newer version ({version}, this one knows {VERSION})")
        db.executescript(_SCHEMA)
        if version < VERSION:
            db.execute(f"pragma user_version = {VERSION}")
        db.execute("pragma busy_timeout = 0")  # `_do` waits instead

    @property
    def _db(self) -> sqlite3.Connection:
        """The open database. Raises OSError while the disk is full."""
        if self._connection is None:
            self._open()
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    def turn(self, base: str) -> Turn:
        """The lock of the process that runs the jobs of a base model."""
        return Turn(self.folder / f"turn-{blake2b(base.encode(), digest_size=8).hexdigest()}")

    def patient(self) -> Store:
        """Same store for background threads: it waits for other processes without limit."""
        other = copy(self)
        other._lock_timeout = math.inf
        return other

    def _do(self, call: Callable[[], T]) -> T:
        """Run `call` with the database locked for this thread; retry while another process writes."""
        until = time.monotonic() + self._lock_timeout
        while True:
            with self._lock:
                try:
                    return call()
                except sqlite3.Error as error:
                    # 0: an error of the module, such as after `close`
                    code = getattr(error, "sqlite_errorcode", 0)
                    if code & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                        raise self._refused(error, code) from None
            time.sleep(RETRY)

    def _refused(self, error: sqlite3.Error, code: int) -> OSError:
        if code & 0xFF == sqlite3.SQLITE_FULL or (code & 0xFF in _NO_ROOM and self._has_no_room()):
            return OSError(ENOSPC, str(error), str(self.folder))
        return OSError(f"{self.folder}: {error}")

    def _has_no_room(self) -> bool:
        with suppress(OSError):
            return shutil.disk_usage(self.folder).free < RESERVE
        return False

    def _run(self, sql: str, *values: object, durable: bool = True) -> list[tuple[Any, ...]]:
        """Execute one statement.

        `durable`: wait for the disk, so that it survives a power failure."""

        def run() -> list[tuple[Any, ...]]:
            self._db.execute(f"pragma synchronous = {'full' if durable else 'normal'}")
            return self._db.execute(sql, values).fetchall()

        return self._do(run)

    def _run_when_full(self, call: Callable[[], T]) -> T:
        """The same as `_do`, also on a full disk: operations that free space or end a job use the reserve."""
        try:
            return self._do(call)
        except OSError as error:
            if error.errno != ENOSPC:
                raise
        self._reserve.unlink(missing_ok=True)
        try:
            return self._do(call)
        finally:
            self._refill()

    @property
    def _reserve(self) -> Path:
        return self.folder / "reserve"

    def _refill(self) -> None:
        with suppress(OSError):
            if not self._reserve.exists():
                try:
                    with open(self._reserve, "wb", opener=open_private) as file:
                        file.write(bytes(RESERVE))
                except OSError:
                    self._reserve.unlink()
                    raise

    def _delete(self, sql: str, *values: object) -> None:
        def run() -> None:
            self._db.execute("pragma synchronous = full")
            self._db.execute(sql, values)

        self._run_when_full(run)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A durable transaction, all or nothing; the database is locked for this thread."""
        self._db.execute("pragma synchronous = full")
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        finally:
            if self._db.in_transaction:  # else no other transaction could begin
                self._db.execute("rollback")

    # -- files and jobs: rows that change

    def put(self, table: str, row: Mapping[str, Any]) -> None:
        """Insert or replace a row."""
        self._run(
            f"insert into {table} (id, data, seq) values (?, ?, (select coalesce(max(seq), 0) + 1 from {table})) "
            "on conflict (id) do update set data = excluded.data",
            row["id"],
            _json(row),
        )
        self._refill()  # a start on a full disk had no room for it

    def get(self, table: str, id: str) -> Row | None:
        records = self._run(f"select data from {table} where id = ?", id)
        return json.loads(records[0][0]) if records else None

    def change(
        self, table: str, id: str, change: Callable[[Row], Row | None], events: Sequence[Row] = ()
    ) -> Row | None:
        """Replace a row by `change(row)`, atomically across processes, and with it add `events` (of
        `event_of`) of this job: one that has ended has told all.

        Returns None, without a change, if there is no such row or `change` returns None."""

        def run() -> Row | None:
            with self._transaction():
                records = self._db.execute(f"select data from {table} where id = ?", (id,)).fetchone()
                row = change(json.loads(records[0])) if records else None
                if row is not None:
                    self._db.execute(f"update {table} set data = ? where id = ?", (_json(row), id))
                    values = [(event["id"], id, 0, _json(event)) for event in events]
                    self._db.executemany(_ADD_EVENT, values)
            return row

        return self._run_when_full(run)

    @property
    def version(self) -> int:
        """Number that changes whenever another process has written."""
        return int(self._run("pragma data_version")[0][0])

    def all(self, table: str) -> list[Row]:
        """All rows, the newest first."""
        return [json.loads(data) for (data,) in self._run(f"select data from {table} order by seq desc")]

    def delete(self, table: str, id: str) -> None:
        self._delete(f"delete from {table} where id = ?", id)

    def delete_files(self, ids: Collection[str], batch: str = "") -> None:
        """Delete files, and a batch with them: first all rows at once, so that a kill leaves no row without
        its content; `_open` sweeps contents without a row. A full disk has room once the contents are cut."""

        def run() -> None:
            with self._transaction():
                self._db.executemany("delete from files where id = ?", [(id,) for id in ids])
                self._db.execute("delete from batches where id = ?", (batch,))

        paths = [self.file_path(id) for id in ids]
        try:
            self._run_when_full(run)
        except OSError as error:
            if not is_full(error):
                raise
            for path in paths:
                with suppress(FileNotFoundError):
                    os.truncate(path, 0)
            self._do(run)
        for path in paths:
            path.unlink(missing_ok=True)
        self._refill()

    def media_path(self, id: str, may_see: Callable[[Row], bool]) -> Path:
        """Content of an uploaded image or sound. FileError: there is none that the client `may_see`."""
        row = self.get("files", id)
        if row is None or not may_see(row):
            raise FileError("does not exist")
        if row["purpose"] not in MEDIA_PURPOSES:
            raise FileError(f"has the purpose {row['purpose']}: media have {' or '.join(MEDIA_PURPOSES)}")
        return self.file_path(id)

    def file_path(self, id: str) -> Path:
        return self.folder / "files" / id

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """Temporary path for an incoming file, removed at the end of the block unless `keep_file` moved it."""
        part = self.file_path(f"{new_id('file')}.part")
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)

    def add_file(self, content: bytes, filename: str, purpose: str, owner: str = "") -> Row:
        """Store a small file from memory."""
        with self.incoming() as part:
            with open(part, "wb", opener=open_private) as file:
                file.write(content)
            return self.keep_file(part, filename, purpose, owner)

    def keep_file(self, part: Path, filename: str, purpose: str, owner: str = "", *, id: str = "") -> Row:
        """Store the file at an `incoming` path; it is flushed to disk before its row is written.

        `owner`: who may see it; "": everybody. `id`: of its own; a file of this id is replaced."""
        row: Row = {
            "id": id or new_id("file"),
            "object": "file",
            "bytes": part.stat().st_size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
            "owner": owner,
        }
        path = self.file_path(row["id"])
        settle(part, path)
        try:
            self.put("files", row)
        except OSError:
            path.unlink()
            raise
        return row

    # -- lines of batches: answers that never change

    def add_lines(self, batch: str, lines: Iterable[tuple[int, bool, bytes]]) -> None:
        """Keep answers as (line, True if it is no error, text), all or none; a line that is there stays."""
        rows = [(batch, line, answered, text) for line, answered, text in lines]

        def run() -> None:
            with self._transaction():
                self._db.executemany("insert or ignore into batch_lines values (?, ?, ?, ?)", rows)

        self._do(run)

    def lines_done(self, batch: str) -> set[int]:
        """Numbers of the lines that have an answer."""
        return {line for (line,) in self._run("select line from batch_lines where batch = ?", batch)}

    def count_lines(self, batch: str) -> tuple[int, int]:
        """Lines with an answer, and lines with an error."""
        sql = "select coalesce(sum(answered), 0), coalesce(sum(1 - answered), 0) from batch_lines where batch = ?"
        ((n_answered, n_failed),) = self._run(sql, batch)
        return n_answered, n_failed

    def lines(self, batch: str, answered: Collection[bool]) -> Iterator[bytes]:
        """Texts of the lines of these kinds, in order."""
        last = -1
        sql = "select line, answered, data from batch_lines where batch = ? and line > ? order by line limit 1000"
        while records := self._run(sql, batch, last):
            yield from (data for _, kind, data in records if bool(kind) in answered)
            last = records[-1][0]

    def forget_lines(self, batch: str) -> None:
        self._delete("delete from batch_lines where batch = ?", batch)

    # -- events and checkpoints: append-only rows

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
        row = event_of(message, level, type, data)
        # the job waits for metrics after each optimizer step; a power failure repeats the step
        # anyway
        self._run(_ADD_EVENT, row["id"], job, step, _json(row), durable=type != "metrics")
        return row

    def events(self, job: str, after: int = 0) -> list[tuple[int, Row]]:
        """Events of a job as (number, event), the oldest first, with numbers greater than `after`."""
        records = self._run("select seq, data from events where job = ? and seq > ? order by seq", job, after)
        return [(seq, json.loads(data)) for seq, data in records]

    def forget_events(self, job: str, step: int) -> None:
        """Delete the metrics of steps after `step`, which will be repeated."""
        self._delete("delete from events where job = ? and step > ?", job, step)

    def add_checkpoint(self, job: str, step: int, row: Row) -> None:
        self._run(
            "insert or replace into checkpoints (id, job, step, data) values (?, ?, ?, ?)",
            row["id"],
            job,
            step,
            _json(row),
        )

    def forget_checkpoints(self, job: str, paths: Collection[str]) -> None:
        """Delete the rows of the checkpoints with these paths."""
        for row in self.checkpoints(job):
            if row["path"] in paths:
                self._delete("delete from checkpoints where id = ?", row["id"])

    def checkpoints(self, job: str) -> list[Row]:
        """Checkpoints of a job, the newest first."""
        records = self._run("select data from checkpoints where job = ? order by step desc", job)
        return [json.loads(data) for (data,) in records]


def _json(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace infinity and NaN by None (null in JSON), such as the loss of a diverging job."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_urlsafe(18).replace('-', 'x').replace('_', 'y')}"


def page(rows: Iterable[Row], after: str | None, limit: int) -> tuple[list[Row], bool]:
    """Page of `limit` rows after the one with id `after`; returns (rows, True if there are more)."""
    rows = list(rows)
    if after is not None:
        at = next((i for i, row in enumerate(rows) if row["id"] == after), -1)
        rows = rows[at + 1 :] if at >= 0 else []
    return rows[:limit], len(rows) > limit
