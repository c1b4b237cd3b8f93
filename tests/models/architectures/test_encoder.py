"""Encoder vectors: BERT's against a forward pass in float64 (test_llama_cpp.py: those of others)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.runner.embedder import Embedder
from logitless.graph.execution.session import Session
from logitless.models.architectures.position_bias import buckets
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import AdaptedModel, define_model, hparams_of
from tests.helpers.architecture_specs import ENCODERS
from tests.helpers.bert_model import N_CTX, forward, score, tensors, write
from tests.helpers.reference_model import Spec
from tests.helpers.reference_model import write as write_spec

Array = np.ndarray[Any, Any]


def opened(path: Path, n_ctx: int | None = None) -> tuple[Session, Embedder]:
    with GGUFFile.open(path) as gguf:
        hparams = hparams_of(gguf)
        n_ctx = n_ctx or hparams.n_ctx_train
        session = Session([CPUBackend(2)])
        model = define_model(session, gguf, hparams, n_ctx)
        embedder = Embedder(lambda _: AdaptedModel(session, lambda _: model), hparams, 64, n_ctx)
        for pooling in ("cls", "rank") if embedder.ranks else ("cls",):  # reads the weights while the file is open
            assert embedder.embed([[1]], pooling)[0].size > 0
    return session, embedder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    session, embedder = opened(write(tmp_path_factory.mktemp("bert") / "bert.gguf", tensors()))
    yield embedder
    session.close()


TEXTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(1, 50)), [7, 7], list(range(40, 60)), [9] * N_CTX, [1, 2]]


def embedded(embedder: Embedder, texts: list[list[int]], pooling: str) -> list[Array]:
    found: dict[int, Array] = {}
    for group in embedder.groups(texts):
        vectors = embedder.embed([texts[i] for i in group], pooling)
        found |= dict(zip(group, vectors, strict=True))
    return [found[i] for i in range(len(texts))]


def test_every_pooling_is_the_float64_forward_pass(bert: Embedder) -> None:
    values = tensors()
    hidden = [forward(values, text) for text in TEXTS]
    expected: dict[str, list[Array]] = {
        "none": hidden,
        "mean": [x.mean(0) for x in hidden],
        "cls": [x[0] for x in hidden],
        "last": [x[-1] for x in hidden],
        "rank": [score(values, x[0]) for x in hidden],
    }
    for pooling, vectors in expected.items():
        for found, wanted in zip(embedded(bert, TEXTS, pooling), vectors, strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=pooling)
    assert (bert.default, bert.n_ctx, bert.ranks) == ("cls", N_CTX, True)


GEMMA = Spec(
    "gemma-embedding",
    n_embd=48,
    n_layer=7,
    head_dim=16,
    n_head_kv=1,
    n_ctx_train=128,
    keys={
        "attention.sliding_window": 8,
        "rope.freq_base": 1e6,
        "pooling_type": 1,
        "dense_2_feat_out": 96,
        "dense_3_feat_in": 96,
    },
)


MODERN = Spec(
    "modern-bert",
    n_layer=7,
    n_head_kv=4,
    n_ctx_train=128,
    fused=True,
    keys={"attention.sliding_window": 8, "rope.freq_base": 160000.0, "pooling_type": 2},
)


def test_a_vector_does_not_depend_on_its_company(bert: Embedder) -> None:
    alone = [embedded(bert, [text], "mean")[0] for text in TEXTS]
    together = embedded(bert, [[8] * 10, *TEXTS, [4] * 9, [4] * 10], "mean")[1:]
    for a, b in zip(alone, together, strict=False):
        assert a.tobytes() == b.tobytes()


def test_a_file_without_segments(tmp_path: Path) -> None:
    """DistilBERT's."""
    values = tensors(head=False)
    zeros = values | {"token_types.weight": np.zeros_like(values["token_types.weight"])}
    session, embedder = opened(
        write(tmp_path / "m.gguf", {name: v for name, v in values.items() if name != "token_types.weight"})
    )
    np.testing.assert_allclose(embedded(embedder, [TEXTS[1]], "none")[0], forward(zeros, TEXTS[1]), atol=2e-5)
    session.close()


