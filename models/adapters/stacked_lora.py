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
from logitless.models.adapters.lora import Adapter, matrix_shape, turned
from logitless.models.adapters.low_rank import EMBEDDING, EXPERTS
from logitless.models.weights.tensor_map import TensorSlice

F32 = npt.NDArray[np.float32]
# (handle, scale) of each adapter, in the order of their columns
Mix = tuple[tuple[int, float], ...]
LEAST_COLUMNS = 16


class AdapterChoice(NamedTuple):
    """The weights of a sequence: a full finetune (0: none) and LoRA adapters."""

    weights: int = 0
    mix: Mix = ()


BASE = AdapterChoice()


class StackedLora:
    """Adapters by handle. Handles are never reused, so one always means the same weights."""

    def __init__(self, session: Session, declared: Mapping[str, TensorSlice]) -> None:
        self._session, self._declared = session, declared
        self._columns: dict[int, range] = {}
        self._names: set[str] = set()
        # stacked A and B of each weight, and where an adapter is a DoRA its deltas (n_out, n_columns),
        # each in the first column of its adapter: on the device, and to write them again
        self._stacks: dict[str, tuple[Tensor, ...]] = {}
        self._host: dict[str, tuple[F32, ...]] = {}
        self.n_columns = 0
        self._digests: dict[int, str] = {}  # adapters on the device or remembered
        self.generation = 0  # version of the variables: changes with their shapes
        self._next = 1

    @property
    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Stacked A and B by weight."""
        return {name: (stack[0], stack[1]) for name, stack in self._stacks.items()}

    @property
    def deltas(self) -> dict[str, Tensor]:
        """Stacked deltas by weight."""
        return {name: stack[2] for name, stack in self._stacks.items() if len(stack) > 2}

    def put(self, adapter: Adapter, mix: Mix = ()) -> int:
        """Load an adapter into columns after those of `mix`. ValueError for one with numbers that are not finite."""
        for name, pair in adapter.pairs.items():
            with np.errstate(over="ignore"):
                scaled = pair.b * np.float32(adapter.factor(name))
            halves = (pair.a, scaled, *(() if pair.delta is None else (pair.delta,)))
            if not all(np.isfinite(half).all() for half in halves):
                raise ValueError(f"the adapter of '{name}' holds a number that is not finite")
        handle, self._next = self._next, self._next + 1
        first = self._behind(mix)
        columns = self._room(adapter.rank, first)
        if columns is None or not self._has_stacks(adapter):
            self._grow(adapter, first)
            columns = self._room(adapter.rank, first)
            assert columns is not None
        at = slice(columns.start, columns.stop)
        for name, (a, b, *deltas) in self._host.items():
            by_column, b_columns = self._by_column(name, a), self._columns_of_b(name, b)
            by_column[at], b_columns[at] = 0, 0
            for delta in deltas:
                delta[:, at] = 0
            if name in adapter.pairs:
                pair = adapter.pairs[name]
                own = slice(columns.start, columns.start + pair.rank)
                by_column[own] = self._by_column(name, pair.a)
                b_columns[own] = self._columns_of_pair(name, pair.b * np.float32(adapter.factor(name)))
                if pair.delta is not None:
                    deltas[0][:, columns.start] = pair.delta
            self._write(name)
        self._columns[handle] = columns
        self._digests[handle] = adapter.digest
        return handle

    def keep(self, handles: Iterable[int], remembered: Iterable[int] = ()) -> None:
        """Free the columns of all adapters but these; `remembered`: others whose digests are still needed."""
        in_use = set(handles)
        self._columns = {handle: columns for handle, columns in self._columns.items() if handle in in_use}
        known = self._columns.keys() | set(remembered)
        self._digests = {handle: digest for handle, digest in self._digests.items() if handle in known}

    def digests(self, mix: Mix) -> tuple[tuple[str, float], ...]:
        """(digest, scale) of each adapter of a mix, which identify its bits in any process."""
        return tuple((self._digests[handle], scale) for handle, scale in mix)

    def follows(self, handle: int, mix: Mix) -> bool:
        """True if an adapter is loaded, in columns after those of `mix`."""
        return handle in self._columns and self._behind(mix) <= self._columns[handle].start

    def is_fragmented(self, rank: int, mix: Mix) -> bool:
        """True if enough columns are free for an adapter, but none of them contiguous after `mix`."""
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
        self._stacks = self._states(self._host, self.generation, {})

    def _n_experts(self, name: str) -> int:
        return self._declared[name].n_experts if EXPERTS.fullmatch(name) else 1

    def _by_column(self, name: str, a: F32) -> F32:
        """A stacked A, or one adapter's, with the columns of the stack first; a view."""
        if name == EMBEDDING:
            return a.T
        n = self._n_experts(name)
        return a.reshape(n, -1, a.shape[1]).swapaxes(0, 1) if n > 1 else a

    def _columns_of_b(self, name: str, b: F32) -> F32:
        """A stacked B likewise: that of experts is transposed (LowRank.added_of_experts)."""
        return self._by_column(name, b) if self._n_experts(name) > 1 else b.T

    def _columns_of_pair(self, name: str, b: F32) -> F32:
        n = self._n_experts(name)
        return self._by_column(name, turned(b, n)) if n > 1 else b.T

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
        dora = {name for name, pair in adapter.pairs.items() if pair.delta is not None} | self.deltas.keys()
        host = {name: self._widened(name, n_columns, name in dora) for name in self._declared if name in names}
        stacks = self._states(host, self.generation + 1, self._stacks)
        self._session.delete(t.name for stack in self._stacks.values() for t in stack)
        self._names, self._host, self._stacks, self.n_columns = names, host, stacks, n_columns
        self.generation += 1

    def _has_stacks(self, adapter: Adapter) -> bool:
        """True if there are stacks for all tensors of an adapter."""
        deltas = self.deltas
        return all(
            name in self._names and (pair.delta is None or name in deltas) for name, pair in adapter.pairs.items()
        )

    def _widened(self, name: str, n_columns: int, dora: bool) -> tuple[F32, ...]:
        """A matrix's stacked A and B, and deltas of DoRA, with zeros in the new columns."""
        n_out, n_in = matrix_shape(self._declared[name].shape)
        embedding, n = name == EMBEDDING, self._n_experts(name)
        a = np.zeros((n_out, n_columns) if embedding else (n_columns * n, n_in), np.float32)
        b_shape = (n_columns * n, n_out // n) if n > 1 else (n_in if embedding else n_out, n_columns)
        b = np.zeros(b_shape, np.float32)
        delta = np.zeros((n_out, n_columns if dora else 0), np.float32)
        if name in self._host:
            before_a, before_b, *before = self._host[name]
            self._by_column(name, a)[: self.n_columns] = self._by_column(name, before_a)
            self._columns_of_b(name, b)[: self.n_columns] = self._columns_of_b(name, before_b)
            for old in before:
                delta[:, : self.n_columns] = old
        return (a, b, delta) if dora else (a, b)

    def _states(
        self, host: Mapping[str, tuple[F32, ...]], generation: int, before: Mapping[str, tuple[Tensor, ...]]
    ) -> dict[str, tuple[Tensor, ...]]:
        """Variables with these arrays, in memory beside those that they replace; on an error none is left."""
        tensors: list[Tensor] = []
        stacks: dict[str, tuple[Tensor, ...]] = {}
        try:
            for name, parts in host.items():
                for part, values in zip(("a", "b", "delta"), parts, strict=False):
                    tensors.append(self._session.define(f"lora.{generation}.{name}.{part}", values.shape))
                    self._session.write(tensors[-1].name, values)
                stacks[name] = tuple(tensors[-len(parts) :])
            # a running sequence needs it in the next step; running out of room there would be too
            # late
            for name, old in before.items():
                for t, other in zip(stacks[name], (*old, old[1]), strict=False):  # old[1]: where there were no deltas
                    self._session.colocate(t.name, other.name)
        except BaseException:
            self._session.delete(t.name for t in tensors)
            raise
        return stacks

    def _write(self, name: str) -> None:
        for t, values in zip(self._stacks[name], self._host[name], strict=True):
            self._session.write(t.name, values)
