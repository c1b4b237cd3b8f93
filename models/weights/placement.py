"""Layer placement: contiguous ranges of layers on devices, the output as one layer more.

The rules are llama-server's (`-ngl`, `--tensor-split`, `--override-tensor`); the result is a
`prefer` of `logitless.graph.execution.partition`: it names the device of each weight or cache, and
the ops that read it follow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitless.graph.execution.division import SEPARATOR
from logitless.graph.execution.partition import PlacementHint
from logitless.graph.tensor import Tensor

_OF_LAYER = re.compile(r"(?:^|\.)blk\.(\d+)\.|^(?:[kv]|conv|recurrent)\.(\d+)$")
OF_ENCODER = re.compile(r"v\.(?!\d+$)|a\.|mm\.|vision\.")
_OF_OUTPUT = re.compile(r"(?:^|\.)(?:output|output_norm|altup_unembd_proj|cls|dense_[23])\.|^(?:sampler_state|hidden)$")
# The name in the file, within ours.
_WEIGHT = re.compile(r"(?:(?:weights|lora)\.\d+\.)?(.+\.(?:weight|bias|scale))(?:\.[ab])?")


@dataclass(frozen=True)
class Places:
    """Placement of layers on backends, by index. `first` has the embedding and all that layers
    share, `slots` each layer and then the output, `encoder` images. `overrides`: weights by pattern of their
    names; the first match counts."""

    first: int
    slots: tuple[int, ...]
    overrides: tuple[tuple[re.Pattern[str], int], ...] = ()
    encoder: int = 0  # device of the vision encoder
    divided: tuple[int, ...] = ()  # devices of the pieces of divided weights (graph/execution/division.py)

    def __call__(self, node: Tensor, state: Tensor) -> PlacementHint:
        name, _, piece = state.name.partition(SEPARATOR)
        layer = self._layer(node, name)
        if piece and layer in self.divided:
            return self.divided[int(piece)], self.divided[int(piece)]
        if self.overrides and (weight := _WEIGHT.fullmatch(name)):
            for pattern, backend in self.overrides:
                if pattern.search(weight[1]):
                    return backend, layer
        return layer, layer

    def _layer(self, node: Tensor, name: str) -> int:
        if OF_ENCODER.match(name):
            return self.encoder
        if name.startswith("draft."):
            return self.slots[-1]
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
