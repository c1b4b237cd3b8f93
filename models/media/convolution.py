"""Convolutions of projector files: their tensors, and maps (N, H, W, C) through them."""

from __future__ import annotations

from logitless.graph.ops.conv import patches
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor
from logitless.models.media.projector_weights import Declared, plain
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import Weights


def convolution(name: str, n_out: int, n_in: int, side: int) -> Declared:
    """A convolution of squares with an optional bias: a matrix of flat patches, of each element side by side."""
    rows, shape = (n_out * n_in * side, side), (n_out, n_in, side, side)
    yield f"{name}.weight", TensorSlice(f"{name}.weight", rows, in_file=shape, in_graph=(n_out, n_in * side**2))
    yield from plain(f"{name}.bias", n_out)


def convolved(w: Weights, name: str, x: Tensor, *, side: int, stride: int = 1) -> Tensor:
    """The convolution of maps (N, H, W, C) with zeros around them."""
    n, height, width, channels = x.shape
    near = reshape(patches(x, size=(side, side), stride=stride, padding=side // 2), shape=(-1, side**2, channels))
    near = reshape(transpose(near, axes=(0, 2, 1)), shape=(-1, channels * side**2))
    return reshape(w.linear(name, near), shape=(n, -(-height // stride), -(-width // stride), -1))
