"""Host memory for weights: allocations of one slab do not overlap, and unused slabs are freed."""

import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from logitless.backends import system_files
from logitless.backends.host_memory import ALIGNMENT, FILE_SLAB, STATES_SLAB, FileMemory, Slabs, total_memory

MOST_SHARED = STATES_SLAB // 4


def test_slab_memory_is_zeroed_aligned_and_disjoint():
    slabs, rng = Slabs(STATES_SLAB), np.random.default_rng(1)
    sizes = [*rng.integers(1, 1 << 16, 50).tolist(), MOST_SHARED, MOST_SHARED - 1, MOST_SHARED + 1, 1, 3 << 20]
    taken = [slabs.take(size) for size in sizes]
    assert [t.nbytes for t in taken] == sizes
    assert all(t.ctypes.data % ALIGNMENT == 0 for t in taken)
    assert not any(t.any() for t in taken)
    for i, t in enumerate(taken):
        t[:] = i + 1
    assert all((t == i + 1).all() for i, t in enumerate(taken))


def test_slab_is_freed_with_its_last_piece():
    slabs = Slabs(STATES_SLAB)
    first, second = slabs.take(100), slabs.take(100)
    slab = weakref.ref(first.base)
    assert second.base is first.base
    # the last does not fit any more
    rest = [slabs.take(MOST_SHARED) for _ in range(STATES_SLAB // MOST_SHARED)]
    assert rest[-1].base is not first.base
    del rest, first
    assert slab() is not None
    del second
    assert slab() is None


def test_slab_ends_are_filled_with_smaller_pieces():
    slabs = Slabs(STATES_SLAB)
    most = [slabs.take(MOST_SHARED - ALIGNMENT) for _ in range(STATES_SLAB // MOST_SHARED)]
    other = slabs.take(MOST_SHARED)
    assert other.base is not most[0].base
    small = slabs.take(ALIGNMENT)
    assert small.base is most[0].base
    assert slabs.take(MOST_SHARED).base is other.base  # nor is the newer one forgotten


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files are as long as their memory")
def test_weights_share_a_file_of_which_the_disk_has_what_they_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has 1,024 descriptors, a model as many weights."""
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path))
    memory = FileMemory()
    pieces = [memory.take(100_000 + i) for i in range(200)]
    assert all(piece.base is pieces[0].base for piece in pieces)
    assert os.fstat(memory._descriptor).st_blocks * 512 < 2 * 200 * 100_000 < FILE_SLAB
    assert not any(piece.any() for piece in pieces)
    for i, piece in enumerate(pieces):
        assert piece.ctypes.data % ALIGNMENT == 0
        piece[:] = i
    assert [(int(piece.min()), int(piece.max())) for piece in pieces] == [(i, i) for i in range(200)]
    pages = weakref.ref(pieces[0].base)
    del pieces, piece
    assert pages() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "nbytes"),
    [
        ({"memory.max": "1000"}, 1000),
        ({"memory.max": "max"}, None),
        ({"a.slice/memory.max": "2000", "a.slice/b.service/memory.max": "max", "memory.max": "3000"}, 2000),
        (
            {"memory/docker/ab/memory.limit_in_bytes": "9223372036854771712", "memory/memory.limit_in_bytes": "4000"},
            4000,
        ),
        ({"memory.max": "9" * 5000, "a.slice/memory.max": "odd"}, None),
    ],
)
def test_the_least_limit_of_the_control_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], nbytes: int | None
) -> None:
    monkeypatch.setattr(system_files, "ROOT", tmp_path)
    whole = total_memory()
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": "3:memory:/docker/ab\n0::/a.slice/b.service", **groups}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert total_memory() == (nbytes or whole)
