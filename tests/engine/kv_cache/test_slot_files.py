"""Slot files: a saved slot is restored to the same bits; damaged files are refused."""

from __future__ import annotations

import os
import resource
import signal
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from logitless.engine.errors import DiskFull, InvalidRequest, NotFound, RequestError
from logitless.engine.kv_cache.slot_files import MAGIC, CacheKind, SlotFileState, load, save

KIND = CacheKind("0123", "f16", "q8_0", 16, 640)
STATE = SlotFileState(
    [5, 1 << 20, *range(31)], [np.random.default_rng(i).integers(0, 256, 640).astype(np.uint8) for i in range(3)]
)


def saved(folder: Path) -> bytes:
    save(folder, "a.bin", KIND, STATE)
    return (folder / "a.bin").read_bytes()


def test_a_round_trip(tmp_path: Path) -> None:
    size = save(tmp_path, "a.bin", KIND, STATE)
    assert size == (tmp_path / "a.bin").stat().st_size
    state, n_read = load(tmp_path, "a.bin", KIND, 33)
    assert n_read == size
    assert state.tokens == STATE.tokens
    assert all(np.array_equal(a, b) for a, b in zip(state.blocks, STATE.blocks, strict=True))
    assert os.listdir(tmp_path) == ["a.bin"]
    save(tmp_path, "a.bin", KIND, SlotFileState([], [], (("ab", 0.1), ("cd", -1e-30))))
    assert load(tmp_path, "a.bin", KIND, 33)[0] == SlotFileState([], [], (("ab", 0.1), ("cd", -1e-30)))


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    data = saved(tmp_path)
    for at in range(0, len(data), 3):
        (tmp_path / "b").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(InvalidRequest, match="'b'"):
            load(tmp_path, "b", KIND, 100)


def test_every_truncated_file_is_noticed(tmp_path: Path) -> None:
    data = saved(tmp_path)
    for n in (*range(200), len(data) // 2, len(data) - 33, len(data) - 1):
        (tmp_path / "b").write_bytes(data[:n])
        with pytest.raises(InvalidRequest, match=r"truncated|not a slot file|damaged"):
            load(tmp_path, "b", KIND, 100)
    (tmp_path / "b").write_bytes(data + b"x")
    with pytest.raises(InvalidRequest, match="damaged"):
        load(tmp_path, "b", KIND, 100)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a slot file"),
        (b"ggsq" + bytes(100), "is not a slot file"),
        (MAGIC + struct.pack("<II", 1, 0), "has version 1, this server reads 2"),
        (MAGIC + struct.pack("<II", 2, 0xFFFFFFFF) + bytes(100_000), "its header cannot be read"),
        (MAGIC + struct.pack("<II", 2, 6) + b"[[[[[[", "its header cannot be read"),
        (MAGIC + struct.pack("<II", 2, 60_000) + b"[" * 60_000, "its header cannot be read"),
        (MAGIC + struct.pack("<II", 2, 4) + b"null", "its header cannot be read"),
        (MAGIC + struct.pack("<II", 2, 2) + b"{}", "another model"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(InvalidRequest, match=reason):
        load(tmp_path, "b", KIND, 100)


def with_header(data: bytes, old: str, new: str) -> bytes:
    """A slot's file with a part of its header replaced."""
    start = len(MAGIC) + 8
    (n_header,) = struct.unpack("<I", data[start - 4 : start])
    header = data[start : start + n_header]
    assert old.encode() in header
    header = header.replace(old.encode(), new.encode())
    return MAGIC + struct.pack("<II", 2, len(header)) + header + data[start + n_header :]


@pytest.mark.parametrize("n_tokens", ["-1", "1e99", "true", '"3"', "null", "NaN", "1073741825"])
def test_wrong_numbers_of_tokens(tmp_path: Path, n_tokens: str) -> None:
    (tmp_path / "b").write_bytes(with_header(saved(tmp_path), '"n_tokens": 33', f'"n_tokens": {n_tokens}'))
    with pytest.raises(InvalidRequest, match=r"header cannot be read|truncated"):
        load(tmp_path, "b", KIND, 100)


@pytest.mark.parametrize("adapters", ["null", "{}", "[1]", '["ab"]', '[["ab"]]', '[["ab", "1"]]', "[[1.0, 1.0]]"])
def test_wrong_adapters(tmp_path: Path, adapters: str) -> None:
    (tmp_path / "b").write_bytes(with_header(saved(tmp_path), '"adapters": []', f'"adapters": {adapters}'))
    with pytest.raises(InvalidRequest, match="header cannot be read"):
        load(tmp_path, "b", KIND, 100)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (replace(KIND, model="0124"), "another model"),
        (replace(KIND, type_k="f32"), "saved with type_k f16, this server has f32"),
        (replace(KIND, type_v="f32"), "saved with type_v q8_0, this server has f32"),
        (replace(KIND, page=32), "saved with page 16, this server has 32"),
        (replace(KIND, page_nbytes=641), "saved with page_nbytes 640"),
    ],
)
def test_cells_of_another_kind(tmp_path: Path, kind: CacheKind, reason: str) -> None:
    saved(tmp_path)
    with pytest.raises(InvalidRequest, match=reason):
        load(tmp_path, "a.bin", kind, 100)


def test_more_tokens_than_a_slot_has(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(InvalidRequest, match="has 33 tokens, a slot of this server 32"):
        load(tmp_path, "a.bin", KIND, 32)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "/etc/passwd",
        "a\\b",
        "a\0b",
        "a\nb",
        ".hidden",
        "c:a",
        "a.",
        "a ",
        "x" * 256,
        "é" * 128,
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="'filename'"):
        save(tmp_path, name, KIND, STATE)
    with pytest.raises(InvalidRequest, match="'filename'"):
        load(tmp_path, name, KIND, 100)
    assert not os.listdir(tmp_path)


def test_name_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(InvalidRequest, match="is not a file"):
            load(tmp_path, name, KIND, 100)
    with pytest.raises(NotFound, match="there is no slot file 'none'"):
        load(tmp_path, "none", KIND, 100)
    with pytest.raises(RequestError, match="cannot write slot file 'folder'"):
        save(tmp_path, "folder", KIND, STATE)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """The system refuses to write more than 1000 bytes to a file."""
    data = saved(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DiskFull, match=r"cannot write slot file 'a\.bin': File too large") as caught:
            save(tmp_path, "a.bin", KIND, replace(STATE, tokens=[7] * 33))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.code == 507
    assert (tmp_path / "a.bin").read_bytes() == data
    assert os.listdir(tmp_path) == ["a.bin"]


def test_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    for name, age in ((".slot-old.tmp", 7200), (".slot-new.tmp", 60), ("other.tmp", 7200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    save(tmp_path, "a.bin", KIND, STATE)
    assert sorted(os.listdir(tmp_path)) == [".slot-new.tmp", "a.bin", "other.tmp"]
