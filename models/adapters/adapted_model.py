"""A model as one request wants it: with the weights and adapters of its choice, on a session that others use too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.models.model import Model


@dataclass(frozen=True)
class AdaptedModel:
    """`model(n)` is for n rows, `feeds(n)` what it wants besides their tokens; `name` tells its graphs from those of
    other choices."""

    session: Session
    model: Callable[[int], Model]
    name: str = ""
    feeds: Callable[[int], dict[str, npt.NDArray[Any]]] = lambda _: {}
