"""Adapted model: a model with the finetune and LoRA adapters of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.models.model import Model


@dataclass(frozen=True)
class AdaptedModel:
    """`model(n)` is the model for n rows, `feeds(n)` the inputs that it needs besides tokens;
    `name` tells its graphs from those of other adapters."""

    session: Session
    model: Callable[[int], Model]
    name: str = ""
    feeds: Callable[[int], dict[str, npt.NDArray[Any]]] = lambda _: {}
