"""Convolutions of maps (N, H, W, C) by weights of projector files."""

from __future__ import annotations

from logitless.graph.ops.conv import patches
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor
from logitless.models.media.projector_weights import ProjectorWeights


def convolved(
    w: ProjectorWeights, name: str, x: Tensor, n_out: int = 0, *, side: int, stride: int = 1, needs_bias: bool = False
) -> Tensor:
    """The convolution of maps (N, H, W, C) with zeros around them."""
    n, height, width, channels = x.shape
    near = reshape(patches(x, size=(side, side), stride=stride, padding=side // 2), shape=(-1, side**2, channels))
    near = reshape(transpose(near, axes=(0, 2, 1)), shape=(-1, channels * side**2))
    y = w.linear(name, near, n_out, (side, side), needs_bias=needs_bias)
    return reshape(y, shape=(n, -(-height // stride), -(-width // stride), -1))
