"""Stacked LoRA adapters (S-LoRA, Punica): all adapters of a model in one tensor, one plan for any mix.

An adapter of rank r has r columns of the stack. A row of the batch has its adapters' scales in
their columns and 0 elsewhere. Products are summed over the columns in order, and adding zeros
changes no bit, so a row's result does not depend on the other adapters in the stack. It does
depend on the order of its own, which is that of its mix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor
from logitless.models.adapters.lora import Adapter, matrix_shape
from logitless.models.adapters.low_rank import EMBEDDING
from logitless.models.weights.tensor_map import TensorSlice

F32 = npt.NDArray[np.float32]
# (handle, scale) of each adapter, in the order of their columns
Mix = tuple[tuple[int, float], ...]
LEAST_COLUMNS = 16


class Choice(NamedTuple):
    """The weights of a sequence: a full finetune (0: none) and LoRA adapters."""

    weights: int = 0
    mix: Mix = ()


BASE = Choice()


class StackedLora:
    """Adapters by handle. Handles are never reused, so one always means the same weights."""

    def __init__(self, session: Session, declared: Mapping[str, TensorSlice]) -> None:
        self._session, self._declared = session, declared
        self._columns: dict[int, range] = {}
        self._names: set[str] = set()
        self._host: dict[str, tuple[F32, F32]] = {}  # contents of the device, to write them again
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self.n_columns = 0
        self._digests: dict[int, str] = {}  # adapters on the device or remembered
        self.generation = 0  # version of the variables: changes with their shapes
        self._next = 1

    def put(self, adapter: Adapter, mix: Mix = ()) -> int:
        """Load an adapter into columns after those of `mix`. ValueError for one with numbers
        that are not finite."""
        for name, given in adapter.pairs.items():
            with np.errstate(over="ignore"):
                scaled = given.b * np.float32(adapter.factor(name))
            if not (np.isfinite(given.a).all() and np.isfinite(scaled).all()):
                raise ValueError(f"the adapter of '{name}' holds a number that is not finite")
        handle, self._next = self._next, self._next + 1
        first = self._behind(mix)
        columns = self._room(adapter.rank, first)
        if columns is None or not adapter.pairs.keys() <= self._names:
            self._grow(adapter, first)
            columns = self._room(adapter.rank, first)
            assert columns is not None
        at = slice(columns.start, columns.stop)
        for name, (a, b) in self._host.items():
            by_column = a.T if name == EMBEDDING else a
            by_column[at], b[:, at] = 0, 0
            if name in adapter.pairs:
                pair = adapter.pairs[name]
                own = slice(columns.start, columns.start + pair.rank)
                by_column[own] = pair.a.T if name == EMBEDDING else pair.a
                b[:, own] = pair.b * np.float32(adapter.factor(name))
            self._write(name)
        self._columns[handle] = columns
        self._digests[handle] = adapter.digest
        return handle

    def keep(self, handles: Iterable[int], remembered: Iterable[int] = ()) -> None:
        """Free the columns of all adapters but these; `remembered`: others whose digests are
        still needed."""
        wanted = set(handles)
        self._columns = {handle: columns for handle, columns in self._columns.items() if handle in wanted}
        known = self._columns.keys() | set(remembered)
        self._digests = {handle: digest for handle, digest in self._digests.items() if handle in known}

    def digests(self, mix: Mix) -> tuple[tuple[str, float], ...]:
        """(digest, scale) of each adapter of a mix, which identify its bits in any process."""
        return tuple((self._digests[handle], scale) for handle, scale in mix)

    def follows(self, handle: int, mix: Mix) -> bool:
        """True if an adapter is loaded, in columns after those of `mix`."""
        return handle in self._columns and self._behind(mix) <= self._columns[handle].start

    def is_fragmented(self, rank: int, mix: Mix) -> bool:
        """True if enough columns are free for an adapter, but none of them contiguous after
        `mix`."""
        used = sum(len(columns) for columns in self._columns.values())
        return self._room(rank, self._behind(mix)) is None and used + rank <= self.n_columns // 2

    def __contains__(self, handle: int) -> bool:
        return handle in self._columns

    def row_scales(self, rows: Sequence[Mix], n_rows: int) -> F32:
        """LoRA scales (n_rows, n_columns) of the rows; 0 for other adapters and padding rows."""
        out = np.zeros((n_rows, self.n_columns), np.float32)
        for mix in set(rows):
            which = [i for i, row in enumerate(rows) if row == mix]
            for handle, scale in mix:
                columns = self._columns[handle]
                out[which, columns.start : columns.stop] += np.float32(scale)
        return out

    def move_to(self, session: Session) -> None:
        """Define the same adapters in another session, after a device was lost."""
        self._session = session
        self.pairs = self._states(self._host, self.generation, {})

    def _behind(self, mix: Mix) -> int:
        """First column after those of a mix."""
        return self._columns[mix[-1][0]].stop if mix else 0

    def _room(self, n: int, first: int) -> range | None:
        """The first n contiguous free columns from `first` on."""
        used = {c for columns in self._columns.values() for c in columns}
        for start in range(first, self.n_columns - n + 1):
            if not any(c in used for c in range(start, start + n)):
                return range(start, start + n)
        return None

    def _grow(self, adapter: Adapter, first: int) -> None:
        """Define variables with more columns or more weights; loaded adapters keep their
        columns. On an error the old ones stay."""
        last = max((columns.stop for columns in self._columns.values()), default=0)
        n_columns = max(self.n_columns, LEAST_COLUMNS)
        if self._room(adapter.rank, first) is None:
            while n_columns < last + adapter.rank:
                n_columns *= 2
        names = self._names | adapter.pairs.keys()
        host = {name: self._widened(name, n_columns) for name in self._declared if name in names}
        pairs = self._states(host, self.generation + 1, self.pairs)
        self._session.delete(t.name for pair in self.pairs.values() for t in pair)
        self._names, self._host, self.pairs, self.n_columns = names, host, pairs, n_columns
        self.generation += 1

    def _widened(self, name: str, n_columns: int) -> tuple[F32, F32]:
        """A matrix's stacked A and B, with zeros in the new columns."""
        n_out, n_in = matrix_shape(self._declared[name].shape)
        embedding = name == EMBEDDING
        a = np.zeros((n_out, n_columns) if embedding else (n_columns, n_in), np.float32)
        b = np.zeros((n_in if embedding else n_out, n_columns), np.float32)
        if name in self._host:
            before_a, before_b = self._host[name]
            (a.T if embedding else a)[: self.n_columns] = before_a.T if embedding else before_a
            b[:, : self.n_columns] = before_b
        return a, b

    def _states(
        self, host: Mapping[str, tuple[F32, F32]], generation: int, before: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Variables with these arrays, in memory beside those that they replace; on an error
        none is left."""
        made: list[Tensor] = []
        try:
            for name, halves in host.items():
                for half, values in zip("ab", halves, strict=True):
                    made.append(self._session.define(f"lora.{generation}.{name}.{half}", values.shape))
                    self._session.write(made[-1].name, values)
            pairs = dict(zip(host, zip(made[::2], made[1::2], strict=True), strict=True))
            # a running sequence needs it in the next step; running out of room there would be too
            # late
            for name, old in before.items():
                for t, other in zip(pairs[name], old, strict=True):
                    self._session.colocate(t.name, other.name)
        except BaseException:
            self._session.delete(t.name for t in made)
            raise
        return pairs

    def _write(self, name: str) -> None:
        for t, values in zip(self.pairs[name], self._host[name], strict=True):
            self._session.write(t.name, values)
