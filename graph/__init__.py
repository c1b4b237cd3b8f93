"""Tensor graphs: build one, differentiate it, run it on any device.

>>> import numpy as np
>>> from logitless import graph
>>> from logitless.backends.registry import open_backends
>>> x, w = graph.feed("x", (4, 3)), graph.feed("w", (2, 3))
>>> loss = graph.sum_to(graph.silu(graph.linear(x, w)), shape=())
>>> gradients = graph.backward(loss, [w])
>>> with graph.Session(open_backends(["cpu"])) as session:
...     ones = {"x": np.ones((4, 3)), "w": np.ones((2, 3))}
...     value, gradient = session.compute([loss, gradients[w]], ones)
>>> round(float(value), 3), gradient.shape
(22.862, (2, 3))

Leaves are feeds (`feed(name, shape)`: an array is given at every run), variables
(`session.define(name, shape)`: they live on a device between runs, see `Session.write` and `read`)
and scalars (`const(value)`). Ops check sources, types and attributes where the graph is built, and
runs check what is fed, indices as well: a ValueError names the op or the feed. `help(graph.linear)`
says what an op takes. `session.compute(fetches, feeds)` runs a graph once; `session.run(key, build,
feeds)` keeps its plan. `evaluate(roots, feeds)` computes it in numpy, in float64, without a device.

Devices are named as for `--device` (`cpu`, `vulkan:0`, `opencl:0`, `rpc:HOST:PORT`);
`open_backends` raises DeviceError for one that is not there. What an op computes, its shapes and
its gradient stand in its declaration below `graph/ops`; all of them may be used, those named here
are the common ones."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless.graph.autodiff import backward as backward
    from logitless.graph.execution.session import Session as Session
    from logitless.graph.ops.elementwise import add as add
    from logitless.graph.ops.elementwise import gelu as gelu
    from logitless.graph.ops.elementwise import mul as mul
    from logitless.graph.ops.elementwise import scale as scale
    from logitless.graph.ops.elementwise import silu as silu
    from logitless.graph.ops.elementwise import sub as sub
    from logitless.graph.ops.elementwise import sum_to as sum_to
    from logitless.graph.ops.gather import get_rows as get_rows
    from logitless.graph.ops.linear import linear as linear
    from logitless.graph.ops.linear import matmul as matmul
    from logitless.graph.ops.norm import rms_norm as rms_norm
    from logitless.graph.ops.shape import reshape as reshape
    from logitless.graph.ops.training.loss import cross_entropy as cross_entropy
    from logitless.graph.ops.training.loss import softmax as softmax
    from logitless.graph.ops.training.loss import square_error as square_error
    from logitless.graph.tensor import Tensor as Tensor
    from logitless.graph.tensor import const as const
    from logitless.graph.tensor import feed as feed
    from logitless.graph.testing.evaluate import evaluate as evaluate

_HOMES = {
    "autodiff": ("backward",),
    "execution.session": ("Session",),
    "ops.elementwise": ("add", "gelu", "mul", "scale", "silu", "sub", "sum_to"),
    "ops.gather": ("get_rows",),
    "ops.linear": ("linear", "matmul"),
    "ops.norm": ("rms_norm",),
    "ops.shape": ("reshape",),
    "ops.training.loss": ("cross_entropy", "softmax", "square_error"),
    "tensor": ("Tensor", "const", "feed"),
    "testing.evaluate": ("evaluate",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
# loaded at first use: most programs import modules of the package instead
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'logitless.graph' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"logitless.graph.{_HOME_OF[name]}"), name)
    except AttributeError as error:  # Python would say "cannot import name" and hide the cause
        raise ImportError(f"logitless.graph.{_HOME_OF[name]} cannot be imported: {error}") from error
    return value


def __dir__() -> list[str]:
    return list(__all__)
