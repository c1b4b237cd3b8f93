"""Training configuration: one declaration, from which flags, jobs, keywords and documents follow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from logitless.cli.flags.options_training import FINETUNE, HYPERPARAMETERS
from logitless.frontend.fine_tuning import JobBody
from logitless.server.openapi.schemas import object_schema
from logitless.training.adapters.options import LoraOptions
from logitless.training.config import (
    DEFAULTS,
    FIELDS,
    METHODS,
    NONE,
    PREFERENCE,
    REINFORCEMENT,
    SAME,
    TrainingConfig,
    changed,
    config_of,
    config_of_job,
    job_defaults,
    job_fields,
    job_row,
    unused,
)
from logitless.training.errors import TrainingError
from logitless.training.methods.grpo import GRPO
from logitless.training.methods.registry import OBJECTIVES
from scripts import docs_pages
from tests.helpers.paths import ROOT

JOB_PROPERTIES = object_schema((JobBody,))[0]["properties"]["hyperparameters"]["properties"]


def test_fields_of_the_configuration_are_on_every_surface() -> None:
    page, flags = docs_pages.hyperparameters(), {flag.dest: flag for group in FINETUNE for flag in group.flags}
    for name, (_, param, *_) in FIELDS.items():
        default = DEFAULTS[name]
        assert f"`{name}`" in page
        if param.flag != NONE:
            flag = flags[HYPERPARAMETERS[name].dest]
            assert flag.help == param.doc, name
            assert flag.many or flag.default == (default if param.flag_default is SAME else param.flag_default), name
        if param.job != NONE:
            assert JOB_PROPERTIES[param.job or name]["description"] == param.doc, name
        assert config_of({name: default}) == TrainingConfig(), name


def test_new_field_is_one_line() -> None:
    """In a copy of the module: flag, job, OpenAPI, keyword and page have it."""
    script = """
