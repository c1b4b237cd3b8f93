"""What is kept of a token in multi-head latent attention, and what its first files leave unsaid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.cpu.backend import CPUBackend
from graph.session import Session
from graph.tensor import feed
from models.batch import PagedMemory
from models.expert_params import read_experts
from models.gguf_file import GGUFFile
from models.keys import Keys
from models.model import hparams_of
from server.engine import Engine, EngineOptions
from tests.models.latent_specs import DEEPSEEK, LATENT
from tests.models.reference_model import plain, reference, write
from tests.models.test_architectures import KV, compute, error, no_window, tokens


@pytest.mark.parametrize("kind", KV)
def test_rows_of_all_heads_in_caches(tmp_path: Path, kind: str) -> None:
    """One cache holds them; what they are turned by is 32 elements here."""
    s = replace(DEEPSEEK, keys=DEEPSEEK.keys | {"rope.dimension_count": 32, "attention.key_length_mla": 64})
    t, ids = write(path := tmp_path / "m.gguf", s), tokens(s)
    whole, *others = (compute(path, s, ids, cut, (kind, kind)) for cut in ((40,), (1,) * 40, (7, 20, 13), (33, 7)))
    for other in others:
        np.testing.assert_array_equal(whole, other)
    error_of_type = {"f32": 1e-4, "f16": 1e-2, "q8_0": 0.3}[kind]
    assert error(whole, reference(s, t, ids, plain(s), no_window, s.d**-0.5, (0, 0))) < error_of_type


@pytest.mark.parametrize("name", ["deepseek2", "deepseek2 together", "minicpm3", "plm"])
def test_a_row_is_kept_of_a_token_and_nothing_else(name: str, tmp_path: Path) -> None:
    """32 elements and 8 that are turned in each layer, whether the file has heads' weights apart or not."""
    write(path := tmp_path / "m.gguf", LATENT[name])
    session = Session([CPUBackend(1)])
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        memory = PagedMemory.define(session, h, 5, (1, 4), "f16", "f32")
        assert memory.page_nbytes == 16 * h.n_layer * 2 * (32 + 8)
        session.run(
            "copy", lambda: memory.copied(feed("pairs", (1, 2), "i32")), {"pairs": np.array([[0, 1]], np.int32)}
        )
    session.close()


def test_pages_come_back(tmp_path: Path) -> None:
    """What a server writes into a file or the host's memory."""
    write(path := tmp_path / "m.gguf", DEEPSEEK)
    engine = Engine(path, EngineOptions(n_ctx=64, n_slots=1, n_ubatch=16))
    engine.load()
    page = np.random.default_rng(1).integers(0, 100, engine.page_nbytes).astype(np.uint8)
    engine.write_page(1, page)
    assert engine.page_nbytes == 16 * 3 * 2 * 40
    assert engine.read_page(1).tobytes() == page.tobytes()
    engine.close()


@pytest.mark.parametrize(("n_vocab", "n_layer", "gating"), [(154880, 47, "sigmoid"), (154880, 60, "softmax")])
def test_the_first_files_of_glm_4_7_flash_do_not_say_how_experts_are_chosen(
    n_vocab: int, n_layer: int, gating: str
) -> None:
    said = {"expert_count": 64, "expert_used_count": 4, "expert_feed_forward_length": 1536, "block_count": n_layer}
    experts = read_experts(Keys({f"deepseek2.{key}": value for key, value in said.items()}, "deepseek2", "f"), n_vocab)
    assert experts is not None
    assert experts.gating == gating
