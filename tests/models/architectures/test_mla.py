"""MLA: the cached row of each token, and metadata keys that early files lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.execution.session import Session
from logitless.graph.tensor import feed
from logitless.models.batch import PagedMemory
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.keys import Keys
from logitless.models.hparams.moe import read_experts
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.quantize import dequantized
from logitless.training.save import save_result
from logitless.training.trainable import full
from tests.helpers.mla_specs import DEEPSEEK, LATENT
from tests.helpers.reference_model import reference, write
from tests.helpers.reference_rope import plain
from tests.models.architectures.test_registry import compute, error, no_window, tokens


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_rows_of_all_heads_in_caches(tmp_path: Path, kind: str) -> None:
    """One cache holds them; what they are turned by is 32 elements where blocks need as many."""
    turned_by_32 = {"rope.dimension_count": 32, "attention.key_length_mla": 64}
    s = replace(DEEPSEEK, keys=DEEPSEEK.keys | turned_by_32) if kind == "q8_0" else DEEPSEEK
    t, ids = write(path := tmp_path / "m.gguf", s), tokens(s)
    whole, *others = (compute(path, s, ids, cut, (kind, kind)) for cut in ((40,), (1,) * 40, (7, 20, 13), (33, 7)))
    for other in others:
        np.testing.assert_array_equal(whole, other)
    error_of_type = {"f32": 1e-4, "f16": 1e-2, "q8_0": 0.6}[kind]
    assert error(whole, reference(s, t, ids, plain(s), no_window, s.d**-0.5, (0, 0))) < error_of_type


@pytest.mark.parametrize("name", ["deepseek2", "deepseek2 together", "minicpm3", "plm"])
def test_a_row_is_kept_of_a_token_and_nothing_else(name: str, tmp_path: Path) -> None:
    """32 elements and 8 that are turned in each layer, whether the file has heads' weights apart or
    not."""
    write(path := tmp_path / "m.gguf", LATENT[name])
    session = Session([CPUBackend(1)])
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        memory = PagedMemory.define(session, h, 5, (1, 4), "f16", "f32")
        assert memory.full.nbytes == 16 * h.n_layer * 2 * (32 + 8)
        session.run(
            "copy", lambda: memory.full.copied(feed("pairs", (1, 2), "i32")), {"pairs": np.array([[0, 1]], np.int32)}
        )
    session.close()


def test_pages_come_back(tmp_path: Path) -> None:
    """What a server writes into a file or the host's memory."""
    write(path := tmp_path / "m.gguf", DEEPSEEK)
    engine = ModelRunner(path, RunnerOptions(n_ctx=64, n_slots=1, n_ubatch=16))
    engine.load()
    page = np.random.default_rng(1).integers(0, 100, engine.full_kv.nbytes).astype(np.uint8)
    engine.full_kv.write(1, page)
    assert engine.full_kv.nbytes == 16 * 3 * 2 * 40
    assert engine.full_kv.read(1).tobytes() == page.tobytes()
    engine.close()


@pytest.mark.parametrize(("n_vocab", "n_layer", "gating"), [(154880, 47, "sigmoid"), (154880, 60, "softmax")])
def test_the_first_files_of_glm_4_7_flash_do_not_say_how_experts_are_chosen(
    n_vocab: int, n_layer: int, gating: str
) -> None:
    said = {"expert_count": 64, "expert_used_count": 4, "expert_feed_forward_length": 1536, "block_count": n_layer}
    experts = read_experts(Keys({f"deepseek2.{key}": value for key, value in said.items()}, "deepseek2", "f"), n_vocab)
    assert experts is not None
    assert experts.router == gating


@pytest.mark.parametrize("patterns", [("*",), ("*.attn_v_b.weight",)])
def test_a_matrix_of_keys_and_values_is_saved_as_it_was(patterns: tuple[str, ...], tmp_path: Path) -> None:
    """In the graph it is two, of which one has columns as rows. What was trained of it comes back
    where it was."""
    write(path := tmp_path / "m.gguf", LATENT["deepseek2 together"])
    session, name = Session([CPUBackend(1)]), "blk.1.attn_kv_b.weight"
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        trained = full(session, define_model(session, gguf, h, 64), gguf, h, patterns)
        save_result(tmp_path / "same.gguf", trained, gguf, h)
        values = {key: value + 1 if "attn_v_b" in key else value for key, value in trained.read().items()}
        trained.write(values)
        save_result(tmp_path / "other.gguf", trained, gguf, h)
        before, same, other = (numbers(file, name) for file in (path, tmp_path / "same.gguf", tmp_path / "other.gguf"))
    np.testing.assert_array_equal(same, before)
    heads = (other - before).reshape(4, 48, 32)  # 32 rows of keys, 16 of values
    np.testing.assert_array_equal(heads[:, :32], 0)
    np.testing.assert_allclose(heads[:, 32:], 1, atol=1e-6)
    session.close()


def numbers(path: Path, name: str) -> np.ndarray:
    with GGUFFile.open(path) as gguf:
        return dequantized(gguf.tensors[name], gguf.bytes_of(name)).copy()


@pytest.mark.parametrize("dtype", ["q4_0", "q8_0", "f16", "bf16"])
def test_keys_of_any_type_are_turned_round(dtype: str, tmp_path: Path) -> None:
    """As close to the file's numbers as 8 bits are, or as what the file has."""
    spec = replace(LATENT["minicpm3"], types={"attn_kv_b": dtype})
    t = write(path := tmp_path / "m.gguf", spec)
    want = reference(spec, t, ids := tokens(spec), plain(spec), no_window, spec.d**-0.5, (0, 0))
    assert error(compute(path, spec, ids), want) < 0.05
