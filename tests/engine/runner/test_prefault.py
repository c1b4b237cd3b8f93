"""Prefault: pages of the KV cache are present before a step writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.commands.benchmark.bench import greedy
from logitless.engine.batch import UBatch
from logitless.engine.runner import device_store
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.synthetic.model import synthesize

BOOK = Path("/proc/self/pagemap")  # the kernel's own, of which of our pages are there
N_PAGES = 8191  # 8 MiB with the one of rows that fill a step up, which is there from the first step on

pytestmark = pytest.mark.skipif(not BOOK.exists(), reason="the system does not tell what memory is there")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m.gguf"
    synthesize(path, "tiny", "F32")
    monkeypatch.setattr("logitless.engine.runner.model_runner.open_backends", lambda *_: [CPUBackend(1)])
    monkeypatch.setattr(device_store, "LEAD", 3000 * 4096)  # a page takes 1 KiB in each of four caches
    monkeypatch.setattr(device_store, "PIECE", 3 << 20)  # more than a large page
    engine = ModelRunner(path, RunnerOptions(n_ctx=16 * N_PAGES, n_slots=2, n_ubatch=32))
    engine.load()
    yield engine
    engine.close()


def there(engine: ModelRunner, page: int) -> list[bool]:
    """For the keys and the values of each layer, whether the system has given the memory of this page's begin."""
    caches = engine.memory.full.caches
    assert all(cache.nbytes // cache.shape[0] == 1024 for cache in caches)
    found = []
    for cache in caches:
        address = engine.session.buffer(cache, 0).address + 1024 * page  # type: ignore[attr-defined]
        with BOOK.open("rb", buffering=0) as file:
            file.seek(address // 4096 * 8)
            found.append(file.read(8)[7] >= 128)
    return found


def step(engine: ModelRunner, page: int) -> None:
    """A token in the first cell of this page."""
    engine.step(UBatch([5], [0], [0], [16 * page], [0], [greedy()], [-1], tables={0: [page]}))


def test_near_pages_are_faulted_in_and_far_ones_are_not(engine: ModelRunner) -> None:
    assert not any(there(engine, 2500) + there(engine, 5500))
    engine.prepare_ahead()
    assert all(there(engine, 8) + there(engine, 2500) + there(engine, 2999))
    assert not any(there(engine, 5500))  # a large page is 2,048 of these
    step(engine, 2600)
    engine.prepare_ahead()
    assert all(there(engine, 4000) + there(engine, 5500))


def test_it_goes_to_the_end_and_no_further(engine: ModelRunner) -> None:
    step(engine, N_PAGES - 1)
    engine.prepare_ahead()
    assert all(there(engine, N_PAGES - 1) + there(engine, N_PAGES - 200))
    engine.prepare_ahead()


def test_prefault_stops_when_a_request_waits(engine: ModelRunner) -> None:
    looks = []
    engine.prepare_ahead(lambda: bool(looks.append(1)) or len(looks) > 2)
    assert len(looks) == 3
    assert there(engine, 2500) == [True, True, False, False]
    engine.prepare_ahead(lambda: False)
    assert all(there(engine, 2500))


def test_cached_page_stays(engine: ModelRunner) -> None:
    step(engine, 700)
    before = engine.memory.full.read(engine.session, 700)
    assert before.any()
    engine.prepare_ahead()
    np.testing.assert_array_equal(engine.memory.full.read(engine.session, 700), before)


def test_nothing_is_there_to_take_while_the_model_sleeps(engine: ModelRunner) -> None:
    engine.sleep()
    engine.prepare_ahead()
    engine.wake()
    assert not any(there(engine, 2500))
    engine.prepare_ahead()
    assert all(there(engine, 2500))