def test_a_head_of_one_row_may_be_a_vector(tmp_path: Path) -> None:
    """As llama-quantize writes it."""
    values = tensors()
    flat = values | {"cls.output.weight": values["cls.output.weight"].reshape(-1)}
    scores = []
    for given in (values, flat):
        session, embedder = opened(write(tmp_path / "m.gguf", given))
        scores.append(embedded(embedder, [TEXTS[1]], "rank")[0])
        session.close()
    assert scores[0].shape == (1,)
    assert scores[0].tobytes() == scores[1].tobytes()


def test_groups_take_what_fits(bert: Embedder) -> None:
    lengths = [3, 60, 3, 3, 3, 30, 30, 30, 64]
    groups = list(bert.groups([[1] * n for n in lengths]))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[i] for i in group) <= 64
        assert len(group) in (1, 2, 4)
    assert any(len(group) == 4 for group in groups)


def test_half_precision_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "half.gguf", tensors(head=False), dtype=np.float16, pooling=1)
    values = {k: v.astype(np.float16) if v.ndim == 2 else v for k, v in tensors().items()}
    session, embedder = opened(path)
    assert (embedder.default, embedder.ranks) == ("mean", False)
    wanted = forward(values, TEXTS[1]).mean(0)
    np.testing.assert_allclose(embedded(embedder, [TEXTS[1]], "mean")[0], wanted, atol=3e-3)
    session.close()


def test_broken_files(tmp_path: Path) -> None:
    values = tensors()
    for name in ("token_embd_norm.weight", "blk.1.layer_output_norm.bias", "position_embd.weight"):
        path = write(tmp_path / "x.gguf", {k: v for k, v in values.items() if k != name})
        with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=f"'{name}' is missing"):
            hparams_of(gguf)
    path = write(tmp_path / "x.gguf", values, pooling=9)
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match="pooling_type"):
        hparams_of(gguf)


def test_a_decoder_s_last_state_gives_its_logits(shared_data: Path) -> None:
    """The hidden state of stories260K times its embedding matrix: the recorded greedy token is the
    largest."""
    expected = json.loads((shared_data / "expected" / "stories260K.gguf.json").read_text())
    path = shared_data / "models" / "stories260K.gguf"
    session, embedder = opened(path)
    prompt, greedy = expected["prompt_ids"], expected["greedy_ids"]
    states = embedded(embedder, [prompt, [*prompt, *greedy[:5]]], "none")
    with GGUFFile.open(path) as gguf:
        raw = gguf.bytes_of("token_embd.weight").view(np.float32)
        matrix = raw.reshape(gguf.tensors["token_embd.weight"].shape)
        logits = [x @ matrix.T for x in states]
    assert [int(row.argmax()) for row in logits[1][len(prompt) - 1 :]] == greedy[:6]
    np.testing.assert_allclose(states[0], states[1][: len(prompt)], atol=1e-4)
    session.close()


def test_buckets_of_distances_are_those_of_t5() -> None:
    """Of 32 buckets, by the formula of its authors: 8 distances have one each, 128 the last."""
    expected = {0: 0, -1: 1, 1: 17, -7: 7, -8: 8, 8: 24, -11: 8, -12: 9, 16: 26, 32: 28, 64: 30, -90: 14, 91: 31}
    expected |= {127: 31, -128: 15, 5000: 31}
    assert dict(zip(expected, buckets(np.array(list(expected)), 32).tolist(), strict=True)) == expected


def test_biases_by_distance_in_a_short_context_are_those_of_a_long_one(tmp_path: Path) -> None:
    write_spec(path := tmp_path / "m.gguf", ENCODERS["jina-bert-v2"])
    vectors = []
    for n_ctx in (None, 17):
        session, embedder = opened(path, n_ctx)
        assert embedder.everything()
        vectors.append(embedded(embedder, [list(range(200, 217)), [300]], "mean"))
        session.close()
    np.testing.assert_array_equal(*vectors)
