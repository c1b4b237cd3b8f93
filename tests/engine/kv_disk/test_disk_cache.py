"""Disk cache: files of KV blocks are found again, bounded, and never a wrong answer."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from logitless.engine.kv_disk import disk_cache
from logitless.engine.kv_disk.disk_cache import DIGEST, DiskCache, private_folder
from logitless.engine.loading.open_model import demo_model, open_model
from logitless.engine.loading.options import ModelOptions, OptionConflict
from tests.helpers.paths import ROOT

LONG = 30.0  # seconds that no test needs


def block(i: int, nbytes: int = 100) -> disk_cache.Bytes:
    return np.full(nbytes, i, np.uint8)


@contextmanager
def opened(folder: Path, limit: int = 1 << 20, space: bytes = b"s" * 16, **options: Any) -> Iterator[DiskCache]:
    cache = DiskCache(folder, limit, lambda _: space, **options)
    cache.settle(LONG)
    yield cache
    cache.close(LONG)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_blocks_are_found_after_a_restart_by_their_own_space_and_key_only(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "new" / "one")
    with opened(folder) as cache:
        for i in range(3):
            cache.put(b"key%d" % i, block(i, 100 * i))
        assert cache.get(b"key2") is not None  # written or not
        assert cache.drain(LONG)
        assert (cache.n_saved, cache.nbytes) == (3, 300 + 3 * DIGEST)
    with opened(folder) as cache:
        assert [cache.get(b"key%d" % i).tolist() for i in range(3)] == [[i] * 100 * i for i in range(3)]  # type: ignore[union-attr]
        assert (cache.n_restored, cache.nbytes_read, cache.get(b"key3")) == (3, 300, None)
    with opened(folder, space=b"t" * 16) as cache:
        assert b"key1" not in cache
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in files(folder)} == {0o600}
        assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700}


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "flip", "end", "longer", "other key", "other space", "link", "folder"]
)
def test_a_file_that_is_not_the_block_is_a_miss_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with opened(tmp_path) as cache:
        cache.put(b"a", block(1))
        cache.put(b"b", block(2))
    with opened(tmp_path, space=b"t" * 16) as cache:
        cache.put(b"a", block(3))
    path, other, foreign = (tmp_path / (s * 16).hex() / k.hex() for s, k in ((b"s", b"a"), (b"s", b"b"), (b"t", b"a")))
    content = path.read_bytes()
    path.unlink()
    if damage == "link":
        path.symlink_to(other)
    elif damage == "folder":
        path.mkdir()
    else:
        at = {"flip": 50, "end": len(content) - 1}.get(damage, 0)
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        copies = {"cut": content[:-7], "empty": b"", "longer": content + b"\0"}
        copies |= {"other key": other.read_bytes(), "other space": foreign.read_bytes()}
        path.write_bytes(copies.get(damage, changed))
    with caplog.at_level(logging.WARNING), opened(tmp_path) as cache:
        assert [cache.get(b"a"), cache.get(b"a"), b"a" in cache] == [None, None, False]
        assert len(caplog.records) == 1
        assert str(path) in caplog.text
        assert cache.get(b"b") is not None
        if damage != "folder":
            cache.put(b"a", block(1))
    if damage != "folder":
        with opened(tmp_path) as cache:
            assert cache.get(b"a") is not None


@pytest.mark.parametrize(("kind", "message"), [("file", "is not a folder"), ("link", "is not a folder"), ("above", "")])
def test_a_folder_that_is_none_is_one_line_before_weights_are_read(tmp_path: Path, kind: str, message: str) -> None:
    folder = tmp_path / "logitless-kv"
    if kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.write_bytes(b"text")
    path = folder if kind == "above" else tmp_path
    model = open_model(demo_model(), ModelOptions(cache_disk=str(path)))
    with pytest.raises(OptionConflict, match=f"^--cache-disk {path / 'logitless-kv'}: {message}"):
        model.load()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes of POSIX")
def test_a_file_that_others_can_write_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        cache.put(b"a", block(1))
    files(tmp_path)[0].chmod(0o620)
    with opened(tmp_path) as cache:
        assert cache.get(b"a") is None


def test_a_block_without_room_in_memory_is_a_miss_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str) -> None:
        raise MemoryError

    with opened(tmp_path) as cache:
        cache.put(b"a", block(1))
        assert cache.drain(LONG)
        with monkeypatch.context() as patched:
            patched.setattr(disk_cache, "_content", full)
            assert cache.get(b"a") is None
        assert cache.get(b"a") is not None


def test_a_full_disk_loses_the_oldest_files_and_is_written_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, replace = [0.0], os.replace

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level(logging.WARNING), opened(tmp_path, clock=lambda: now[0]) as cache:
        for i in range(20):
            cache.put(b"a%d" % i, block(1))
            assert cache.drain(LONG)
        monkeypatch.setattr(os, "replace", full)
        for i in range(9):
            cache.put(b"b%d" % i, block(i))
        assert cache.drain(LONG)
        assert [len(caplog.records), len(files(tmp_path)), b"b0" in cache] == [1, 18, False]
        assert "No space left on device; --cache-disk-size takes less" in caplog.text
        assert [cache.get(b"a%d" % i) is not None for i in (1, 2)] == [False, True]
        monkeypatch.setattr(os, "replace", replace)
        cache.put(b"c", block(3))  # not yet
        assert cache.drain(LONG)
        now[0] = disk_cache.PAUSE
        cache.put(b"d", block(4))
    assert len(files(tmp_path)) == 19


KILLED = """
import os, signal, sys, numpy
from pathlib import Path
from logitless.engine.kv_disk.disk_cache import DiskCache
at, name = int(sys.argv[2]), sys.argv[3]
real, n = getattr(os, name), 0
def planted(*args, **more):
    global n
    n += 1
    if n == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
