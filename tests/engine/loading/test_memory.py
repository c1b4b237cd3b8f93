"""KV cache size estimate against the allocated pools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from logitless.engine.kv_cache.host_cache import HostCache
from logitless.engine.kv_cache.manager import KVCacheManager
from logitless.engine.loading.memory import cache_bytes
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from tests.helpers.architecture_specs import MAPPED, PLAIN
from tests.helpers.reference_model import write


@pytest.mark.parametrize("name", ["arch-gemma3-F32", "arch-gemma2-F32", "arch-llama-gqa-F32", "deepseek4"])
@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("n_ctx", [64, 4096])
def test_it_is_what_the_engine_takes(shared_data: Path, tmp_path: Path, name: str, n_ctx: int, swa_full: bool) -> None:
    path = shared_data / "models" / f"{name}.gguf"
    if name in MAPPED:
        write(path := tmp_path / "m.gguf", MAPPED[name])
    engine = ModelRunner(path, RunnerOptions(n_ctx, n_slots=2, n_ubatch=32, threads=1, swa_full=swa_full))
    taken = sum(cache.nbytes for pool in engine.memory.pools for cache in pool.caches)
    spare = sum(pool.nbytes for pool in engine.memory.pools)
    assert (len(engine.memory.pools) == 2) == (n_ctx == 4096 and not swa_full and name != "arch-llama-gqa-F32")
    engine.close()
    with GGUFFile.open(path) as gguf:
        counted = cache_bytes(
            hparams_of(gguf), "f16", "f16", n_slots=2, n_ubatch=32, n_checkpoints=2, swa_full=swa_full
        )
    assert counted.of(n_ctx) == taken - spare


@pytest.mark.parametrize("swa_full", [False, True])
def test_most_is_what_there_is_room_for(shared_data: Path, swa_full: bool) -> None:
    with GGUFFile.open(shared_data / "models" / "arch-gemma3-F32.gguf") as gguf:
        counted = cache_bytes(
            hparams_of(gguf), "f16", "q8_0", n_slots=2, n_ubatch=32, n_checkpoints=2, swa_full=swa_full
        )
    for room in (counted.of(10), counted.of(500) - 1, counted.of(100_000)):
        assert counted.of(counted.most(room)) <= room < counted.of(counted.most(room) + 1)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "falcon-h1"])
def test_only_layers_that_attend_have_cells(name: str, tmp_path: Path) -> None:
    """Of three to five layers none, one and all; what is taken ahead of use and host memory's share can be nothing."""
    write(path := tmp_path / "m.gguf", replace(PLAIN[name], n_vocab=512, vocabulary=True))
    engine = ModelRunner(path, RunnerOptions(256, n_slots=2, n_ubatch=32, threads=1))
    engine.load()
    engine.prepare_ahead()
    attending = {"mamba2": 0, "nemotron_h": 1, "falcon-h1": 3}[name]
    assert engine.full_kv.nbytes == attending * 2 * 2 * 2 * 32 * 16  # keys and values, heads, f16, elements, positions
    cache = KVCacheManager(engine.full_kv.n, engine.full_kv, HostCache(1 << 20), n_slots=2, states=engine.states)
    cache.prepare_ahead(lambda: False)
    counted = cache_bytes(engine.hparams, "f16", "f16", n_slots=2, n_ubatch=32, n_checkpoints=2, swa_full=False)
    assert counted.of(256) == 16 * engine.full_kv.nbytes
    assert counted.most(1 << 20) >= (1 << 20) // max(1, counted.cell)
    engine.close()
