"""Which constants are packed, and the packed forms of activations that several products share."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from graph.op import Op
from graph.tensor import Tensor

_packed_acts: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = OrderedDict()

MANY_ROWS = 64  # of activations, whose work is handed out in larger parts; fewer stay in the second-level cache


def packed(t: Tensor) -> bool:
    """Whether a source's bytes are a packed weight."""
    return t.op == "state" and bool(t.attrs.get("constant")) and len(t.shape) == 2


def packed_act(x: Tensor, how: Op, **attrs: Any) -> Tensor:
    """how(x), the same node for the same x. The last few are remembered, with x itself so that its id stays its own."""
    key = (id(x), how.name, *attrs.values())
    if key not in _packed_acts:
        _packed_acts[key] = (x, how(x, **attrs))
        if len(_packed_acts) > 8:
            _packed_acts.popitem(last=False)
    return _packed_acts[key][1]
