"""What a device must offer: memory, a say in which ops it runs, and programs that run without Python in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from logitless.graph.tensor import Tensor

Bytes = npt.NDArray[np.uint8]
Rewrite = Callable[[Tensor], Tensor]  # from a node whose sources are rewritten already: it, or what stands in its place
Rule = TypeVar("Rule")


class Rules(dict[str, Rule]):
    """What a backend does with each op, by the op's name."""

    def of(self, op_name: str) -> Callable[[Rule], Rule]:
        """A decorator: the function is this op's rule."""

        def register(rule: Rule) -> Rule:
            self[op_name] = rule
            return rule

        return register


class Buffer(Protocol):
    """Memory of one backend. What is behind it (an address, a handle) is the backend's own business."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes are."""

    buffer: Any
    offset: int = 0


class Program(Protocol):
    """A compiled run of nodes. Feeds are already in their places, results are left in theirs."""

    def run(self) -> None: ...


class Backend(Protocol):
    name: str
    alignment: int
    memory_bytes: int  # of the device; 0: the host's

    def supports(self, t: Tensor) -> bool:
        """Whether this node can run here, as it stands in the user's graph."""

    def rewrite(self, t: Tensor) -> Tensor:
        """What this backend runs in the node's place; its sources are rewritten already. Usually t itself."""

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        """The same values from fewer nodes: of those that are `mine` to run, some may become one. Usually as given."""

    def alloc(self, nbytes: int, *, feeds: bool = False) -> Buffer:
        """Zeroed memory; `feeds`: the host writes it before every run. MemoryError when there is not enough."""

    def constant_nbytes(self, t: Tensor) -> int:
        """Bytes that `load` will take for this constant state."""

    def load(self, t: Tensor, raw: Bytes) -> Buffer:
        """A constant state's GGUF bytes, laid out as this backend's ops read them."""

    def upload(self, place: Place, data: Bytes) -> None: ...

    def download(self, place: Place, nbytes: int) -> Bytes:
        """A copy, or a view that is valid until the next run."""

    def wait(self) -> None:
        """Return when everything that was started has ended."""

    def compile(self, nodes: Sequence[Tensor], place: Callable[[Tensor], Place]) -> Program:
        """`place` gives the memory of any node, feed or state that the nodes touch."""

    def close(self) -> None: ...


@runtime_checkable
class Visible(Protocol):
    """A backend whose memory is the host's own."""

    def seen(self, place: Place, nbytes: int) -> Bytes:
        """The bytes themselves."""


class TimedProgram(Program, Protocol):
    @property
    def seconds(self) -> Sequence[float]:
        """What each program took in the last run."""


@runtime_checkable
class Times(Protocol):
    """A backend that can look at a clock between programs without leaving the device."""

    def timed(self, programs: Sequence[Any]) -> TimedProgram:
        """These programs of its own, one after the other."""


@runtime_checkable
class Divides(Protocol):
    """A backend whose programs can be cut anew, in the middle of a node, too."""

    def divide(
        self, programs: Sequence[Any], seconds: Sequence[float], most: float, spare: bool = False
    ) -> Sequence[Program]:
        """Other programs for the same work, of at most about `most` seconds each; `programs` are its own, which
        took `seconds`. `spare`: they leave a processor of the host's to others, where there are several."""
