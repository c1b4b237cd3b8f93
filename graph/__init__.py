"""The tensor graph: tensors, ops, gradients, and sessions that run a graph on any device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from logitless.graph.op import OPS, Op, op, writing
from logitless.graph.order import dump, toposort
from logitless.graph.tensor import Tensor, const, feed, variable

if TYPE_CHECKING:
    from logitless.graph.autodiff import backward as backward
    from logitless.graph.execution.session import Session as Session

__all__ = [
    "OPS",
    "Op",
    "Session",
    "Tensor",
    "backward",
    "const",
    "dump",
    "feed",
    "op",
    "toposort",
    "variable",
    "writing",
]
_LAZY = {"Session": "logitless.graph.execution.session", "backward": "logitless.graph.autodiff"}


def __getattr__(name: str) -> Any:
    """`Session` and `backward` are imported when they are first used: most of the code needs the ops only."""
    if name not in _LAZY:
        raise AttributeError(f"module 'logitless.graph' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value
