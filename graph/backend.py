"""The interface of a device: memory, supported ops, compiled programs, optional capabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from logitless.graph.tensor import Tensor

Bytes = npt.NDArray[np.uint8]
# (a node with rewritten sources) → that node, or its replacement
Rewrite = Callable[[Tensor], Tensor]
Rule = TypeVar("Rule")
Kind = tuple[str, tuple[str, ...]]  # of a node: its op and the types of its sources


class Rules(dict[str, Rule]):
    """A backend's table of functions, one an op, by the op's name."""

    def of(self, op_name: str) -> Callable[[Rule], Rule]:
        """Decorator that registers the function as this op's rule."""

        def register(rule: Rule) -> Rule:
            self[op_name] = rule
            return rule

        return register


class Buffer(Protocol):
    """Memory of one backend; its handle (an address, an object of a driver) is private to it."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a tensor's bytes: a buffer and an offset in bytes.

    `host`: the bytes themselves, where the host writes them before a run."""

    buffer: Any
    offset: int = 0
    host: Bytes | None = field(default=None, compare=False)


class Program(Protocol):
    """Compiled nodes. Its inputs are in device memory before `run`, its results after it."""

    def run(self) -> None: ...


class ProfiledProgram(Program, Protocol):
    """Several programs run one after the other, each of them timed."""

    @property
    def seconds(self) -> Sequence[float]:
        """Duration of each program in the last run."""


class Backend(Protocol):
    """A device. Backends inherit this class: members with a value or a body are optional
    capabilities and default to a device without them."""

    name: str
    alignment: int  # of tensors in a buffer, in bytes
    memory_bytes: int  # of the device; 0: it uses host memory
    preemptible: bool = False  # true if `split` cuts programs
    # true if its ops are tried at start; `refuse` gets the failed ones
    self_tested: bool = False
    # device and driver: equal ones give equal bits, and share cached self-test results; "": unknown
    identity: str = ""
    card: bytes = b""  # of the hardware: equal under two drivers; empty: unknown
    closed: bool = False  # true after `close`: nothing may run
    caches_experts: bool = False  # true if rows of its constants can be uploaded apart

    # --- graph and programs -----------------------------------------------------------------------

    def supports(self, t: Tensor) -> bool:
        """True when this node, as it stands in the user's graph, can run here."""

    def refuse(self, ops: Iterable[str]) -> None:
        """Exclude ops that failed the self-test: `supports` is False for them from now on."""
        raise AssertionError(f"{self.name} is not self-tested and refuses no op ({ops})")

    def rewrite(self, t: Tensor) -> Tensor:
        """Replace a node whose sources are rewritten already; most nodes stay."""

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        """Merge nodes of this backend (`mine`) into fewer that give the same values; the new fetches."""

    def prepare(self, nodes: Iterable[Tensor]) -> None:
        """Load the kernels that `compile` of these nodes needs; any thread may call.

        Without this capability kernels are loaded by `compile`."""
        del nodes

    def prefetch_training(self, weight_types: Iterable[str]) -> None:
        """Start to compile kernels of a training step in the background; returns at once.

        `weight_types`: types of frozen weights, whose products need kernels of their own."""
        del weight_types

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> Program:
        """Compile nodes; `locate` finds every node, input and variable that they read or write."""

    def profile(self, programs: Sequence[Any]) -> ProfiledProgram | None:
        """Join programs with a clock between them; None: the host has to time them."""
        del programs
        return None

    def split(
        self, programs: Sequence[Any], seconds: Sequence[float], max_seconds: float, spare_core: bool = False
    ) -> Sequence[Program]:
        """Cut and join programs into ones of about `max_seconds` at most that do the same work.

        `seconds`: duration of each program. `spare_core`: leave one CPU core free where there are
        several. Only `preemptible` backends cut."""
        del seconds, max_seconds, spare_core
        return programs

    # --- memory -----------------------------------------------------------------------------------

    def alloc(self, nbytes: int, *, feeds: bool = False) -> Buffer:
        """Zeroed memory; `feeds`: the host writes it before every run. Raises MemoryError."""

    def constant_nbytes(self, t: Tensor) -> int:
        """Bytes that `load` takes for this constant."""

    def load(self, t: Tensor, raw: Bytes) -> Buffer:
        """Upload a constant's GGUF bytes in the layout that this backend's kernels read."""

    def load_to_file(self, t: Tensor, raw: Bytes) -> Buffer:
        """`load` into a file, mapped into memory; without files, plain `load`."""
        return self.load(t, raw)

    def pack(self, t: Tensor, raw: Bytes) -> Bytes:
        """A constant's GGUF bytes in the layout of `load`, on the host. Only `caches_experts` backends pack."""
        del t
        return raw

    def upload_rows(self, t: Tensor, buffer: Any, row: int, packed: Bytes, of: Tensor, first: int, n: int) -> None:
        """Copy n rows of `packed`, the constant `of` from row `first` on, to those of t on the device from `row` on."""
        raise AssertionError(f"{self.name} caches no experts: {t}, {buffer}, {row}, {len(packed)}, {of}, {first}, {n}")

    def upload(self, location: Location, data: Bytes) -> None:
        """Copy host bytes to the device."""

    def download(self, location: Location, nbytes: int) -> Bytes:
        """A copy of device bytes, or a view that is valid until the next run."""

    def host_view(self, location: Location, nbytes: int) -> Bytes | None:
        """The bytes themselves where device memory is the host's own; None: it is not."""
        del location, nbytes
        return None

    def free_bytes(self) -> int:
        """Bytes of the device's memory that nobody uses; all of it where the driver does not tell."""
        return self.memory_bytes

    # --- life -------------------------------------------------------------------------------------

    def self_test(self, kinds: Sequence[Kind]) -> dict[str, str] | None:
        """Self-test by the device's own host: {op: reason of failure}; None: test it here."""
        del kinds
        return None

    def wait(self) -> None:
        """Return when all work that was started has ended."""

    def close(self) -> None: ...
