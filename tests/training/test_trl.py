"""Losses and gradients against trl's own functions in torch, recorded in docs/experiments/trl.json.

`pytest tests/training/test_trl.py --trl PYTHON` records them anew; PYTHON has torch and trl. Of the
record's 50 steps the first are compared, with --long all."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.backends.cpu.backend import CPUBackend
from logitless.graph.execution.session import Session
from logitless.models.gguf.file import GGUFFile
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import Groups
from logitless.training.data.prompts import Prompts
from logitless.training.data.sampler import ExampleSampler
from logitless.training.methods.grpo import GRPO
from logitless.training.methods.registry import hyperparameters
from logitless.training.policy.reinforcement import Answer, PolicyBatch, ReinforcementTrainer
from logitless.training.run import FineTuning
from logitless.training.step import outcome
from logitless.training.trainer import Step, Trainer
from tests.helpers.paths import ROOT

RECORD = ROOT / "docs" / "experiments" / "trl.json"
RATE, N_STEPS, GROUP = 2e-5, 50, 4
SETTINGS = TrainingConfig(ctx_size=64, batch_size=8, iterations=N_STEPS, learning_rate=RATE, max_grad_norm=0.0)
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in (
        ("Once upon a time, there was a cat.", " It sat.", " The cat liked to run and play in the big park."),
        ("One day, Tom went out.", " He was sad.", " He saw a big red ball and a small dog."),
        ("Lily had a toy.", " She loved it.", " It was a car, and it was red, and it was fast."),
        ("A bird", " sang.", " flew up to the sky and did not come back."),
        ("The sun was hot.", " Ben swam.", " Ben and his mom went to the sea to swim and eat."),
        ("There was a bear", ".", " who liked to eat honey in the wood all day."),
        ("Mia", " smiled.", " and her friend played with the ball in the garden."),
        ("It was a cold day.", " Max slept.", " Max put on his hat and his coat to play with the snow."),
    )
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row["rejected" if i % 3 else "chosen"], "label": i % 3 == 0}
    for i, row in enumerate(PAIRS)
]
METHODS = ("dpo", "orpo", "simpo", "kto", "grpo", "dr_grpo")


class Case:
    """One method's run on all weights of stories260K, whose every step learns from all of the data."""

    def __init__(self, method: str, model: Path) -> None:
        self.gradients: list[dict[str, Any]] = []
        rewarded = method.endswith("grpo")
        config = TrainingConfig(
            method="dpo" if rewarded else method, full=True, ctx_size=64, iterations=N_STEPS, learning_rate=RATE,
            max_grad_norm=0.0,
        )  # fmt: skip
        data = JUDGED if method == "kto" else PAIRS
        self.run = FineTuning(Session([CPUBackend(1)]), model, data, config, on_gradients=self._keep)
        dataset = self.run.trainer.order.dataset
        assert isinstance(dataset, Groups)
        rows = [row_of(dataset, i) for i in range(len(dataset.values))]
        counts = np.array([sum(row["learn"]) for row in rows])
        rng = np.random.default_rng(5)
        # a model that its reference is not: 2.5 a token is about what it thinks
        reference = -2.5 * counts + rng.normal(0, 3, len(rows))
        self.spec: dict[str, Any] = {
            "method": "reinforcement" if rewarded else method,
            "hyperparameters": hyperparameters("dpo" if rewarded else method),
            "rows": [{**row, "value": v} for row, v in zip(rows, dataset.values.tolist(), strict=True)],
            "reference": reference.tolist(),
        }
        self.trainer: Trainer = self.run.trainer
        self.trainer.reference = reference
        if rewarded:
            self._reward(method, rows, rng)

    def _keep(self, gradients: dict[str, Any]) -> None:
        self.gradients += [] if self.gradients else [gradients]

    def _reward(self, method: str, rows: list[dict[str, Any]], rng: np.random.Generator) -> None:
        """A batch of answers that a slightly other model has sampled: those of the pairs, in groups."""
        grpo = GRPO(n_samples=GROUP, n_updates=N_STEPS + 1, max_tokens=32, beta=0.04, loss_type=method)
        first = [row["learn"].index(1) for row in rows]
        prompts = tuple(np.array(row["tokens"][:k], np.int32) for row, k in zip(rows, first, strict=True))
        tokens = [np.array(row["tokens"][k:], np.int32) for row, k in zip(rows, first, strict=True)]
        rewards = rng.normal(size=(len(rows) // GROUP, GROUP))
        old_run = self.run.trainer
        order = ExampleSampler(Prompts(prompts, ({},) * len(prompts)), np.arange(len(prompts), dtype=np.int32), "p")
        self.trainer = trainer = ReinforcementTrainer(
            old_run.trainable, SETTINGS, order, np.zeros(0, np.int32), grpo=grpo, policy=None, grade=None,
            reference=old_run.steps, prefix="grpo", on_gradients=self._keep,
        )  # fmt: skip
        result = outcome(
            trainer._log_probs(trainer.steps, prompts, [Answer(t, np.zeros(0, np.float32)) for t in tokens])
        )
        answers, reference = [
            [(own + rng.normal(0, scale, len(own))).astype(np.float32) for own in result] for scale in (0.2, 0.4)
        ]
        answers = [Answer(t, old) for t, old in zip(tokens, answers, strict=True)]
        trainer.batch = PolicyBatch(prompts, tuple(answers), rewards, tuple(reference), n_done=1)
        named = {"n_samples": GROUP, "beta": grpo.beta, "clip": grpo.clip, "max_tokens": grpo.max_tokens}
        self.spec |= {
            "hyperparameters": named, "loss_type": method, "rewards": rewards.reshape(-1).tolist(),
            "old": [a.log_probs.tolist() for a in answers], "token_reference": [r.tolist() for r in reference],
        }  # fmt: skip

    def losses(self, n: int) -> list[float]:
        result: list[float] = []
        for event in self.trainer.work():
            result += [event.loss] if isinstance(event, Step) else []
            if len(result) == n:
                break
        return result


def row_of(dataset: Groups, i: int) -> dict[str, Any]:
    window = dataset.window([i])
    n = (*window.starts, len(window.tokens))[1]
    return {
        "tokens": [*window.tokens[:n].tolist(), int(window.labels[n - 1])],
        "learn": [0, *(int(x > 0) for x in window.weights[:n])],
    }


@cache
def case(method: str, model: Path, n_steps: int) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """What a method's run is given, its losses and its first gradient."""
    result = Case(method, model)
    with result.run:
        return result.spec, result.losses(n_steps), result.gradients[0]


@pytest.fixture(scope="module")
def model(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K.gguf"


@pytest.fixture(scope="module")
def n_steps(request: pytest.FixtureRequest) -> int:
    return N_STEPS if request.config.getoption("--long") or request.config.getoption("--trl") else 4


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if python := request.config.getoption("--trl"):
        _record(python, model, tmp_path_factory.mktemp("trl"))
    result: dict[str, Any] = json.loads(RECORD.read_text())
    return result


def _record(python: str, model: Path, folder: Path) -> None:
    with GGUFFile.open(model) as gguf:
        arrays = {
            name: np.frombuffer(bytes(gguf.bytes_of(name)), np.float32).reshape(info.shape)
            for name, info in gguf.tensors.items()
        }
        keys = {k.removeprefix("llama."): v for k, v in gguf.metadata.items() if k.startswith("llama.")}
    np.savez(folder / "weights.npz", **arrays)
    size = {
        "layers": keys["block_count"], "heads": keys["attention.head_count"],
        "kv_heads": keys["attention.head_count_kv"], "eps": keys["attention.layer_norm_rms_epsilon"],
    }  # fmt: skip
    cases = {method: case(method, model, N_STEPS)[0] for method in METHODS}
    given = {"size": size, "cases": cases, "rate": RATE, "n_steps": N_STEPS}
    (folder / "given.json").write_text(json.dumps(given))
    command = [python, str(ROOT / "tests/helpers/trl_peer.py"), str(folder / "given.json"), str(folder / "weights.npz")]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout
    result = json.loads(said.splitlines()[-1])
    for method, theirs in result["cases"].items():
        theirs["logitless"] = case(method, model, N_STEPS)[1]
    rounded = json.loads(json.dumps(result), parse_float=lambda x: float(f"{float(x):.8g}"))
    RECORD.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")


@pytest.mark.parametrize("method", METHODS)
def test_losses_and_gradients_are_trls(record: dict[str, Any], model: Path, method: str, n_steps: int) -> None:
    theirs = record["cases"][method]
    _, losses, gradients = case(method, model, n_steps)
    np.testing.assert_allclose(losses, theirs["losses"][:n_steps], rtol=1e-5, atol=1e-5)
    assert gradients.keys() == theirs["gradients"].keys()
    for i, (name, own) in enumerate(theirs["gradients"].items()):
        rng, g = np.random.default_rng(i), gradients[name].astype(np.float64)
        assert np.linalg.norm(g) == pytest.approx(own["norm"], rel=1e-5)
        for along in own["along"]:  # in random directions of length √n, in which a difference has about its length
            assert (g * rng.normal(size=g.shape)).sum() == pytest.approx(along, abs=3e-5 * own["norm"])
