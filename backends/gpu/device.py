"""Backend protocol of OpenCL and Vulkan, as far as they share it: supports, fuse, lower, pack."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from logitless.backends.gpu import elementwise, experts, gather, norm, recurrent, rope, slicing  # noqa: F401  (each registers its kernels and rules)
from logitless.backends.gpu.attention import (  # noqa: F401
    attention_cpu,
    causal,
    chunks,
    compressed,
    encoder,
    hadamard,
    kv_store,
    mla,
    paged_attention_backward,
    sparse,
)
from logitless.backends.gpu.fuse import fuse
from logitless.backends.gpu.language.dialect import Shape, TooLarge
from logitless.backends.gpu.lowering import LOWERINGS, REWRITES, Dispatch, is_packed
from logitless.backends.gpu.matmul import gemm, layout, linear, moe_linear  # noqa: F401
from logitless.backends.gpu.quantize import joined
from logitless.backends.gpu.sampling import log_probs  # noqa: F401
from logitless.backends.gpu.training import conv, loss, optimizer  # noqa: F401
from logitless.backends.submissions import Rates, split
from logitless.graph.backend import Backend, Bytes, Location
from logitless.graph.tensor import ALIASES, Tensor

log = logging.getLogger("logitless.devices")
READS_PACKED = {  # sources that may be a constant matrix
    "linear": (1,),
    "linear_add": (1,),
    "linear_glu": (1, 2),
    "linear_parts": range(1, 4),
    "norm_parts": range(2, 5),
    "norm_glu": (2, 3),
    "matmul": (1,),
    "expert_linear": (1,),
    "expert_matmul": (1,),
    "expert_parts": range(2, 4),
    "get_rows": (0,),
    "cast": (0,),
}


def supports(t: Tensor, shape: Shape, device: str) -> bool:
    """True if a node of the user's graph can run on a device. Its limits are named in the log, once."""
    try:
        return t.op in ALIASES or dispatches(t, shape) is not None
    except TooLarge as error:
        _log_limit(device, t.op, str(error))
        return False


@functools.cache
def _log_limit(device: str, op: str, reason: str) -> None:
    log.warning("%s: %s runs on the next device: kernel %s", device, op, reason)


def rewrite(t: Tensor) -> Tensor:
    """The node that runs in place of t, whose sources are rewritten already."""
    rule = REWRITES.get(t.op)
    return rule(t) if rule else t


def dispatches(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    """The launches of a node, in order; None when there is no kernel for it. Raises TooLarge."""
    rule = LOWERINGS.get(t.op)
    readable = READS_PACKED.get(t.op, ())
    if rule is None or any(is_packed(s) and not (i in readable and layout.packs(s)) for i, s in enumerate(t.src)):
        return None
    return rule(t, shape)


def lower_all(nodes: Sequence[Tensor], shape: Shape) -> list[Dispatch]:
    """The launches of consecutive nodes on one device. ValueError names a node without a kernel."""
    launches: list[Dispatch] = []
    waiting = deque(nodes)
    while waiting:
        t = waiting.popleft()
        together = bool(waiting) and kv_store.stores_together(t, waiting[0])
        own = kv_store.store_turned(t, shape, waiting.popleft()) if together else dispatches(t, shape)
        if own is None:
            raise ValueError(f"no kernel for {t!r}")
        launches += own
    return joined(launches, shape)


def constant_nbytes(t: Tensor) -> int:
    """Bytes of a constant variable once packed."""
    return layout.packed_nbytes(t.dtype, t.shape[0], t.shape[1]) if is_packed(t) and layout.packs(t) else t.nbytes


def pack(t: Tensor, raw: Bytes, shape: Shape) -> Bytes:
    """Pack a constant variable's GGUF bytes: a matrix as kernels read it, anything else as it is."""
    if len(raw) != t.nbytes:
        raise ValueError(f"state {t.name!r}: {t.nbytes} bytes expected, {len(raw)} given")
    return layout.pack(t.dtype, t.shape, raw, wide=shape.dot) if is_packed(t) and layout.packs(t) else raw


class GPUBackend(Backend):
    """A device whose kernels are those of this package. `program`: its programs, of (backend, launches)."""

    preemptible = True
    self_tested = True
    caches_experts = True
    program: ClassVar[Callable[..., Any]]
    shape: Shape

    def __init__(self) -> None:
        self.rates = Rates()
        self.refused: set[str] = set()  # ops that a self-test found wrong
        self.variant = 0  # that the last run with a choice took (lowering.py): the next program is made for it

    def supports(self, t: Tensor) -> bool:
        return t.op not in self.refused and supports(t, self.shape, self.name)

    def refuse(self, ops: Iterable[str]) -> None:
        self.refused.update(ops)

    def rewrite(self, t: Tensor) -> Tensor:
        return rewrite(t)

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        return fuse(fetches, mine, self.refused, self.shape)

    def constant_nbytes(self, t: Tensor) -> int:
        return constant_nbytes(t)

    def pack(self, t: Tensor, raw: Bytes) -> Bytes:
        return pack(t, raw, self.shape)

    def upload_rows(self, t: Tensor, buffer: Any, row: int, packed: Bytes, of: Tensor, first: int, n: int) -> None:
        places = (t.shape[0], row), (of.shape[0], first)
        for to, start, nbytes in layout.row_copies(t.dtype, t.shape[1], n, *places):
            self.upload(Location(buffer, to), packed[start : start + nbytes])

    def split(
        self, programs: Sequence[Any], seconds: Sequence[float], max_seconds: float, spare_core: bool = False
    ) -> list[Any]:
        """Programs of about `max_seconds`, or of one node where that takes longer. `spare_core`: no matter."""
        return split(programs, seconds, max_seconds, functools.partial(type(self).program, self))
