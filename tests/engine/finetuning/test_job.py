"""Job settings: "auto" follows data and model; settings that change are reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.errors import InvalidRequest
from logitless.engine.finetuning.hyperparameters import resolved, resolved_rewards
from logitless.engine.finetuning.job import prepare
from logitless.engine.records.store import Row, Store
from logitless.frontend.fine_tuning import JobModel, new_job
from logitless.models import tokenizer
from logitless.models.chat.template import from_metadata
from logitless.models.tokenizer import Tokenizer
from logitless.training.adapters.options import LoraOptions
from logitless.training.errors import TrainingError
from logitless.training.run import RunPlan, lora_of, template_of
from logitless.training.schedule import rate_at
from logitless.training.scratch import byte_vocabulary

N_CTX_TRAIN = 512


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return tokenizer.from_metadata({name: key.value for name, key in byte_vocabulary()[0].items()}, path="bytes")


def job_of(store: Store, rows: list[dict[str, str]], **hyperparameters: Any) -> Row:
    file = store.add_file("\n".join(map(json.dumps, rows)).encode(), "rows.jsonl", "fine-tune")
    body = {"model": "m", "training_file": file["id"], "hyperparameters": hyperparameters}
    return new_job(body, store, JobModel("m", {"m"}, N_CTX_TRAIN))


def prepared(folder: Path, vocabulary: Tokenizer, rows: list[dict[str, str]], **hyperparameters: Any) -> RunPlan:
    store = Store(folder)
    try:
        return prepare(job_of(store, rows, **hyperparameters), store, vocabulary, None, N_CTX_TRAIN)
    finally:
        store.close()


@pytest.mark.parametrize(("n", "n_ctx"), [(20, 128), (199, 208), (2000, N_CTX_TRAIN)])
def test_the_context_follows_the_data_and_the_model(tmp_path: Path, vocabulary: Tokenizer, n: int, n_ctx: int) -> None:
    """A row of n bytes has n + 2 tokens, of which the last is a label alone."""
    result = prepared(tmp_path, vocabulary, [{"text": "a"}, {"text": "b" * n}], context_length="auto")
    assert result.config.ctx_size == n_ctx
    assert min(n + 1, n_ctx) <= result.settings.n_ctx <= n_ctx  # windows are shorter where a batch has fewer tokens
    assert [line.partition(": ")[2] for line in result.warnings] == (
        []
        if n < n_ctx
        else [
            "1 of 2 examples are longer than the context of 512 tokens (the longest has 2002): "
            "1489 tokens beyond it do not see the beginning"
        ]
    )


@pytest.mark.parametrize(
    ("n", "n_epochs", "batch_size", "n_steps"),
    [(20, 1, 4, 5), (5, 3, 4, 6), (7, 2, 7, 2), (3, 4, 100, 4), (9, 1, 1, 9)],
)
def test_batches_and_epochs_count_examples(
    tmp_path: Path, vocabulary: Tokenizer, n: int, n_epochs: int, batch_size: int, n_steps: int
) -> None:
    """However many of them a window holds: each epoch has every example once, and its last batch is the rest."""
    rows = [{"text": f"row {i:02}"} for i in range(n)]
    result = prepared(tmp_path, vocabulary, rows, n_epochs=n_epochs, batch_size=batch_size)
    order, settings = result.order, result.settings
    assert order.n_batches(settings.epochs, settings.n_logical) == n_steps
    seen: list[list[str]] = []
    for _ in range(n_steps):
        windows = order.take(settings.n_logical)
        assert len(windows) <= settings.batch_size * settings.grad_acc
        texts = [b"".join(map(vocabulary.piece, w.tokens[w.tokens > 2].tolist())).decode() for w in windows]
        seen.append(sorted(re.findall(r"row \d\d", "".join(texts))))
    assert [len(batch) for batch in seen[: n_steps // n_epochs]][:-1] == [batch_size] * (n_steps // n_epochs - 1)
    assert sorted(text for batch in seen for text in batch) == sorted([row["text"] for row in rows] * n_epochs)


@pytest.mark.parametrize(
    ("n", "length", "n_epochs", "batch_size"),
    [(1, 20, 25, 1), (5, 20, 20, 2), (20, 20, 5, 2), (500, 20, 3, 23), (500, 400, 3, 1), (9000, 2, 2, 162)],
)
def test_auto_looks_at_the_number_of_examples_and_their_lengths(
    n: int, length: int, n_epochs: int, batch_size: int
) -> None:
    """OpenAI's epochs: 100 examples seen at least, if 25 epochs reach that, and 25,000 at most unless there are more.
    A batch has 95 % of 512 tokens; a run of fewer than 50 such batches has smaller ones."""
    h = resolved({}, np.full(n, length + 1, np.int32), length + 1, N_CTX_TRAIN)
    assert (h.epochs, h.batch_examples) == (n_epochs, batch_size)
    tokens = batch_size * (length + 1)
    assert h.learning_rate_multiplier == pytest.approx(min(2, max(0.5, (tokens / 512) ** 0.5)), abs=0.005)
    assert h.warmup == min(100, n_epochs * -(-n // batch_size) // 10)


@pytest.mark.parametrize(
    ("n", "batch_size", "n_epochs"), [(1, 1, 64), (8, 8, 64), (20, 8, 22), (1000, 8, 3), (9000, 8, 2)]
)
def test_auto_has_64_batches_of_answers_at_least(n: int, batch_size: int, n_epochs: int) -> None:
    """A grade teaches less than an answer: 100 prompts answered were 13 steps, whose mean reward hardly rose."""
    h = resolved_rewards({}, n, 10, N_CTX_TRAIN)
    assert (h.batch_examples, h.epochs, h.learning_rate_multiplier) == (batch_size, n_epochs, 1.0)
    assert n_epochs * -(-n // batch_size) >= 64


def test_auto_values_are_reported_and_request_stays(tmp_path: Path, vocabulary: Tokenizer) -> None:
    rows = [{"text": "a" * 9}] * 40
    result = prepared(tmp_path, vocabulary, rows, n_epochs=2, batch_size=8, learning_rate_multiplier=3)
    assert result.choices == (
        "Hyperparameters chosen from 40 examples of 10 tokens on average: context_length=128, warmup_steps=1"
    )
    asked = {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 3, "context_length": 64, "warmup_steps": 0}
    assert prepared(tmp_path, vocabulary, rows, **asked).choices == ""


@pytest.mark.parametrize(("fraction", "n_held_out"), [(0.25, 5), (0.01, 1), (0.9, 18)])
def test_a_split_validates_on_examples_that_are_not_learned(
    tmp_path: Path, vocabulary: Tokenizer, fraction: float, n_held_out: int
) -> None:
    """At least one; "auto" looks at the others alone."""
    result = prepared(tmp_path, vocabulary, [{"text": f"row {i:02}"} for i in range(20)], validation_split=fraction)
    training = result.order.indices.tolist()
    assert len(result.validation) == n_held_out
    assert sorted([*training, *result.validation.tolist()]) == list(range(20))
    assert f"from {20 - n_held_out} examples" in result.choices
    n, windows = result.order.validation(result.validation)
    assert sum(int(w.weights.sum()) for w in windows) == n_held_out * 7
    assert n <= n_held_out


def test_a_split_of_one_example_and_stopping_without_validation_are_refused(
    tmp_path: Path, vocabulary: Tokenizer
) -> None:
    with pytest.raises(TrainingError, match="of one example leaves none to train on"):
        prepared(tmp_path, vocabulary, [{"text": "a"}], validation_split=0.1)
    store = Store(tmp_path)
    with pytest.raises(InvalidRequest, match=r"early_stopping_patience.*needs a validation_file or a validation_split"):
        job_of(store, [{"text": "a"}], early_stopping_patience=1)
    file = store.add_file(b'{"text": "a"}', "rows.jsonl", "fine-tune")["id"]
    body = {"model": "m", "training_file": file, "validation_file": file}
    with pytest.raises(InvalidRequest, match="validation_split': there is a validation_file"):
        new_job({**body, "hyperparameters": {"validation_split": 0.5}}, store, JobModel("m", {"m"}, N_CTX_TRAIN))
    store.close()


def test_a_job_shows_auto_until_it_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    shown = job_of(store, [{"text": "a"}], batch_size=3, n_epochs="auto")["hyperparameters"]
    store.close()
    assert {k: v for k, v in shown.items() if v == "auto"} == dict.fromkeys(
        ("n_epochs", "learning_rate_multiplier", "context_length", "warmup_steps"), "auto"
    )
    assert (shown["batch_size"], shown["lora_r"]) == (3, 8)


def test_the_adapter_of_a_job_is_chosen_by_its_hyperparameters(tmp_path: Path, vocabulary: Tokenizer) -> None:
    lora = {
        "r": 4,
        "alpha": 8,
        "target_modules": ["q_proj", "ffn_*"],
        "rslora": True,
        "plus_ratio": 16,
        "init": "pissa",
    }
    result = prepared(tmp_path, vocabulary, [{"text": "a"}], lora=lora, neftune_noise_alpha=5)
    assert lora_of(result.config) == LoraOptions(4, 8.0, {}, 0, ("q_proj", "ffn_*"), rslora=True, start="pissa")
    assert result.settings.lora_plus_ratio == 16
    assert result.settings.neftune_noise_alpha == 5


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"lora": {"rank": 4}}, r"hyperparameters\.lora\.rank': is not known"),
        ({"lora": 3}, r"hyperparameters\.lora': expected an object"),
        ({"lora": {"r": 4}, "lora_r": 4}, r"hyperparameters\.lora\.r': stands also in lora_r"),
        ({"lora_rslora": True}, r"hyperparameters\.lora_rslora': needs a lora_alpha"),
        ({"lora_init": "olora"}, r"hyperparameters\.lora_init': must be one of gaussian, pissa"),
        ({"lora_dora": True, "lora_init": "pissa"}, r"hyperparameters\.lora_dora'"),
        ({"lora_target_modules": "q_proj"}, r"hyperparameters\.lora_target_modules'"),
        (
            {"lora_target_modules": ["q_proj", "x"]},
            r"hyperparameters\.lora_target_modules': the model has no matrix 'x'",
        ),
        ({"lora_plus_ratio": 0}, r"hyperparameters\.lora_plus_ratio': must be between"),
        ({"full": True, "lora_dora": True}, r"hyperparameters\.lora_dora': is of an adapter"),
        ({"neftune_noise_alpha": -1}, r"hyperparameters\.neftune_noise_alpha': must be between"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_by_its_field(tmp_path: Path, asked: Row, problem: str) -> None:
    store = Store(tmp_path)
    file = store.add_file(b'{"text": "a"}', "rows.jsonl", "fine-tune")
    body = {"model": "m", "training_file": file["id"], "hyperparameters": asked}
    with pytest.raises(InvalidRequest, match=problem):
        new_job(body, store, JobModel("m", {"m"}, N_CTX_TRAIN, ["blk.0.attn_q.weight"]))
    noisy = {"type": "dpo", "dpo": {"hyperparameters": {"neftune_noise_alpha": 5}}}
    with pytest.raises(InvalidRequest, match="neftune_noise_alpha': is of supervised learning, and the method is dpo"):
        new_job({"model": "m", "training_file": file["id"], "method": noisy}, store, JobModel("m", {"m"}, N_CTX_TRAIN))
    store.close()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"optimizer": "adamw", "weight_decay": 0.1, "lora_plus_ratio": 1, "max_grad_norm": 1}),
        (
            {"weight_decay": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.95, "max_grad_norm": 0},
            {"weight_decay": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.95, "max_grad_norm": 0},
        ),
        ({"optimizer": "sgd"}, {"optimizer": "sgd", "weight_decay": 0}),
        ({"optimizer": "sgd", "weight_decay": 0.5}, {"optimizer": "sgd", "weight_decay": 0.5}),
        ({"weight_decay": "auto", "lora_plus_ratio": 2}, {"weight_decay": 0.1, "lora_plus_ratio": 2}),
    ],
)
def test_the_optimizer_of_a_job_is_chosen_by_its_hyperparameters(
    tmp_path: Path, vocabulary: Tokenizer, asked: Row, expected: Row
) -> None:
    settings = prepared(tmp_path, vocabulary, [{"text": "a"}], **asked).settings
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"optimizer": "lion"}, r"hyperparameters\.optimizer': must be one of adamw, sgd"),
        ({"optimizer": "sgd", "max_grad_norm": 1}, r"max_grad_norm': is of adamw, and the optimizer is sgd"),
        ({"optimizer": "sgd", "adam_beta1": 0.9}, r"adam_beta1': is of adamw, and the optimizer is sgd"),
        ({"adam_beta2": 1}, r"hyperparameters\.adam_beta2': must be between"),
        ({"weight_decay": -1}, r"hyperparameters\.weight_decay': must be between"),
        ({"chat_template": "{% if"}, r"hyperparameters\.chat_template': "),
        ({"chat_template": "x" * 300_000}, r"hyperparameters\.chat_template': has more than"),
    ],
)
def test_an_optimizer_or_template_that_cannot_be_is_refused_by_its_field(
    tmp_path: Path, asked: Row, problem: str
) -> None:
    store = Store(tmp_path)
    file = store.add_file(b'{"text": "a"}', "rows.jsonl", "fine-tune")
    with pytest.raises(InvalidRequest, match=problem):
        new_job(
            {"model": "m", "training_file": file["id"], "hyperparameters": asked},
            store,
            JobModel("m", {"m"}, N_CTX_TRAIN),
        )
    store.close()


def test_the_template_of_a_job_writes_its_rows(vocabulary: Tokenizer) -> None:
    own = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    usual = from_metadata({}, vocabulary)
    messages = [{"role": "user", "content": "a"}]
    result = template_of(own, vocabulary, usual)
    assert result is not None
    assert result.render(messages, add_generation_prompt=False) == "<user>a"
    assert template_of("", vocabulary, usual) is usual


_WANDB = {"project": "p", "name": None, "entity": None, "tags": ["a"]}


def test_a_job_shows_its_integrations(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = store.add_file(b'{"text": "a"}', "rows.jsonl", "fine-tune")
    body = {"model": "m", "training_file": file["id"]}
    asked = [
        {"type": "wandb", "wandb": {"project": "p", "tags": ["a"]}},
        {"type": "mlflow", "mlflow": {"experiment": "e"}},
        {"type": "tensorboard"},
    ]
    row = new_job(
        {**body, "integrations": asked}, store, JobModel("m", {"m"}, N_CTX_TRAIN), trackers=("wandb", "mlflow")
    )
    assert row["integrations"] == [
        {"type": "wandb", "wandb": _WANDB},
        {"type": "mlflow", "mlflow": {"experiment": "e", "name": None, "tags": None}},
        {"type": "tensorboard", "tensorboard": {}},
    ]
    assert new_job({**body, "integrations": None}, store, JobModel("m", {"m"}, N_CTX_TRAIN))["integrations"] == []
    store.close()


@pytest.mark.parametrize(
    ("integration", "problem"),
    [
        (
            {"type": "wandb", "wandb": {"project": "p"}},
            r"\[1\]\.type': wandb is off: start with --allow-integrations wandb",
        ),
        ({"type": "mlflow"}, r"\[1\]\.mlflow': is required"),
        ({"type": "mlflow", "mlflow": {"experiment": " "}}, r"\[1\]\.mlflow\.experiment': must not be empty"),
        ({"type": "mlflow", "mlflow": {}}, r"\[1\]\.mlflow\.experiment': is required"),
        ({"type": "mlflow", "mlflow": {"experiment": 3}}, r"\[1\]\.mlflow\.experiment': expected a string"),
        ({"type": "tensorboard", "wandb": {"project": "p"}}, r"\[1\]\.wandb': is not of the type tensorboard"),
        ({"type": "tensorboard", "tensorboard": {"log_dir": "/etc"}}, r"\[1\]\.tensorboard\.log_dir': is not known"),
        ({"type": "comet"}, r"\[1\]\.type': must be one of wandb, mlflow, tensorboard"),
        ("wandb", r"integrations\[1\]': expected an object"),
    ],
)
def test_an_integration_that_cannot_be_is_refused_by_its_field(tmp_path: Path, integration: Any, problem: str) -> None:
    store = Store(tmp_path)
    file = store.add_file(b'{"text": "a"}', "rows.jsonl", "fine-tune")
    body = {"model": "m", "training_file": file["id"], "integrations": [{"type": "tensorboard"}, integration]}
    with pytest.raises(InvalidRequest, match=problem):
        new_job(body, store, JobModel("m", {"m"}, N_CTX_TRAIN), trackers=("mlflow",))
    store.close()


def test_windows_of_a_batch_hold_its_examples_alone(tmp_path: Path, vocabulary: Tokenizer) -> None:
    """Long and short ones, those longer than the context too: no window is longer than it, few have much room."""
    rows = [{"text": "x" * n} for n in (300, 5, 90, 40, 7, 120, 64, 3)]
    result = prepared(tmp_path, vocabulary, rows, n_epochs=1, batch_size=8, context_length=100)
    windows = result.order.take(8)
    assert result.settings.n_ctx <= 112
    assert len(windows) <= result.settings.batch_size * result.settings.grad_acc
    assert sum(int(w.weights.sum()) for w in windows) == sum(len(row["text"]) + 1 for row in rows)
    assert len(windows) == -(-sum(len(row["text"]) + 1 for row in rows) // result.settings.n_ctx)


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(InvalidRequest, match=r"hyperparameters\.context_length.*512"):
        job_of(store, [{"text": "a"}], context_length=N_CTX_TRAIN + 1)
    assert job_of(store, [{"text": "a"}], context_length=N_CTX_TRAIN)["hyperparameters"]["context_length"] == 512
    store.close()


def test_warm_up_is_a_tenth_can_be_none_and_one_that_never_ends_is_told(tmp_path: Path, vocabulary: Tokenizer) -> None:
    rows = [{"text": "a" * 100}] * 40
    for asked, warmup in (("auto", 3), (0, 0), (7, 7), (30, 30)):
        result = prepared(tmp_path, vocabulary, rows, n_epochs=3, batch_size=4, warmup_steps=asked)
        assert result.settings.warmup == result.config.warmup == warmup
        assert list(result.warnings) == (
            [] if warmup < 30 else ["warmup_steps of 30: the 30 steps of the job never reach the learning rate"]
        )
    few = prepared(tmp_path, vocabulary, rows[:5], n_epochs=3, batch_size=4)
    assert rate_at(few.settings, 0) == few.settings.learning_rate
