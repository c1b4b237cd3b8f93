"""Training methods by name, as `method.type` of a job and --method have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from logitless.training.config import METHODS, not_of_method
from logitless.training.errors import TrainingError
from logitless.training.methods.kto import KTO
from logitless.training.methods.objective import Objective
from logitless.training.methods.preference import DPO, ORPO, SimPO

OBJECTIVES: dict[str, type[Objective]] = {o.NAME: o for o in (DPO, ORPO, KTO, SimPO)}


def learning_rate(method: str) -> float:
    """Peak rate of an adapter where none is asked for: llama-finetune's. With it, preferences make
    both answers unlikely (docs/experiments/teaching.md)."""
    return 1e-4 if method in OBJECTIVES else 1e-3


def hyperparameters(method: str) -> dict[str, float]:
    """Hyperparameters that only this method has, with their defaults."""
    objective = OBJECTIVES.get(method)
    return {} if objective is None else {f.name: float(getattr(objective, f.name)) for f in fields(objective)}  # type: ignore[arg-type]


def objective(method: str, own: Mapping[str, Any] | None = None) -> Objective | None:
    """The method with these hyperparameters, of which a None is the default; None: supervised
    learning. TrainingError: there is no such method, or it has no such hyperparameter."""
    if method not in METHODS:
        raise TrainingError(f"method {method!r} is not one of {', '.join(METHODS)}")
    values = {name: value for name, value in (own or {}).items() if value is not None}
    if unknown := sorted(values.keys() - hyperparameters(method).keys()):
        having = [m for m in OBJECTIVES if unknown[0] in hyperparameters(m)]
        raise TrainingError(f"{unknown[0]} {not_of_method(having or ['no method'], method)}")
    return OBJECTIVES[method](**values) if method in OBJECTIVES else None
