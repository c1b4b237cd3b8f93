"""Layer placement: contiguous ranges of layers on devices, the output as one layer more.

The rules are llama-server's (`-ngl`, `--tensor-split`, `--override-tensor`); the result is a
`prefer` of `logitless.graph.execution.partition`: it names the device of each weight or cache, and
the ops that read it follow."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from logitless.graph.execution.division import SEPARATOR
from logitless.graph.execution.expert_cache import CacheMemory, LayerExperts
from logitless.graph.execution.partition import PlacementHint
from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor
from logitless.models.hparams.hparams import Hparams

log = logging.getLogger("logitless.engine")
_OF_LAYER = re.compile(r"(?:^|\.)blk\.(\d+)\.|^(?:cross\.)?(?:[kv]|index|conv|shift|tokens|recurrent)\.(\d+)$")
BESIDE = 512 << 20  # bytes for the process and for pages of the file, where weights exceed memory
OF_ENCODER = re.compile(r"v\.(?!\d+$)|a\.|mm\.|vision\.")
_OF_OUTPUT = re.compile(r"(?:^|\.)(?:output|output_norm|altup_unembd_proj|cls|dense_[23])\.|^(?:sampler_state|hidden)$")
EXPERTS = r"\.ffn_(gate|up|gate_up|down)_exps\."  # names of expert weights
_EXPERTS_OF = re.compile(rf"^(?:lora\.\d+\.)?blk\.(\d+){EXPERTS}")
# The name in the file, within ours.
_WEIGHT = re.compile(r"(?:(?:weights|lora)\.\d+\.)?(.+\.(?:weight|bias|scale|factor))(?:\.[ab])?")


@dataclass(frozen=True)
class Places:
    """Placement of layers on backends, by index. `first` has the embedding and all that layers
    share, `slots` each layer and then the output, `encoder` images. `overrides`: weights by pattern of their
    names; the first match counts. `cached`: layers whose experts are in host memory, and multiply where the layer is.
    """

    first: int
    slots: tuple[int, ...]
    overrides: tuple[tuple[re.Pattern[str], int], ...] = ()
    encoder: int = 0  # device of the vision encoder
    divided: tuple[int, ...] = ()  # devices of the pieces of divided weights (graph/execution/division.py)
    cached: frozenset[int] = frozenset()

    def __call__(self, node: Tensor, state: Tensor) -> PlacementHint:
        name, _, piece = state.name.partition(SEPARATOR)
        layer = self._layer(node, name)
        if piece and layer in self.divided:
            return self.divided[int(piece)], self.divided[int(piece)]
        if self.cached and (experts := _EXPERTS_OF.match(name)) and int(experts[1]) in self.cached:
            return layer, layer
        return self.override_of(name, layer), layer

    def override_of(self, name: str, layer: int) -> int:
        """The device of a weight by the overrides, else its layer's."""
        if self.overrides and (weight := _WEIGHT.fullmatch(name)):
            return next((backend for pattern, backend in self.overrides if pattern.search(weight[1])), layer)
        return layer

    def with_cache(self, experts: Mapping[int, Sequence[str]], host: int) -> Places:
        """Places with a cache for layers whose experts, by name, are all on `host`, and the layer is not."""
        layers = [i for i in experts if self.slots[i] != host]
        on_host = [i for i in layers if all(self.override_of(name, self.slots[i]) == host for name in experts[i])]
        return replace(self, cached=frozenset(on_host))

    def _layer(self, node: Tensor, name: str) -> int:
        if OF_ENCODER.match(name):
            return self.encoder
        if name.startswith("draft."):
            return self.slots[-1]
        if name.startswith("enc."):
            return self.slots[0]
        if layer := _OF_LAYER.search(name):
            return self.slots[int(layer[1] or layer[2])]
        if _OF_OUTPUT.search(name) or (name.endswith("token_embd.weight") and node.op == "linear"):
            # an embedding may be the output's matrix, too: then it lives in both places
            return self.slots[-1]
        return self.first


def proportional(n: int, shares: Sequence[float]) -> list[int]:
    """Slots of each device, n in all, by their shares; llama.cpp's arithmetic, in f32."""
    ends = np.cumsum(np.asarray(shares, np.float32), dtype=np.float32)
    starts = np.arange(n, dtype=np.float32) / np.float32(max(n, 1))
    of = np.searchsorted(ends / ends[-1], starts, side="right")
    return [int(count) for count in np.bincount(of, minlength=len(shares))]


