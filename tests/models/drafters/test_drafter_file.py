"""Files of drafters that do not fit: one line that names the key, the tensor or the file."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions, OptionConflict
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.drafters.drafter_file import drafter_kind
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from tests.helpers.architecture_specs import MAPPED
from tests.helpers.drafter_files import write_dflash, write_eagle3, write_gemma4_assistant
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import SMALL as GEMMA4

SIZES: dict[str, Any] = {"n_layer": 3, "n_vocab": 400, "n_ctx_train": 256, "vocabulary": True}
MODEL = Spec("llama", untied=True, **SIZES)
IDS = np.arange(0, 400, 2)
HEAD = np.ones((200, 64))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write(path := tmp_path_factory.mktemp("model") / "m.gguf", MODEL)
    return path


def refusal(model: Path, drafter: Path, **options: Any) -> str:
    with pytest.raises((ModelFileError, OptionConflict)) as error:
        open_model(model, ModelOptions(model_draft=str(drafter), device="cpu", **options))
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("keys", "tensors", "line"),
    [
        ({"target_hidden_size": 32}, {}, "key 'eagle3.target_hidden_size' is 32, the model's embedding_length is 64"),
        ({"target_layers": [0, 1, 4]}, {}, "key 'eagle3.target_layers' is [0, 1, 4], the model has 3 layers"),
        ({"target_layers": [0, 1]}, {}, "key 'eagle3.target_layers' has 2 layers, expected 3"),
        ({"target_layers": None}, {}, "key 'eagle3.target_layers' is missing"),
        ({"target_layers": 1}, {}, "key 'eagle3.target_layers' is not a list of layers"),
        ({"block_count": 2}, {}, "key 'eagle3.block_count' is 2: eagle3 has one block"),
        ({"norm_before_fc": True}, {}, "tensor 'enc.output_norm.weight' is missing"),
        ({}, {"fc.weight": None}, "tensor 'fc.weight' is missing"),
        ({}, {"fc.weight": np.ones((64, 64))}, "tensor 'fc.weight' has shape (64, 64), expected (64, 192)"),
        ({}, {"markov_w1.weight": np.ones((400, 8))}, "tensor 'markov_w1.weight' is unknown in eagle3 with 1 blocks"),
        ({}, {"d2t": IDS}, "tensor 'output.weight' is missing"),
        ({}, {"d2t": IDS, "output.weight": np.ones((400, 64))}, "expected (200, 64)"),
        ({}, {"d2t": IDS + 2, "output.weight": HEAD}, "tensor 'd2t' does not map to tokens 0 to 399, each once"),
        ({}, {"d2t": IDS // 4, "output.weight": HEAD}, "tensor 'd2t' does not map to tokens 0 to 399, each once"),
        ({}, {"d2t": HEAD[:, 0], "output.weight": HEAD}, "tensor 'd2t' is f32 (200,), expected whole numbers"),
        ({}, {"token_embd.weight": np.ones((300, 64))}, "tensor 'token_embd.weight' has shape (300, 64), expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_drafter_that_does_not_fit_is_refused(
    model: Path, tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], line: str
) -> None:
    write_eagle3(path := tmp_path / "d.gguf", MODEL, keys, **tensors)
    assert line in refusal(model, path)


@pytest.mark.parametrize(
    ("keys", "tensors", "line"),
    [
        ({"tokenizer.ggml.mask_token_id": None}, {}, "key 'tokenizer.ggml.mask_token_id' is None, expected a token"),
        ({"tokenizer.ggml.mask_token_id": 400}, {}, "key 'tokenizer.ggml.mask_token_id' is 400, expected a token"),
        ({"block_size": 1}, {}, "key 'dflash.block_size' is 1; at least 2 is possible"),
        ({"embedding_length": 32}, {}, "key 'dflash.embedding_length' is 32, the model's is 64"),
        ({"target_layers": [4]}, {}, "key 'dflash.target_layers' is [4], the model has 3 layers"),
        ({}, {"enc.output_norm.weight": None}, "tensor 'enc.output_norm.weight' is missing"),
        ({}, {"blk.1.attn_q_norm.weight": None}, "tensor 'blk.1.attn_q_norm.weight' is missing"),
        ({}, {"markov_w1.weight": HEAD}, "tensor 'markov_w1.weight' is unknown in dflash with 2 blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dflash_drafter_that_does_not_fit_is_refused(
    model: Path, tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], line: str
) -> None:
    write_dflash(path := tmp_path / "d.gguf", MODEL, keys, embedding=np.ones((400, 64)), **tensors)
    assert line in refusal(model, path)


@pytest.mark.parametrize(
    ("keys", "tensors", "line"),
    [
        ({"embedding_length_out": 32}, {}, "key 'gemma4-assistant.embedding_length_out' is 32, the model's"),
        ({"embedding_length_out": None}, {}, "key 'gemma4-assistant.embedding_length_out' is missing"),
        (
            {"attention.head_count_kv": 1},
            {},
            "block 0 reads 1 sliding-window heads of 16, layer 4 of the model has 2 sliding-window heads of 16",
        ),
        ({}, {"nextn.pre_projection.weight": None}, "tensor 'nextn.pre_projection.weight' is missing"),
        ({}, {"blk.0.attn_k.weight": HEAD}, "tensor 'blk.0.attn_k.weight' is unknown in gemma4-assistant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gemma4_assistant_that_does_not_fit_is_refused(
    tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], line: str
) -> None:
    spec = replace(GEMMA4, n_vocab=400, vocabulary=True)
    embedding = write(model := tmp_path / "m.gguf", spec)["token_embd.weight"]
    write_gemma4_assistant(path := tmp_path / "d.gguf", spec, embedding, keys, **tensors)
    assert line in refusal(model, path)


def test_gemma4_assistant_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    spec = replace(GEMMA4, n_vocab=400)
    write_gemma4_assistant(path := tmp_path / "d.gguf", spec, np.ones((400, 64)))
    assert "layer 1 of the model has 2 full-attention heads of 16" in refusal(model, path)


def test_drafter_of_another_vocabulary_or_kind_is_refused(model: Path, tmp_path: Path) -> None:
    write_eagle3(path := tmp_path / "d.gguf", replace(MODEL, n_vocab=401))
    assert "token 400" not in refusal(model, path)  # its embedding is the model's: as many rows
    write_eagle3(path, replace(MODEL, n_vocab=600))
    assert refusal(model, path).endswith("its vocabulary has 600 tokens, the model's has 400")
    write_eagle3(path, MODEL)
    for kind in ("draft-simple", "draft-mtp,draft-eagle3"):
        line = refusal(model, path, spec_type=kind)
        assert line == f"--spec-type {kind.split(',')[0]}: {path} is a drafter for draft-eagle3"
    line = refusal(model, model, spec_type="draft-eagle3")
    assert line == f"--spec-type draft-eagle3: {model} is no file of such a drafter"
    with pytest.raises(ModelFileError, match=r"is a drafter \(eagle3\), not a model: load its model, and this as"):
        open_model(path, ModelOptions(device="cpu"))


def test_drafter_says_its_kind_itself_beside_others(model: Path, tmp_path: Path) -> None:
    write_eagle3(path := tmp_path / "d.gguf", MODEL)
    opened = open_model(model, ModelOptions(model_draft=str(path), spec_type="ngram-mod", device="cpu"))
    assert opened.speculation.kinds == ("ngram-mod", "draft-eagle3")
    assert opened.engine_options.drafter == str(path)
    opened = open_model(model, ModelOptions(model_draft=str(model), device="cpu"))
    assert opened.speculation.kinds == ()


def test_the_kind_of_a_drafter_is_read_once_until_the_file_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_eagle3(path := tmp_path / "d.gguf", MODEL, {})
    opened: list[Path] = []
    read = GGUFFile.open
    monkeypatch.setattr(
        GGUFFile, "open", lambda path, *more, **named: opened.append(path) or read(path, *more, **named)
    )
    assert [drafter_kind(path), drafter_kind(str(path))] == ["eagle3"] * 2
    assert opened == [path]
    (other := tmp_path / "m.gguf").hardlink_to(model)
    other.replace(path)
    assert drafter_kind(path) == ""


def test_cells_of_an_indexer_and_of_a_drafter_are_moved_together(tmp_path: Path) -> None:
    write(model := tmp_path / "m.gguf", s := replace(MAPPED["minimax-m3"], n_vocab=400, n_ctx_train=64))
    write_eagle3(drafter := tmp_path / "d.gguf", s)
    moves = RunnerOptions(n_ctx=48, n_slots=1, n_draft_tokens=2, drafter=str(drafter), moves="--context-shift")
    engine = ModelRunner(model, moves)
    engine.load()
    caches = list(chain.from_iterable(engine.memory.full.layers.values()))
    for i, cache in enumerate(caches):
        engine.session.write(cache.name, np.full(cache.shape, i + 1, np.float16))
    engine.move_cells([(i, 16 + i, 0) for i in range(16)])
    for i, cache in enumerate(caches):
        np.testing.assert_array_equal(engine.session.read(cache.name)[1], i + 1)
    engine.close()
