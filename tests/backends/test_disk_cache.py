"""Disk cache: checksums, owners, and a fallback for a folder that cannot be written."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from logitless.backends import disk_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder, with a temporary folder of its own for the fallback."""
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    disk_cache._warn.cache_clear()
    yield tmp_path / "cache"
    disk_cache._warn.cache_clear()


@pytest.fixture
def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder on a disk without space."""
    real = tempfile.NamedTemporaryFile

    def refuse(*args: object, dir: Path, **options: object) -> object:
        if Path(dir).is_relative_to(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, dir=dir, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    return folder


def fallback() -> Path:
    return Path(tempfile.gettempdir()) / f"logitless-{os.getuid()}"


def test_content_comes_back(folder: Path) -> None:
    assert disk_cache.read(folder / "cpu" / "a") == b""
    disk_cache.write(folder / "cpu" / "a", b"code")
    assert disk_cache.read(folder / "cpu" / "a") == b"code"
    assert not fallback().exists()


def test_a_damaged_or_renamed_file_is_missing(folder: Path) -> None:
    path = folder / "cpu" / "a"
    disk_cache.write(path, b"code")
    path.rename(folder / "cpu" / "b")
    assert disk_cache.read(folder / "cpu" / "b") == b""
    disk_cache.write(path, b"code")
    path.write_bytes(b"node" + path.read_bytes()[4:])
    assert disk_cache.read(path) == b""


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_ignored(folder: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        disk_cache.write(folder / "cpu" / name, b"code")
        (folder / "cpu" / name).chmod(mode)
        assert disk_cache.read(folder / "cpu" / name) == b""
    assert caplog.text.count("other users can write them") == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_ignored(folder: Path) -> None:
    disk_cache.write(folder / "cpu" / "a", b"code")
    os.chown(folder / "cpu" / "a", 12345, 12345)
    assert disk_cache.read(folder / "cpu" / "a") == b""


def test_a_folder_that_cannot_be_written_falls_back_with_one_line(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "logitless.cache")
    for name in ("a", "b"):
        disk_cache.write(full / "cpu" / name, name.encode())
        assert disk_cache.read(full / "cpu" / name) == name.encode()
    assert fallback().stat().st_mode & 0o777 == 0o700
    (line,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in line
    assert str(fallback()) in line
    assert "LOGITLESS_CACHE" in line


def test_a_read_only_cache_that_is_filled_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.write(folder / "cpu" / "a", b"baked into an image")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
    assert disk_cache.read(folder / "cpu" / "a") == b"baked into an image"


def test_a_fallback_of_another_user_is_not_used(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    fallback().mkdir()
    fallback().chmod(0o777)
    disk_cache.write(full / "cpu" / "a", b"code")
    assert list(fallback().iterdir()) == []
    assert "every start compiles anew" in caplog.text
    fallback().rmdir()
    fallback().symlink_to(full)
    disk_cache.write(full / "cpu" / "b", b"code")
    assert not (full / "cpu" / "b").exists()


def test_drivers_get_a_folder_that_can_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_cache.writable_folder() == folder
    folder.rmdir()
    folder.write_text("a file in its place")
    assert disk_cache.writable_folder().parent == fallback()
    assert disk_cache.writable_folder().is_dir()


# -- locks


def test_a_lock_is_held_by_one(folder: Path) -> None:
    path = folder / "cpu" / "a"
    with disk_cache.lock(path) as first:
        assert first
        with disk_cache.lock(path, wait=False) as second:
            assert not second
        with disk_cache.lock(folder / "cpu" / "b", wait=False) as other:
            assert other
    with disk_cache.lock(path, wait=False) as again:
        assert again
    assert list((folder / "cpu").iterdir()) == []


def test_waiting_threads_have_the_lock_one_after_the_other(folder: Path) -> None:
    path, inside, most = folder / "cpu" / "a", 0, 0

    def count(_: int) -> None:
        nonlocal inside, most
        with disk_cache.lock(path):
            inside += 1
            most = max(most, inside)
            disk_cache.write(path, b"code")
            inside -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(40)))
    assert most == 1
    assert [file.name for file in (folder / "cpu").iterdir()] == ["a"]


def test_a_folder_without_locks_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with disk_cache.lock(tmp_path / "file" / "a") as held:
        assert held