import importlib.util, sys
from pathlib import Path
import logitless.training
path = Path(sys.argv[1])
line = '    label_smoothing: Annotated[float, H("part for all tokens", 0, 1)] = 0.25\\n'
source = path.read_text().replace("    optimizer: Annotated[", line + "    optimizer: Annotated[", 1)
spec = importlib.util.spec_from_loader("logitless.training.config", None)
module = sys.modules[spec.name] = logitless.training.config = importlib.util.module_from_spec(spec)
exec(compile(source, path, "exec"), module.__dict__)
from tests.training import test_config
test_config.test_fields_of_the_configuration_are_on_every_surface()
assert "label_smoothing" in test_config.FIELDS
from logitless.cli.flags.options_training import HYPERPARAMETERS
assert HYPERPARAMETERS["label_smoothing"].all_names == ("--label-smoothing",)
assert HYPERPARAMETERS["label_smoothing"].kind("0.5") == 0.5
from logitless.frontend.fine_tuning import HyperparametersBody
assert HyperparametersBody().label_smoothing == 0.25
assert module.job_row(module.config_of_job({"label_smoothing": 0.5}, "dpo", 0))["label_smoothing"] == 0.5
assert module.config_of({"label_smoothing": 0.5}).label_smoothing == 0.5
"""
    path = ROOT / "training" / "config.py"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", PREFERENCE)
def test_defaults_of_methods_are_their_objectives(method: str) -> None:
    own = {f.name: getattr(OBJECTIVES[method], f.name) for f in fields(OBJECTIVES[method])}  # type: ignore[arg-type]
    assert own.items() <= job_defaults(method).items()
    assert all(method in FIELDS[name][1].methods for name in own)
    assert (GRPO.NAME, GRPO.beta) == (REINFORCEMENT, job_defaults(REINFORCEMENT)["beta"])


@pytest.mark.parametrize("method", [*METHODS, REINFORCEMENT])
def test_row_of_a_job_is_read_back(method: str) -> None:
    config = config_of_job({"lora_r": 3, "n_epochs": 2, "batch_size": 5, "lora_target_modules": ["q_proj"]}, method, 7)
    assert config_of_job(job_row(config), method, 7) == config
    assert (config.lora_r, config.epochs, config.batch_examples, config.seed) == (3, 2, 5, 7)
    assert job_row(config).keys() == job_fields(method).keys()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lora_alhpa": 1.0}, "lora_alhpa: is no field of TrainingConfig; lora_alpha is"),
        ({"x": 1.0}, "x: is no field of TrainingConfig"),
        ({"lora_r": True}, "lora_r: True: expected `int`, got `bool`"),
        ({"epochs": float("nan")}, "epochs: nan is not between 0 and 3.40282e+38"),
        ({"epochs": float("inf")}, "epochs: inf is not finite"),
        ({"epochs": np.array([1, 2])}, "epochs: [1, 2]: expected `float`, got `array`"),
        ({"lora_ranks": np.array([1, 2])}, "lora_ranks: [1, 2]: expected `object`, got `array`"),
        ({"lora_ranks": {3: 4}}, "lora_ranks: {3: 4}: expected `str`, got `int`"),
        ({"lora_target_modules": "q_proj"}, "lora_target_modules: 'q_proj': expected `array`, got `str`"),
        ({"schedule": "linear"}, "schedule: 'linear' is not one of constant, cosine, halving"),
    ],
)
def test_value_that_is_wrong_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(TrainingError) as caught:
        config_of(values)
    assert str(caught.value) == problem


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array([[1.0]]), b"x"], ids=["array", "matrix", "bytes"])
def test_value_of_a_wrong_type_differs_from_the_default_and_is_named(value: Any) -> None:
    for name in FIELDS:
        config = TrainingConfig(**{name: value})
        assert changed(config) == {name}
        with pytest.raises(TrainingError, match=rf"^{name}: "):
            config_of({name: value})


def test_numbers_of_numpy_are_plain_numbers() -> None:
    config = config_of({"lora_r": np.int64(3), "epochs": np.float32(0.5), "full": np.bool_(True)})
    assert changed(config) == {"lora_r", "epochs", "full"}
    assert (type(config.lora_r), type(config.epochs), type(config.full)) == (int, float, bool)
    assert changed(TrainingConfig(lora_alpha=0, n_updates=True)) == {"n_updates"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [({"q_proj": 3}, "lora_ranks: 'q_proj' is not one of tok_embd, "), ({"wq": -1}, "lora_ranks: wq: -1 is not be")],
)
def test_ranks_of_unknown_tensors_are_refused(ranks: dict[str, int], problem: str) -> None:
    with pytest.raises(TrainingError) as caught:
        LoraOptions(ranks=ranks)
    assert str(caught.value).startswith(problem)
    assert LoraOptions(ranks={"wq": 0, "tok_embd": 8}).rank_of("token_embd.weight") == 8


@pytest.mark.parametrize(
    ("choice", "name", "reason"),
    [
        ({"method": "dpo"}, "neftune_noise_alpha", "is of supervised learning, and the method is dpo"),
        ({"method": "dpo"}, "gamma", "is of simpo, and the method is dpo"),
        ({"method": "simpo"}, "gamma", None),
        ({"full": True}, "lora_r", "is of an adapter, and all weights are trained"),
        ({}, "train_tensors", "is of a whole model, and an adapter is trained"),
        ({"optimizer": "sgd"}, "adam_beta1", "is of adamw, and the optimizer is sgd"),
        ({"optimizer": "sgd"}, "weight_decay", None),
        ({}, "opt_delta", "is of opt_past, which is not given"),
        ({"opt_past": 2}, "opt_delta", None),
        ({"sample_start": ""}, "fill_with_next_samples", None),
    ],
)
def test_field_without_effect_is_refused_beside_the_others(
    choice: dict[str, Any], name: str, reason: str | None
) -> None:
    assert list(unused({**DEFAULTS, **choice}, [name])) == ([] if reason is None else [(name, reason)])