def places(n_layer: int, counts: Sequence[int], devices: Sequence[int], rest: int) -> Places:
    """Placement of the last slots, `counts` on each of `devices`, and the rest on `rest`."""
    slots = [b for b, n in zip(devices, counts, strict=True) for _ in range(n)]
    slots = [rest] * (n_layer + 1 - len(slots)) + slots
    return Places(slots[0], tuple(slots))


def set_placement(
    session: Session, places: Places | None, h: Hparams, weights: Mapping[str, Tensor], memory: CacheMemory
) -> None:
    """Set a session's placement of layers, and the expert cache for it.

    ValueError: `memory` has no room for the experts of one layer."""
    layers = []
    if places is not None and memory.nbytes:
        with_mtp = range(h.n_layer + (h.n_mtp > 0))
        experts = {i: experts_of(weights, i) for i in with_mtp if h.experts_of(i)}
        experts = {i: ws for i, ws in experts.items() if ws and session.backends[places.slots[i]].caches_experts}
        places = places.with_cache({i: [w.name for w in ws] for i, ws in experts.items()}, len(session.backends) - 1)
        for i in sorted(places.cached):
            in_layer = h.experts_of(i)
            assert in_layer
            layers.append(LayerExperts(experts[i], in_layer.n, places.slots[i]))
    session.hint_of = places
    session.cache_experts(layers, memory)
    beyond = beyond_memory(session, h, weights, memory.host_nbytes)
    session.in_file = beyond.names if beyond is not None else frozenset()


def experts_of(weights: Mapping[str, Tensor], layer: int) -> tuple[Tensor, ...]:
    """The expert weights of a layer."""
    names = [f"blk.{layer}.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")]
    return tuple([weights[name] for name in names if name in weights])


@dataclass(frozen=True)
class BeyondMemory:
    """Weights of the CPU that host memory has no room for, which stay in a file."""

    names: frozenset[str]
    nbytes: int  # of these weights
    need: int  # bytes of all weights and states of the CPU
    room: int  # bytes of memory for these
    of_token: int  # bytes of the file that a token reads at most

    def __str__(self) -> str:
        need, room, nbytes, of_token = (f"{n / 2**30:.1f}" for n in (self.need, self.room, self.nbytes, self.of_token))
        return (
            f"the CPU's part of the model needs {need} GiB, memory has room for {room}: {nbytes} GiB are in a file, "
            f"from which each token reads up to {of_token}; a smaller type needs less"
        )


def beyond_memory(
    session: Session, h: Hparams, weights: Mapping[str, Tensor], host_nbytes: int | None
) -> BeyondMemory | None:
    """The weights that exceed `host_nbytes` bytes of host memory: those first of which a token reads least."""
    if host_nbytes is None:
        return None
    cpu, places = len(session.backends) - 1, session.hint_of

    def is_here(t: Tensor) -> bool:
        hint = places(t, t) if places is not None else None
        return (hint[0] if hint is not None else 0) == cpu

    sizes = {t: session.backends[cpu].constant_nbytes(t) for t in weights.values() if is_here(t)}
    need = sum(sizes.values()) + sum(t.nbytes for t in session.states if is_here(t))
    if (cache := session.expert_cache) is not None and cache.packs:
        need += cache.all_nbytes
    if need <= host_nbytes:
        return None

    def share(t: Tensor) -> float:
        """Share of a weight's bytes that a token reads."""
        if t.name == "token_embd.weight" and "output.weight" in weights:
            return 0.0
        experts = h.experts_of(int(layer[1])) if (layer := _EXPERTS_OF.match(t.name)) else None
        return experts.n_used / experts.n if experts else 1.0

    room, names, of_token = max(host_nbytes - BESIDE, 0), set(), 0.0
    over = need - room
    for t in sorted(sizes, key=lambda t: (share(t), -sizes[t])):
        if over > 0:
            over, of_token = over - sizes[t], of_token + sizes[t] * share(t)
            names.add(t.name)
    return BeyondMemory(frozenset(names), sum(sizes[weights[n]] for n in names), need, room, int(of_token))


def prepare_host(session: Session, h: Hparams, weights: Mapping[str, Tensor], memory: CacheMemory) -> bool:
    """Load the experts that devices cache into host memory, if it has room; log which weights and experts have none.

    Returns True if weights have none."""
    if (beyond := beyond_memory(session, h, weights, memory.host_nbytes)) is not None:
        log.warning("%s", beyond)
    if (cache := session.expert_cache) is not None:
        cache.load()
        share = cache.n_slots, cache.n_experts, 100 * cache.n_slots / cache.n_experts
        log.info("expert cache: %d of %d experts (%.1f %%) have room on the devices", *share)
    elif memory.nbytes:
        log.warning("--moe-cache-mib: not used: no experts are on the CPU beside a device that caches them")
    return beyond is not None
