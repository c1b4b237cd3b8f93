"""WHAT to compute: tensors, ops, and how a graph is placed, laid out in memory and run."""

from logitless.graph.op import OPS, Op, op, writing
from logitless.graph.order import dump, toposort
from logitless.graph.tensor import Tensor, const, feed, variable

__all__ = ["OPS", "Op", "Tensor", "const", "dump", "feed", "op", "toposort", "variable", "writing"]
