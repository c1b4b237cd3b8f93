"""Disk cache: KV blocks that leave host memory, in files that later processes find again.

FOLDER/SPACE/ADDRESS is one file: the bytes of a block, then SHA-256 of the space, the block's key
and those bytes. The space is a hash of all that the bits depend on beside the key
(engine/kv_disk/identity.py), the key one of adapters, cache salt and tokens
(host_cache.chain_key). So a file of another model, place or content is a miss.

A thread writes, behind the steps: to a file of another name, which then takes its own name in one
step. Several processes share a folder. Each deletes the files that were used longest ago when the
folder outgrows the limit."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from logitless.models.atomic_write import sweep

log = logging.getLogger("logitless.cache")

Bytes = npt.NDArray[np.uint8]
DIGEST = 32  # bytes of the checksum that ends a file
PART = ".part"  # end of the name of a file that is not complete
QUEUE = 256 << 20  # bytes that wait for the thread, at most
SLACK = 16  # a sixteenth of the limit is written, or freed, at once
PAUSE = 60.0  # seconds without writing after the disk refused
JOIN_SECONDS = 1.0  # of the end, for what the thread has begun; it may hash a model
FULL = (errno.ENOSPC, errno.EDQUOT)
SPACE = 16  # bytes of a space's hash


class DiskCache:
    """Files of blocks by key. Only `_run` and what it calls belong to the thread.

    Nothing is found before the space is known, which a first start may have to compute."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        space: Callable[[DiskCache], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: bytes of all files. `space`: computes the space's hash, on the thread; OSError: it cannot."""
        self.folder, self.limit = folder, limit
        self.n_saved = self.n_restored = 0  # blocks written and read
        self.nbytes = 0  # of all files, as far as this process knows
        self.nbytes_read = 0
        self._clock, self._space_of = clock, space
        self._space: bytes | None = None
        self._place = folder
        self._changed = threading.Condition()
        # blocks to write, by key: bytes, and the time of the file (0: when it is written)
        self._waiting: OrderedDict[bytes, tuple[Bytes, int]] = OrderedDict()
        self._nbytes_waiting = 0
        self._used: dict[bytes, int] = {}  # keys of blocks that were used, and the times of their files
        self._unwanted: dict[bytes, None] = {}  # keys of blocks to delete
        self._bad: set[bytes] = set()  # keys of files that cannot be read, and perhaps not deleted
        self._n_written = 0  # bytes since the last scan
        self._resumes = 0.0
        self._is_closing = self._is_off = False
        self._is_settled = threading.Event()  # the space is known, or it takes long
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        if key in self._waiting:
            return True
        if self._space is None or self._is_off or key in self._bad or key in self._unwanted:
            return False
        return os.path.exists(self._path(key))

    def put(self, key: bytes, data: Bytes) -> None:
        """Have a block written soon. It is dropped where too much waits already."""
        with self._changed:
            if self._has_room(data):
                self._queue(key, data, 0)

    def put_all(self, blocks: Iterable[tuple[bytes, Callable[[], Bytes]]], seconds: float) -> None:
        """Have blocks written, the most useful first, as many as the disk takes in this time."""
        until, now = self._clock() + seconds, time.time_ns()
        for i, (key, read) in enumerate(blocks):
            if key in self:
                continue
            data = read()
            with self._changed:
                left = max(0.0, until - self._clock())
                if not left or not self._changed.wait_for(lambda data=data: self._has_room(data), left):  # type: ignore[misc]
                    return
                self._queue(key, data, now - i)

    def _has_room(self, data: Bytes) -> bool:
        return not self._waiting or self._nbytes_waiting + data.nbytes <= QUEUE

    def _queue(self, key: bytes, data: Bytes, stamp: int) -> None:
        if self._is_off or self._is_closing or key in self._waiting or data.nbytes + DIGEST > self.limit:
            return
        self._unwanted.pop(key, None)
        self._bad.discard(key)
        self._waiting[key] = data, stamp
        self._nbytes_waiting += data.nbytes
        self._changed.notify_all()

    def _take_from_queue(self, key: bytes) -> bool:
        """Remove a block from the queue; False: it is not there."""
        if (queued := self._waiting.pop(key, None)) is None:
            return False
        self._nbytes_waiting -= queued[0].nbytes
        return True

    def get(self, key: bytes) -> Bytes | None:
        """Bytes of a block; None: there are none. A damaged file is one line in the log."""
        queued = self._waiting.get(key)
        data = queued[0] if queued is not None else self._read(key) if key in self else None
        if data is not None:
            self.n_restored += 1
            self.nbytes_read += data.nbytes
        return data

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark the blocks of a prefix as used now: later ones go before those that they need."""
        now = time.time_ns()
        with self._changed:
            self._used |= {key: now - i for i, key in enumerate(keys)}
            self._changed.notify_all()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Delete blocks, soon; they are found no more."""
        with self._changed:
            for key in keys:
                self._unwanted[key] = None
                self._take_from_queue(key)
            self._changed.notify_all()

    def switch_off(self) -> None:
        """Find and write nothing any more: what this process computes from now on has other bits."""
        with self._changed:
            self._is_off = True
            self._waiting.clear()
            self._nbytes_waiting = 0
            self._changed.notify_all()

    def settle(self, seconds: float) -> None:
        """Wait, so long at most, for the space if it needs no more than what is remembered."""
        self._is_settled.wait(seconds)

    def drain(self, seconds: float) -> bool:
        """Wait until all that was put is on the disk, at most so long; False: it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._unwanted or self._used), seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Write what waits, for so long at most, and end the thread."""
        if not self.drain(seconds) and self._waiting:
            log.warning(
                "%s: %d MiB of prompts could not be written in time", self.folder, self._nbytes_waiting >> 20 or 1
            )
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(JOIN_SECONDS)

    # -- files

    def remembered(self, name: bytes, compute: Callable[[], bytes]) -> bytes:
        """A short value by the hash of what it is computed from, kept beside the blocks. OSError: as of `compute`."""
        path = self.folder / "files" / name.hex()
        with suppress(OSError):
            content = path.read_bytes()
            if len(content) > DIGEST and _checksum(b"", name, content[:-DIGEST]) == content[-DIGEST:]:
                os.utime(path)
                return content[:-DIGEST]
        self._is_settled.set()
        value = compute()
        with suppress(OSError):
            _write(path, value, _checksum(b"", name, value))
        return value

    def _path(self, key: bytes) -> str:
        return f"{self._place}/{key.hex()}"

    def _read(self, key: bytes) -> Bytes | None:
        path = self._path(key)
        try:
            data = _content(path)
            space = self._space
            assert space is not None
            if data is not None and _checksum(space, key, data[:-DIGEST]) == data[-DIGEST:].tobytes():
                return data[:-DIGEST]
            reason = "is damaged, or not of this server"
        except (FileNotFoundError, MemoryError):  # another process has deleted it; there is no room for it
            return None
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        self._bad.add(key)
        log.warning("%s %s: its tokens are computed again", path, reason)
        with suppress(OSError):
            os.unlink(path)
        return None

    # -- on the thread

    def _run(self) -> None:
        try:
            space = self._space_of(self)
            self._place, self._space = self.folder / space.hex(), space
            self._is_settled.set()
            self._scan()
        except Exception as error:
            self._stop(error)
        self._is_settled.set()
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
            except Exception as error:
                self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Go on without files, which the log says: the end must not wait for a thread that is dead."""
        self._refused(error)
        self.switch_off()

    def _turn(self) -> bool:
        """Do what waits, a block at most; False at the end."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closing or self._waiting or self._unwanted or self._used)
            used, self._used = self._used, {}
            unwanted = list(self._unwanted)
            key, queued = next(iter(self._waiting.items()), (b"", None))
            if self._is_closing:
                return False
        if self._is_off:
            return self._done(unwanted, key)
        for old, stamp in used.items():
            with suppress(OSError):
                os.utime(self._path(old), ns=(stamp, stamp))
        for old in unwanted:
            with suppress(OSError):
                os.unlink(self._path(old))
        if queued is not None and self._clock() >= self._resumes:
            try:
                self._save(key, *queued)
            except OSError as error:
                self._resumes = self._clock() + PAUSE
                self._refused(error)
                if error.errno in FULL:  # the disk has less room than the limit
                    with suppress(OSError):
                        self._scan(limit=self.nbytes)
        return self._done(unwanted, key)

    def _done(self, unwanted: list[bytes], key: bytes) -> bool:
        with self._changed:
            for old in unwanted:
                self._unwanted.pop(old, None)
            if not self._take_from_queue(key) and key and not self._is_off:  # forgotten while it was written
                with suppress(OSError):
                    os.unlink(self._path(key))
            self._changed.notify_all()
        return True

    def _save(self, key: bytes, data: Bytes, stamp: int) -> None:
        path, stamp = Path(self._path(key)), stamp or time.time_ns()
        try:
            os.utime(path, ns=(stamp, stamp))  # another process, or this one, has written it
        except FileNotFoundError:
            self._write_new(path, key, data)
            os.utime(path, ns=(stamp, stamp))

    def _write_new(self, path: Path, key: bytes, data: Bytes) -> None:
        size = data.nbytes + DIGEST
        if self.nbytes + size > self.limit or self._n_written > self.limit // SLACK:
            self._scan(size)
        assert self._space is not None
        _write(path, data.data, _checksum(self._space, key, data))
        self.nbytes += size
        self._n_written += size
        self.n_saved += 1

    def _scan(self, more: int = 1, limit: int | None = None) -> None:
        """Count the files of all processes, and delete the oldest if `more` bytes are beyond the limit."""
        limit = self.limit if limit is None else limit
        files: list[tuple[int, int, str]] = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as folders:
            for folder in folders:
                if folder.is_dir(follow_symlinks=False):
                    self._list(folder.path, files)
        total = sum(size for _, size, _ in files)
        if total + more > limit:
            most = limit - limit // SLACK - more
            for _, size, path in sorted(files):
                if total <= most:
                    break
                with suppress(OSError):
                    os.unlink(path)
                total -= size
        self.nbytes, self._n_written = total, 0

    @staticmethod
    def _list(folder: str, files: list[tuple[int, int, str]]) -> None:
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(PART):
                        sweep([Path(entry.path)])
                    elif stat.S_ISREG(status.st_mode):
                        files.append((status.st_mtime_ns, status.st_size, entry.path))

    def _refused(self, error: Exception) -> None:
        reason: object = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            cure = "; --cache-disk-size takes less" if error.errno in FULL else ""
            reason = f"{error.strerror or error}{cure}"
        log.warning("--cache-disk %s cannot be used: %s; prompts stay in memory", self.folder, reason)


