"""Which constants are packed, and the packed forms of activations that several products share."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from logitless.backends.host import casts_to_bf16
from logitless.graph.op import Op
from logitless.graph.tensor import Tensor

_packed_acts: OrderedDict[tuple[Any, ...], tuple[tuple[Tensor, ...], Tensor]] = OrderedDict()

# Of activations: their work is handed out in larger parts, for fewer stay in the second-level cache, and they meet
# packed weights of floats in the tiles of kernels/gemm.py, which have to pay for weights made f32 beforehand.
MANY_ROWS = 64


def packed(t: Tensor) -> bool:
    """Whether a source's bytes are a packed weight."""
    return t.op == "state" and bool(t.attrs.get("constant")) and len(t.shape) == 2


def rounded(t: Tensor) -> bool:
    """Whether rows that meet this weight are rounded to bf16."""
    return packed(t) and t.dtype == "bf16" and t.shape[1] % 2 == 0 and casts_to_bf16()


def packed_act(*src: Tensor, how: Op, **attrs: Any) -> Tensor:
    """how(*src), the same node for the same sources. The last few are remembered, with their sources, whose ids stay
    their own."""
    key = (*map(id, src), how.name, *attrs.values())
    if key not in _packed_acts:
        _packed_acts[key] = (src, how(*src, **attrs))
        if len(_packed_acts) > 8:
            _packed_acts.popitem(last=False)
    return _packed_acts[key][1]
