"""Job settings: "auto" follows the data and the model; what is not learned as given is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logitless.engine.errors import InvalidRequest
from logitless.engine.finetuning.job import Prepared, prepare
from logitless.engine.finetuning.store import Row, Store
from logitless.models import tokenizer
from logitless.models.tokenizer import Tokenizer
from logitless.server.protocol.fine_tuning import new_job
from logitless.training.scratch import byte_vocabulary

N_CTX_TRAIN = 512


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return tokenizer.from_metadata({name: key.value for name, key in byte_vocabulary()[0].items()}, path="bytes")


def job_of(store: Store, rows: list[dict[str, str]], **hyperparameters: Any) -> Row:
    file = store.add_file("\n".join(map(json.dumps, rows)).encode(), "rows.jsonl", "fine-tune")
    body = {"model": "m", "training_file": file["id"], "hyperparameters": hyperparameters}
    return new_job(body, store, "m", {"m"}, N_CTX_TRAIN)


def prepared(folder: Path, vocabulary: Tokenizer, rows: list[dict[str, str]], **hyperparameters: Any) -> Prepared:
    store = Store(folder)
    try:
        return prepare(job_of(store, rows, **hyperparameters), store, vocabulary, None, N_CTX_TRAIN)
    finally:
        store.close()


@pytest.mark.parametrize(("n", "n_ctx"), [(20, 128), (199, 208), (2000, N_CTX_TRAIN)])
def test_the_context_follows_the_data_and_the_model(tmp_path: Path, vocabulary: Tokenizer, n: int, n_ctx: int) -> None:
    """A row of n bytes has n + 2 tokens, of which the last is a label alone."""
    found = prepared(tmp_path, vocabulary, [{"text": "a"}, {"text": "b" * n}], context_length="auto")
    assert found.hyperparameters.context_length == found.settings.n_ctx == n_ctx
    assert [line.partition(": ")[2] for line in found.warnings] == (
        []
        if n < n_ctx
        else [
            "1 of 2 examples are longer than the context of 512 tokens (the longest has 2002): "
            "1489 tokens beyond it do not see the beginning"
        ]
    )


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(InvalidRequest, match=r"hyperparameters\.context_length.*512"):
        job_of(store, [{"text": "a"}], context_length=N_CTX_TRAIN + 1)
    assert job_of(store, [{"text": "a"}], context_length=N_CTX_TRAIN)["hyperparameters"]["context_length"] == 512
    store.close()


def test_warm_up_can_be_none_and_one_that_never_ends_is_told(tmp_path: Path, vocabulary: Tokenizer) -> None:
    rows = [{"text": "a" * 100}] * 40
    for asked, warmup in (("auto", 3), (0, 0), (7, 7), (30, 30)):
        found = prepared(tmp_path, vocabulary, rows, warmup_steps=asked)
        assert found.settings.schedule.warmup == found.hyperparameters.warmup_steps == warmup
        assert list(found.warnings) == (
            [] if warmup < 30 else ["warmup_steps of 30: the 30 steps of the job never reach the learning rate"]
        )
