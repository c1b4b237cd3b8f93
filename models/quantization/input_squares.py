"""Inputs of every matrix on windows of tokens: sums of their squares, which an importance matrix has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from logitless.graph.execution.session import Session
from logitless.graph.op import Array
from logitless.graph.ops.elementwise import broadcast_to, mul, sum_to
from logitless.graph.ops.linear import matmul_tn
from logitless.graph.ops.moe import expert_scatter
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, const
from logitless.models.batch import Sequences
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import Model
from logitless.models.weights.tensor_map import TensorSlice

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class _Product:
    """A product's matrix, by its name in the file, and its inputs (R, K); of experts the `order` of the rows."""

    name: str
    x: Tensor
    n: int = 1
    order: Tensor | None = None

    def outputs(self) -> list[Tensor]:
        """Sums of squares (n, K) and numbers of rows (1, n); of one matrix the sums alone."""
        squares = mul(self.x, self.x)
        if self.order is None:
            return [sum_to(squares, shape=(1, squares.shape[1]))]
        rows = self.x.shape[0]
        experts = reshape(slice_rows(self.order, start=2, stop=3), shape=(rows, 1))
        own = expert_scatter(broadcast_to(const(1.0), shape=(rows, 1)), experts, n=self.n)
        return [matmul_tn(own, squares), sum_to(own, shape=(1, self.n))]


class InputSquares:
    """Sums over windows of `n_ctx` tokens, each by itself, of the matrices of all blocks.

    `parts`: the tensors of the model's graph in its file. `output`: of the output matrix, too.
    """

    def __init__(
        self,
        session: Session,
        model: Model,
        gguf: GGUFFile,
        parts: Mapping[str, TensorSlice],
        n_ctx: int,
        *,
        output: bool,
    ) -> None:
        self._session, self._n_ctx = session, n_ctx
        self._products = _products(model, gguf, parts, n_ctx, output=output)
        self.sums: dict[str, F64] = {}  # (matrices, inputs)
        self.counts: dict[str, F64] = {}  # (matrices,)

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Add a window. OverflowError names a matrix with inputs that are not finite."""
        n = self._n_ctx
        feeds: dict[str, Array] = {
            "tokens": tokens,
            "pos": np.arange(n, dtype=np.int32),
            "start": np.zeros(n, np.int32),
        }
        results = iter(self._session.run(("imatrix", n), self._build, feeds))
        for product in self._products:
            squares = np.asarray(next(results), np.float64)
            if not np.isfinite(squares).all():
                raise OverflowError(f"the inputs of '{product.name}' are not finite")
            rows = [product.x.shape[0]] if product.order is None else np.asarray(next(results)).reshape(-1)
            self.sums[product.name] = self.sums.get(product.name, 0.0) + squares
            self.counts[product.name] = self.counts.get(product.name, 0.0) + np.asarray(rows, np.float64)

    def result(self) -> dict[str, tuple[F32, F32]]:
        """Sums and counts by matrix, as `write_imatrix` has them."""
        return {
            name: (sums.astype(np.float32), self.counts[name].astype(np.float32)) for name, sums in self.sums.items()
        }

    def _build(self) -> list[Tensor]:
        return [output for product in self._products for output in product.outputs()]


def _products(
    model: Model, gguf: GGUFFile, parts: Mapping[str, TensorSlice], n_ctx: int, *, output: bool
) -> list[_Product]:
    """The products of a window with matrices of the file, in the order of the graph. Parts of one matrix share their
    inputs, which count once."""
    rows = Sequences.feeds(1, n_ctx)
    hidden = model.hidden(rows, rows)
    names = {tensor: name for name, tensor in model.weights.tensors.items()}
    products: dict[tuple[str, Tensor], _Product] = {}
    for node in toposort([model.head(hidden) if output else hidden]):
        part = parts.get(names.get(node.src[1], "")) if node.op in ("linear", "expert_linear") else None
        if part is None or part.transposed or not part.source.startswith(("blk.", "output.weight")):
            continue
        x, shape = node.src[0], gguf.tensors[part.source].shape
        if x.shape[1] != shape[-1] or (node.op == "expert_linear") != (len(shape) == 3):
            continue  # the graph multiplies by something else than the file's matrix
        if node.op == "linear":
            product = _Product(part.source, x)
        else:
            product = _Product(part.source, x, node.attrs["n"], node.src[2])
        products.setdefault((part.source, x), product)
    return list(products.values())