cache = DiskCache(Path(sys.argv[1]), 1 << 20, lambda _: b"s" * 16)
cache.settle(30)
setattr(os, name, planted)
for i in range(4):
    cache.put(b"key%d" % i, numpy.full(100, i, numpy.uint8))
cache.close(30)
"""


def test_a_folder_that_somebody_deletes_is_made_again(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    with opened(folder) as cache:
        cache.put(b"a", block(1))
        assert cache.drain(LONG)
        shutil.rmtree(folder)
        assert cache.get(b"a") is None
        cache.put(b"b", block(2))
    assert [path.name for path in files(folder)] == [b"b".hex()]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")
def test_a_killed_process_leaves_whole_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path), "3", "replace"]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert sum(path.suffix == disk_cache.PART for path in files(tmp_path)) == 1
    monkeypatch.setattr("logitless.models.atomic_write.ABANDONED", -1)
    with opened(tmp_path) as cache:
        blocks = [cache.get(b"key%d" % i) for i in range(4)]
        assert [None if data is None else data.tolist() for data in blocks] == [[0] * 100, [1] * 100, None, None]
        cache.put(b"key2", block(2))
    assert len(files(tmp_path)) == 3  # its unfinished file is deleted


def test_the_oldest_go_and_a_prefix_loses_its_end_first(tmp_path: Path) -> None:
    size = 100 + DIGEST
    with opened(tmp_path, 16 * size) as cache:
        for i in range(16):
            cache.put(b"%02d" % i, block(i))
        assert cache.drain(LONG)
        cache.touch([b"00", b"01", b"02"])
        assert cache.drain(LONG)
        for i in range(16, 27):
            cache.put(b"%02d" % i, block(i))
            assert cache.drain(LONG)
            assert cache.nbytes == sum(path.stat().st_size for path in files(tmp_path)) <= 16 * size
        assert [key in cache for key in (b"00", b"03", b"13", b"26")] == [True, False, False, True]
        left = {b"00", b"01", b"02"}
        for i in range(27, 60):
            cache.put(b"%02d" % i, block(i))
            assert cache.drain(LONG)
            left = {key for key in left if key in cache}
            assert left in ({b"00", b"01", b"02"}, {b"00", b"01"}, {b"00"}, set())
        assert not left
        cache.put(b"large", block(0, 16 * size))
        assert cache.drain(LONG)
        assert b"large" not in cache
    with opened(tmp_path, 3 * size) as cache:  # a smaller limit
        cache.put(b"new", block(1))
        assert cache.drain(LONG)
        assert len(files(tmp_path)) <= 3


def test_forgotten_blocks_are_deleted_written_or_not(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        cache.put(b"a", block(1))
        assert cache.drain(LONG)
        cache.put(b"b", block(2))
        cache.forget([b"a", b"b", b"c"])
        assert [key in cache for key in (b"a", b"b")] == [False, False]
        assert cache.drain(LONG)
        cache.put(b"a", block(1))
        assert cache.get(b"a") is not None
        assert cache.drain(LONG)
        assert len(files(tmp_path)) == 1
        cache.switch_off()
        cache.put(b"d", block(1))
        assert [key in cache for key in (b"a", b"d")] == [False, False]


@pytest.mark.parametrize("part", ["space", "_write"])
def test_an_unexpected_error_of_the_thread_is_one_line_and_switches_the_cache_off(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bytes:
        raise KeyError("blk.0")

    if part == "_write":
        monkeypatch.setattr(disk_cache, part, fail)
    cache = DiskCache(tmp_path, 1 << 20, fail if part == "space" else lambda _: b"s" * 16)
    for key in (b"a", b"b"):
        cache.put(key, block(1))
        cache.touch([key])
        cache.forget([b"c"])
        assert cache.drain(LONG)
        assert key not in cache
    cache.close(LONG)
    assert [r.getMessage() for r in caplog.records] == [
        f"--cache-disk {tmp_path} cannot be used: KeyError: 'blk.0'; prompts stay in memory"
    ]


def test_too_much_at_once_is_dropped_but_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_cache, "QUEUE", 250)
    with caplog.at_level(logging.WARNING):
        unknown = threading.Event()
        cache = DiskCache(tmp_path, 1 << 20, lambda _: unknown.wait(LONG) and b"s" * 16)  # type: ignore[arg-type,return-value]
        for i in range(4):
            cache.put(b"%d" % i, block(i))
        assert [b"%d" % i in cache for i in range(4)] == [True, True, False, False]
        cache.put_all([(b"x", lambda: block(1)), (b"y", lambda: block(2))], 0.0)
        assert b"x" not in cache
        assert not cache.drain(0.0)
        unknown.set()
        cache.put_all([(b"%d" % i, lambda i=i: block(i)) for i in range(9)], LONG)  # type: ignore[misc]
        cache.close(LONG)
    assert len(files(tmp_path)) == 9
    assert not caplog.records
    stamps = [(tmp_path / (b"s" * 16).hex() / (b"%d" % i).hex()).stat().st_mtime_ns for i in range(2, 9)]
    assert stamps == sorted(stamps, reverse=True)  # the most useful ones are the last to be deleted


def test_the_end_does_not_wait_for_a_model_that_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "JOIN_SECONDS", 0.0)
    unknown, ended = threading.Event(), threading.Event()
    cache = DiskCache(tmp_path, 1 << 20, lambda _: unknown.wait(LONG) and b"s" * 16)  # type: ignore[arg-type,return-value]
    closer = threading.Thread(target=lambda: (cache.close(LONG), ended.set()))
    closer.start()
    assert ended.wait(LONG / 3)
    unknown.set()
    closer.join()


class Processes(RuleBasedStateMachine):
    """Two processes on one folder, and a dict of what may be found."""

    LIMIT = 12 * (100 + DIGEST)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.put_at: dict[bytes, int] = {}
        self.caches = [self.opened() for _ in range(2)]

    def opened(self) -> DiskCache:
        cache = DiskCache(self.folder, self.LIMIT, lambda _: b"s" * 16)
        cache.settle(LONG)
        return cache

    who = st.integers(0, 1)
    keys = st.integers(0, 19).map(lambda i: b"key%d" % i)

    @rule(who=who, key=keys)
    def put(self, who: int, key: bytes) -> None:
        self.caches[who].put(key, block(key[-1]))
        assert self.caches[who].drain(LONG)
        self.put_at[key] = key[-1]
        data = self.caches[who].get(key)
        # what another process or a test has damaged unseen is a miss, and then it can be put again
        assert data is None or data.tolist() == [key[-1]] * 100
        if data is None:
            self.caches[who].put(key, block(key[-1]))
            assert self.caches[who].get(key) is not None
            assert self.caches[who].drain(LONG)

    @rule(who=who, key=keys)
    def get(self, who: int, key: bytes) -> None:
        data = self.caches[who].get(key)
        assert data is None or (key in self.put_at and data.tolist() == [key[-1]] * 100)

    @rule(who=who, keys=st.lists(keys, max_size=4))
    def touch(self, who: int, keys: list[bytes]) -> None:
        self.caches[who].touch(keys)
        assert self.caches[who].drain(LONG)

    @rule(who=who, key=keys)
    def forget(self, who: int, key: bytes) -> None:
        self.caches[who].forget([key])
        assert self.caches[who].drain(LONG)
        self.put_at.pop(key, None)
        assert all(key not in cache for cache in self.caches)

    @rule(who=who)
    def restart(self, who: int) -> None:
        self.caches[who].close(LONG)
        self.caches[who] = self.opened()

    @precondition(lambda self: self.put_at)
    @rule(data=st.data(), at=st.integers(0, 200), what=st.sampled_from(["cut", "flip", "swap", "delete"]))
    def damage(self, data: Any, at: int, what: str) -> None:
        there = [path for path in files(self.folder) if path.stat().st_size]
        if not there:
            return
        path, other = (data.draw(st.sampled_from(there)) for _ in range(2))
        content = path.read_bytes()
        at %= len(content)
        copies: dict[str, Callable[[], object]] = {
            "cut": lambda: path.write_bytes(content[:at]),
            "flip": lambda: path.write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :]),
            "swap": lambda: path.write_bytes(other.read_bytes()),
            "delete": path.unlink,
        }
        copies[what]()

    @invariant()
    def is_bounded(self) -> None:
        total = sum(path.stat().st_size for path in files(self.folder))
        assert total <= self.LIMIT + self.LIMIT // disk_cache.SLACK + 100 + DIGEST

    @invariant()
    def has_no_unfinished_files(self) -> None:
        assert not [path for path in files(self.folder) if path.suffix == disk_cache.PART]

    def teardown(self) -> None:
        for cache in self.caches:
            cache.close(LONG)
        shutil.rmtree(self.folder)


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