def private_folder(path: Path) -> Path:
    """The folder of the caches below `path`, which this user alone can open. OSError: it cannot be made or used."""
    folder = path / "logitless-kv"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
    if hasattr(os, "getuid"):
        if status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
        folder.chmod(0o700)
    return folder


def _content(path: str) -> Bytes | None:
    """A file with its checksum; None: it is too short, or others could have written it."""
    with open(path, "rb", buffering=0, opener=_open_plain) as file:
        status = os.fstat(file.fileno())
        is_ours = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
        if not (stat.S_ISREG(status.st_mode) and is_ours and status.st_size >= DIGEST):
            return None
        data = np.empty(status.st_size, np.uint8)
        n = 0
        while n < data.nbytes and (n_read := file.readinto(data[n:].data)):
            n += n_read
        return data if n == data.nbytes else None


def _open_plain(path: str, flags: int) -> int:
    """An opener that follows no link and waits for no pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _checksum(space: bytes, key: bytes, data: bytes | Bytes) -> bytes:
    digest = sha256(b"logitless kv 1\0%d %d\0" % (len(space), len(key)) + space + key)
    digest.update(data.data if isinstance(data, np.ndarray) else data)
    return digest.digest()


def _write(path: Path, data: bytes | memoryview, checksum: bytes) -> None:
    """Write a file that only the user may read, and give it its name in one step."""
    part = f"{path}.{os.getpid()}-{threading.get_ident()}{PART}"
    for folder in (path.parent.parent, path.parent):  # somebody may have deleted them
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        with open(part, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            for piece in (memoryview(data).cast("B"), memoryview(checksum)):
                while len(piece):
                    piece = piece[file.write(piece) :]
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
