"""Refusals of models that choose cells or blocks, one line each: no cache, options, damaged tables of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless import LLM, RequestError
from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.loading.open_model import scoring_hparams
from logitless.engine.loading.options import OptionConflict
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.graph.execution.session import Session
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.quantize_model import plan_quantization
from logitless.models.weights.weights import check_weights
from logitless.training.run import FineTuning
from tests.helpers.architecture_specs import MAPPED
from tests.helpers.reference_model import write
from tests.models.architectures.test_llama_cpp import in_steps

TABLE = "blk.0.ffn_gate_tid2eid.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("blocks") / "m.gguf"
    write(made, replace(MAPPED["deepseek4"], n_vocab=512, vocabulary=True, n_ctx_train=512))
    return made


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, ctx_size=256) as model:
        yield model


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (lambda llm: llm.score(["once upon"]), "this model reads rows of blocks that only a cache has: it scores no"),
        (lambda llm: llm.finetune([{"text": "once"}]), "it scores no texts and cannot be fine-tuned"),
        (lambda llm: llm.embed(["once upon"]), "makes no vectors"),
    ],
)
def test_requests_without_a_cache_are_one_line(llm: LLM, ask: Callable[[LLM], Any], line: str) -> None:
    with pytest.raises(RequestError, match=line):
        ask(llm)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"moves": "--context-shift"}, "--context-shift: this model's rows of blocks cannot forget tokens"),
        ({"embeddings": True}, "--embeddings: this model makes no vectors of texts"),
        ({"type_k": "q3_0"}, "--cache-type-k q3_0: the cache can be f32, .*, iq4_nl"),
    ],
)
def test_options_that_blocks_do_not_allow_are_one_line(path: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        ModelRunner(path, RunnerOptions(n_ctx=64, n_slots=1, threads=1, **options))


def test_caches_of_blocks_need_rows_of_whole_pairs_of_blocks(tmp_path: Path) -> None:
    spec = MAPPED["deepseek4"]
    write(path := tmp_path / "m.gguf", replace(spec, keys=spec.keys | {"attention.indexer.key_length": 32}))
    line = "needs heads of a multiple of 64 elements, this model's indexer's have 32; f32, f16, bf16 take any"
    with pytest.raises(ValueError, match=f"^--cache-type-k q8_0: {line}$"):
        ModelRunner(path, RunnerOptions(n_ctx=64, n_slots=1, threads=1, type_k="q8_0"))


def test_caches_of_blocks_are_close_to_those_of_numbers(tmp_path: Path) -> None:
    """Rows, blocks and keys of the indexer are rotated, and so are queries; the output is rotated back."""
    write(path := tmp_path / "m.gguf", replace(MAPPED["deepseek4"], head_dim=64, n_vocab=512, n_ctx_train=512))
    ids = [1, *np.random.default_rng(1).integers(261, 512, 139).tolist()]
    exact, blocks = (
        in_steps(path, ids, (6, 30, 60, 129, 140), RunnerOptions(256, 1, 100, type_k=kind)) for kind in ("f32", "q5_1")
    )
    differences = [np.abs(exact[n] - row).mean() for n, row in blocks.items()]
    assert 0 < np.median(differences) < 0.8, differences  # 1.4 where the indexer's queries are not rotated


def test_training_and_scoring_commands_are_refused(path: Path) -> None:
    with GGUFFile.open(path) as gguf, pytest.raises(OptionConflict, match="only a cache has: it scores no texts"):
        scoring_hparams(gguf, path)
    line = "'deepseek4' reads rows of blocks that only a cache has and cannot be fine-tuned"
    with Session([CPUBackend(1)]) as session, pytest.raises(ModelFileError, match=line):
        FineTuning(session, path, [{"text": "once"}])


def test_quantized_file_keeps_what_is_read_row_by_row(path: Path, tmp_path: Path) -> None:
    with GGUFFile.open(path) as gguf:
        plan_quantization(gguf, "Q8_0").write(tmp_path / "q.gguf")
    with GGUFFile.open(tmp_path / "q.gguf") as gguf:
        check_weights(gguf, hparams_of(gguf))
        types = {name: gguf.tensors[f"blk.1.attn_compressor_{name}.weight"].dtype for name in ("kv", "ape")}
    assert types == {"kv": "q8_0", "ape": "f32"}


def test_bias_of_scores_is_in_all_layers_but_those_with_a_table_of_experts(path: Path) -> None:
    with GGUFFile.open(path) as gguf:
        h, name = hparams_of(gguf), "blk.{}.exp_probs_b.bias"
        bias = gguf.tensors.pop(name.format(1))
        with pytest.raises(ModelFileError, match=f"tensor '{name.format(1)}' is missing"):
            check_weights(gguf, h)
        gguf.tensors |= {name.format(i): bias for i in range(2)}
        with pytest.raises(ModelFileError, match=f"tensor '{name.format(0)}' is unknown"):
            check_weights(gguf, h)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_table_with_an_expert_that_does_not_exist_is_one_line(path: Path, tmp_path: Path, wrong: int) -> None:
    with GGUFFile.open(path) as gguf:
        at = gguf.bytes_of(TABLE)
        data = path.read_bytes()
        where = data.index(at.tobytes())
    changed = np.frombuffer(data, np.uint8).copy()
    changed[where + 40 : where + 44] = np.array([wrong], "<i4").view(np.uint8)
    (damaged := tmp_path / "damaged.gguf").write_bytes(changed.tobytes())
    with GGUFFile.open(damaged) as gguf, Session([CPUBackend(1)]) as session:
        model = define_model(session, gguf, hparams_of(gguf), 64)
        with pytest.raises(ModelFileError, match=f"damaged.gguf: tensor '{TABLE}' has a number that is not below 6"):
            session.source_of(model.weights.tensors[TABLE])()


def test_texts_longer_than_an_indexer_chooses_are_named_before_a_run(tmp_path: Path) -> None:
    s = MAPPED["minimax-m3"]  # two blocks of two cells
    write(tmp_path / "m.gguf", replace(s, n_vocab=512, vocabulary=True, n_ctx_train=512))
    with LLM(tmp_path / "m.gguf", ctx_size=64, parallel=1, device="cpu") as llm:
        with pytest.raises(RequestError, match=r"field 'input\[1\]': 5 tokens exceed the context of 4"):
            llm.score([[5, 6, 7, 8], [5, 6, 7, 8, 9]])
        with pytest.raises(RequestError, match="context_length': must be between 2 and 4, got 5"):
            llm.finetune([{"text": "once"}], context_length=5)
        assert np.isfinite(llm.score([[5, 6, 7, 8]])[0].loss)
