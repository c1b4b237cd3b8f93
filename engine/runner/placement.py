"""Layer placement: assigns layers to devices by the flags and by the devices' memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from logitless.graph.backend import Backend
from logitless.graph.execution.division import Division
from logitless.graph.execution.session import DeviceBytes, Session
from logitless.models.drafters.drafter_file import DrafterFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.weights.placement import EXPERTS, OF_ENCODER, Places, places, proportional

_OF_HEADS = re.compile(r"(?:^|\.)blk\.(\d+)\.attn_[qkv]\.weight$")
ROWS = 32  # of a divided weight: its smallest part
MIN_CTX = 4096  # tokens: a context up to here is tried whatever the memory is
DESKTOP = 512 << 20  # bytes that windows may take meanwhile
Fits = Callable[["Places | None"], bool]


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """llama-server's flags for the devices beside the CPU."""

    # number of last layers, with the output layer; None: as many as fit
    n_gpu_layers: int | None = None
    split: bool = False  # split over all devices; else fill the first device, then the second
    divide: str = ""  # "row": weights are divided between all devices; "tensor": heads of KV caches, too
    shares: tuple[float, ...] = ()  # relative share of each device; (): by memory
    overrides: tuple[tuple[str, str], ...] = ()  # (pattern of tensor names, device)
    expert_cache: int = 0  # bytes on the devices for experts that are on the CPU
    spare: tuple[int, ...] = ()  # MiB of each device that stay free, the last number for all that follow

    def with_experts(self, fits: Callable[[], bool]) -> PlacementOptions:
        """Options with rules for the experts of a cache: all are on the CPU, unless the whole model `fits`."""
        if not self.expert_cache or any("exps" in rule for rule, _ in self.overrides):
            return self
        if self.n_gpu_layers is None and not self.split and fits():
            return replace(self, expert_cache=0)
        return replace(self, overrides=(*self.overrides, (EXPERTS, "cpu")))

    def devices(
        self, requested: Iterable[str], opened: Iterable[str], backends: Sequence[Backend]
    ) -> list[PlacedDevice]:
        """Backends with their `--device` names. `requested` includes devices that were lost."""
        names = dict.fromkeys((*opened, "cpu"))
        others = [name for name in dict.fromkeys(requested) if name != "cpu"]
        shares = dict(zip(others, self.shares, strict=False))
        if not any(shares.get(name) for name in names):
            shares = {name: float(b.memory_bytes or 1) for name, b in zip(names, backends, strict=True)}
        return [PlacedDevice(i, name, shares.get(name, 0.0)) for i, name in enumerate(names)]


ANYWHERE = PlacementOptions()


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """A backend as a place for layers: index, name, and share of a split over the non-CPU devices."""

    index: int
    name: str
    share: float


def division(
    options: PlacementOptions,
    devices: Sequence[PlacedDevice],
    session: Session,
    h: Hparams,
    drafter: DrafterFile | None = None,
) -> Division | None:
    """Division of weights and KV caches between the devices beside the CPU; None: they stay whole."""
    others = [d for d in devices if d.name != "cpu"]
    if not options.divide or len(others) < 2:
        return None
    has_sinks = h.has_sinks or (drafter is not None and any("attn_sinks" in name for name in drafter.parts))
    caches = options.divide == "tensor" and not (
        h.mla or h.compression or h.recurrent or has_sinks or h.alibi or h.n_buckets
    )

    def n_units(name: str, rows: int) -> int:
        """Heads of queries, keys and values stay whole; other weights are cut at multiples of 32 rows. An
        embedding that is the output's matrix, too, is whole on the first device anyway, and encoders stay there,
        as drafters do on the last.
        """
        if name.endswith("token_embd.weight") or OF_ENCODER.match(name) or name.startswith("draft."):
            return 1
        if of_heads := _OF_HEADS.search(name):
            n = h.sizes(int(of_heads[1])).n_head_kv
            return n if rows % n == 0 else 1
        return 1 if rows % ROWS else rows // ROWS

    return Division(session, [d.share for d in others], n_units, caches=caches)


def usable(memory: int, spare: Sequence[int], index: int) -> int:
    """Bytes to use of a device's memory: without `spare` nine tenths, for driver, other plans and adapters."""
    if not spare:
        return memory * 9 // 10
    return memory - (spare[min(index, len(spare) - 1)] << 20)


def room(backend: Backend, spare: Sequence[int], index: int, share: float = 1.0) -> int:
    """Bytes to use of a device: a share of the usable ones, at most what is free less a margin for the desktop."""
    memory = backend.memory_bytes
    margin = min(memory // 20, DESKTOP)
    free = backend.free_bytes()
    return min(int(share * usable(memory, spare, index)), memory if free >= memory else free - margin)


def fit(
    sizes: Sequence[DeviceBytes], backends: Sequence[Backend], spare: Sequence[int] = (), share: float = 1.0
) -> bool:
    """True if every device has enough memory, of which `share` may be used. Host memory is not checked."""
    pairs = [pair for pair in zip(sizes, backends, strict=True) if pair[1].memory_bytes]
    return all(need.total <= room(b, spare, i, share) for i, (need, b) in enumerate(pairs))


def excess(sizes: Sequence[DeviceBytes], backends: Sequence[Backend], spare: Sequence[int], share: float) -> int:
    """Bytes for which devices of their own memory have no room."""
    pairs = enumerate(zip(sizes, backends, strict=True))
    return sum(size.total - room(b, spare, i, share) for i, (size, b) in pairs if b.memory_bytes)


def chosen(
    options: PlacementOptions, devices: Sequence[PlacedDevice], n_layer: int, fits: Fits, *, encoder_device: str = ""
) -> Places | None:
    """Placement of layers; None: each op runs on the first device that supports it.

    `fits` returns True if a placement fits the devices' memory. An override to a lost device is
    ignored. `encoder_device`: the vision encoder is there, whatever the layers are; "": on the first
    device beside the CPU."""
    cpu = next(d.index for d in devices if d.name == "cpu")
    others = [d for d in devices if d.name != "cpu"]
    index = {d.name: d.index for d in devices}
    overrides = tuple((re.compile(pattern), index[name]) for pattern, name in options.overrides if name in index)
    n_slots, n = n_layer + 1, options.n_gpu_layers
    most = n_slots if n is None else min(n, n_slots)

    divided = tuple([d.index for d in others]) if options.divide and len(others) > 1 else ()

    def places_of(counts: Sequence[int]) -> Places:
        counts = [*counts, *[0] * (len(others) - len(counts))]
        encoder = index.get(encoder_device, cpu if not others or cpu == 0 else others[0].index)
        layers = places(n_layer, counts, [d.index for d in others], cpu)
        return replace(layers, overrides=overrides, encoder=encoder, divided=divided)

    def split(k: int) -> Places:
        return places_of(proportional(k, [d.share for d in others]))

    if not others or (n is None and not options.split and not divided and cpu == 0):
        return places_of([]) if overrides or (others and encoder_device) else None
    if options.split:
        return split(most if n is not None else _most(most, lambda k: fits(split(k))))
    if n is not None:
        return places_of([most])
    if divided:
        return places_of([_most(most, lambda k: fits(places_of([k])))])
    if not overrides and not encoder_device and fits(None):
        return None
    counts: list[int] = []
    while len(counts) < len(others):
        before = counts
        counts = [*before, _most(most - sum(before), lambda k, b=before: fits(places_of([*b, k])))]  # type: ignore[misc]
    return places_of(counts)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Largest number up to `limit` that fits (binary search); 0 counts as fitting."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
