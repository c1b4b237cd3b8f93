"""Last layer: queries only for rows with logits; a prefill-only batch ends with its KV cache writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import scaled
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor
from logitless.models.batch import Batch, Cached, PagedMemory
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, exposes_layers, hparams_of
from tests.helpers.architecture_specs import PLAIN
from tests.helpers.reference_model import write
from tests.models.architectures.test_gemma3n import SHORT_3N, SMALL

Array = np.ndarray[Any, Any]
TABLES = np.array([[3, 1], [0, 2]], np.int32)
POS = np.array([*range(20), *range(9)], np.int32)  # two sequences, one over more than a page
SLOT = np.array([0] * 20 + [1] * 9, np.int32)
TOKENS = np.random.default_rng(5).integers(3, 400, len(POS)).astype(np.int32)
CELLS = TABLES[SLOT, POS // 16] * 16 + POS % 16
SEEN = {"tokens": TOKENS, "pos": POS, "slot": SLOT, "slot_mapping": CELLS}
ARCHITECTURES = ("llama-gqa-F32", "llama-gqa-Q4_K_M", "gemma2-F32", "gemma3-F32", "qwen3", "gemma4", "gemma3n", "deci")
MADE_UP = {"gemma4": SMALL, "gemma3n": SHORT_3N, "deci": PLAIN["deci"], "qwen3": PLAIN["qwen3"]}


class Tiny:
    def __init__(self, path: Path) -> None:
        self.gguf = GGUFFile.open(path)
        self.session, h = Session([CPUBackend(1)]), hparams_of(self.gguf)
        self.model = define_model(self.session, self.gguf, h, 64)
        self.memory = PagedMemory.define(self.session, h, 5, (2, 2), "f32", "f32")
        self.session.write("tables", TABLES)

    def run(self, fetches: list[Tensor], feeds: dict[str, Array]) -> list[Array]:
        return [value.copy() for value in self.session.plan(lambda: fetches).run(feeds)]

    def close(self) -> None:
        self.session.close()
        self.gguf.close()


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, shared_data: Path, tmp_path: Path) -> Any:
    path = shared_data / "models" / f"arch-{request.param}.gguf"
    if request.param in MADE_UP:  # whose last layers keep nothing
        write(path := tmp_path / "m.gguf", replace(MADE_UP[request.param], n_vocab=400))
    made = Tiny(path)
    yield made
    made.close()


@pytest.mark.parametrize("ids", [[19, 28], [4], [28, 0, 19, 19], list(range(29))[::-1]], ids=str)
def test_rows_that_ask_alone_get_the_bits_that_they_get_among_all(tiny: Tiny, ids: list[int]) -> None:
    (all_logits,) = tiny.run([tiny.model.logits(Batch.feeds(len(POS)), tiny.memory)], SEEN)
    out = np.array(ids, np.int32)
    feeds = {**SEEN, "out": out, "out.pos": POS[out], "out.slot": SLOT[out]}
    (logits,) = tiny.run([tiny.model.logits(Batch.feeds(len(POS), len(ids)), tiny.memory)], feeds)
    assert np.abs(all_logits).max() > 0.1
    assert logits.tobytes() == all_logits[out].tobytes()


def test_a_batch_without_logits_leaves_the_same_cache(tiny: Tiny) -> None:
    def cache() -> list[bytes]:
        pages = [tiny.memory.full.read(tiny.session, page).tobytes() for page in range(4)]
        for page in range(4):
            tiny.memory.full.write(tiny.session, page, np.zeros(tiny.memory.full.nbytes, np.uint8))
        return pages

    batch = Batch.feeds(len(POS))
    tiny.run([tiny.model.logits(batch, tiny.memory)], SEEN)
    remembered = cache()
    stores = list(tiny.model.cache_writes(batch, tiny.memory))
    tiny.run(stores, SEEN)
    assert cache() == remembered
    assert any(any(page) for page in remembered)
    attentions = [t for t in toposort(stores) if t.op == "attention"]
    assert len(attentions) == len(tiny.memory.full.layers) - 1


def test_layer_inputs_run_from_the_embeddings_to_the_final_norm(tiny: Tiny) -> None:
    model, h = tiny.model, tiny.model.hparams
    assert exposes_layers(h) == (h.arch != "gemma3n")
    if not exposes_layers(h):
        return
    batch, inputs = Batch.feeds(len(POS)), list[Tensor]()
    hidden = model.hidden(batch, Cached(tiny.memory, batch), inputs)
    normed = model.weights.norm("output_norm", inputs[-1], h)
    embedded = scaled(model.weights.embedding(batch.tokens), h.embedding_scale)
    found = tiny.run([hidden, normed, inputs[0], embedded, *inputs[1:]], SEEN)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])
    assert len(inputs) == h.n_layer + 1
    assert not np.array_equal(found[3], found[-1])
