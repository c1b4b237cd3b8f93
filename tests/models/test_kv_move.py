"""KV cache moves: keys get RoPE of the new position, in layers with RoPE only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.models.batch import Batch, PagedMemory
from logitless.models.gguf.file import GGUFFile
from logitless.models.kv_move import move_cells
from logitless.models.model import Model, define_model, hparams_of
from tests.helpers.architecture_specs import MAPPED, PLAIN
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import SMALL

N = 9


@contextmanager
def opened(path: Path) -> Iterator[tuple[Session, Model, PagedMemory]]:
    """A model with four pages, on one thread."""
    session = Session([CPUBackend(1)])
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        yield session, define_model(session, gguf, h, 64), PagedMemory.define(session, h, 4, (1, 4), "f32", "f32")
    session.close()


def test_keys_without_rope_do_not_turn(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, Spec("smollm3", n_layer=5))
    with opened(path) as (session, model, memory):
        h = model.hparams
        session.write("tables", np.array([[1, 2, 3, 0]], np.int32))
        pos = np.arange(N, dtype=np.int32)
        feeds = {"tokens": pos + 5, "pos": pos, "slot": 0 * pos, "slot_mapping": pos + 16}
        session.run("step", lambda: [model.logits(Batch.feeds(N), memory)], feeds)
        before = [session.read(keys.name).copy() for keys, *_ in memory.full.layers.values()]
        moves = {"from": pos + 16, "to": pos + 32, "turn": np.full(N, 7, np.int32)}
        session.run("moves", lambda: move_cells(h, model.rotary, memory, N), moves)
        for layer, (old, (t, *_)) in enumerate(zip(before, memory.full.layers.values(), strict=True)):
            source, target = old[1, :, :, :N], session.read(t.name)[2, :, :, :N]
            assert np.abs(source).min() > 0
            assert (source.tobytes() == target.tobytes()) == (layer == 3)
            np.testing.assert_allclose((source**2).sum(1), (target**2).sum(1), rtol=1e-5)  # turned, and no longer


@pytest.mark.parametrize(("name", "cache"), [("deepseek2", 0), ("hunyuan-dense", 0), ("deepseek32", 1), ("glm-dsa", 1)])
def test_keys_are_then_those_of_their_new_places(name: str, cache: int, tmp_path: Path) -> None:
    """In the first layer, whose keys do not depend on others: also where a row of all heads is
    kept, of which a part is turned, where keys are normalised when they are turned, and those of an indexer."""
    path = tmp_path / "m.gguf"
    write(path, (PLAIN | MAPPED)[name])
    with opened(path) as (session, model, memory):
        h = model.hparams
        session.write("tables", np.array([[1, 2, 3, 0]], np.int32))
        pos = np.arange(N, dtype=np.int32)

        def keys(first: int) -> np.ndarray:
            feeds = {"tokens": pos + 5, "pos": pos + first, "slot": 0 * pos, "slot_mapping": pos + 16}
            session.run("step", lambda: [model.logits(Batch.feeds(N), memory)], feeds)
            return session.read(memory.full.layers[0][cache].name)[1, :, :, :N].copy()

        wanted, before = keys(7), keys(0)
        moves = {"from": pos + 16, "to": pos + 32, "turn": np.full(N, 7, np.int32)}
        session.run("moves", lambda: move_cells(h, model.rotary, memory, N), moves)
        np.testing.assert_allclose(session.read(memory.full.layers[0][cache].name)[2, :, :, :N], wanted, atol=1e-5)
        assert np.abs(wanted - before).max() > 0.1


def test_layers_have_cells_and_turns_of_their_own(tmp_path: Path) -> None:
    """What was moved is what would have been written there; layers that keep nothing are not
    moved."""
    write(path := tmp_path / "m.gguf", SMALL)
    with opened(path) as (session, model, memory):
        h = model.hparams
        sizes = [(2, 16), (2, 16), (2, 32)] * 2
        assert [(keys.shape[1], keys.shape[2]) for keys, _ in memory.full.layers.values()] == sizes
        assert [(values.shape[1], values.shape[3]) for _, values in memory.full.layers.values()] == sizes
        assert memory.full.nbytes == sum(2 * n * d * 16 * 4 for n, d in sizes)
        session.write("tables", np.array([[1, 2, 3, 0]], np.int32))
        pos = np.zeros(1, np.int32)
        for at, cell in ((pos, 16), (pos + 7, 40)):  # one token, alone in its sequence
            session.write("tables", np.array([[cell // 16] * 4], np.int32))
            feeds = {"tokens": pos + 5, "pos": at, "slot": pos, "slot_mapping": pos + cell}
            session.run("step", lambda: list(model.cache_writes(Batch.feeds(1), memory)), feeds)
        moves = {"from": pos + 16, "to": pos + 48, "turn": pos + 7}
        session.run("moves", lambda: move_cells(h, model.rotary, memory, 1), moves)
        first = memory.full.layers[0]  # deeper ones depend on what else was seen
        for t, at in zip(first, ((2, slice(None), slice(None), 8), (2, slice(None), 8)), strict=True):
            wanted = session.read(t.name)[at]
            moved = session.read(t.name)[(3, *at[1:-1], 0)]
            np.testing.assert_allclose(moved, wanted, atol=1e-5)
            assert np.abs(wanted).max() > 0.1
