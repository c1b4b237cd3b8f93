"""Where a model's layers go: what the flags say, and how many fit into the devices' memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from logitless.graph.backend import Backend
from logitless.graph.execution.session import DeviceBytes
from logitless.models.weights.placement import Places, places, proportional

USABLE = 0.9  # of a device's memory: its driver, plans of other sizes and adapters want some, too
Fits = Callable[["Places | None"], bool]


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """llama-server's flags about the devices beside the CPU."""

    n_gpu_layers: int | None = None  # the last layers, the output among them; None: as many as fit
    split: bool = False  # over all devices; otherwise the first has what fits, then the second
    shares: tuple[float, ...] = ()  # of each device; (): by their memory
    overrides: tuple[tuple[str, str], ...] = ()  # (pattern of weights' names, device)

    def devices(self, wanted: Iterable[str], names: Collection[str], backends: Sequence[Backend]) -> list[Device]:
        """The backends with the names that `--device` gives them; `wanted` has those that were lost, too."""
        others = [name for name in dict.fromkeys(wanted) if name != "cpu"]
        shares = dict(zip(others, self.shares, strict=False))
        if not any(shares.get(name) for name in names):
            shares = {name: float(b.memory_bytes or 1) for name, b in zip(names, backends, strict=True)}
        return [Device(i, name, shares.get(name, 0.0)) for i, name in enumerate(names)]


ANYWHERE = PlacementOptions()


@dataclass(frozen=True, slots=True)
class Device:
    """A backend by its index, as a place for layers. `share`: of a split over the devices beside the CPU."""

    index: int
    name: str
    share: float


def fit(sizes: Sequence[DeviceBytes], backends: Sequence[Backend]) -> bool:
    """Whether each device has the memory; the host's is not counted."""
    pairs = zip(sizes, backends, strict=True)
    return all(need.total <= USABLE * backend.memory_bytes for need, backend in pairs if backend.memory_bytes)


def chosen(options: PlacementOptions, devices: Sequence[Device], n_layer: int, fits: Fits) -> Places | None:
    """Who has which layers; None: each op runs on the first device that has it.

    `fits` says whether every device's memory is enough. What is wanted on a device that is not there (it was lost)
    goes where it would go without that wish.
    """
    cpu = next(d.index for d in devices if d.name == "cpu")
    others = [d for d in devices if d.name != "cpu"]
    index = {d.name: d.index for d in devices}
    overrides = tuple((re.compile(pattern), index[name]) for pattern, name in options.overrides if name in index)
    n_slots, n = n_layer + 1, options.n_gpu_layers
    most = n_slots if n is None else min(n, n_slots)

    def made(counts: Sequence[int]) -> Places:
        counts = [*counts, *[0] * (len(others) - len(counts))]
        return replace(places(n_layer, counts, [d.index for d in others], cpu), overrides=overrides)

    def split(k: int) -> Places:
        return made(proportional(k, [d.share for d in others]))

    if not others or (n is None and not options.split and cpu == 0):
        return made([]) if overrides else None
    if options.split:
        return split(most if n is not None else _most(most, lambda k: fits(split(k))))
    if n is not None:
        return made([most])
    if not overrides and fits(None):
        return None
    counts: list[int] = []
    while len(counts) < len(others):
        before = counts
        counts = [*before, _most(most - sum(before), lambda k, b=before: fits(made([*b, k])))]  # type: ignore[misc]
    return made(counts)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to the limit that fits, when less of it needs less; 0 counts as fitting."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
