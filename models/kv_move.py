"""KV cache moves: values are copied, keys get RoPE of their new positions."""

from __future__ import annotations

from logitless.graph.ops.attention.paged_attention import load_k, load_v, store_k, store_v
from logitless.graph.ops.rope import rope
from logitless.graph.tensor import Tensor, feed
from logitless.models.architectures.rope import Rotary
from logitless.models.batch import PagedMemory, rotate
from logitless.models.drafters.drafter import FileDrafter
from logitless.models.hparams.hparams import Hparams


def move_cells(
    h: Hparams, rotary: Rotary, memory: PagedMemory, n_cells: int, drafter: FileDrafter | None = None
) -> list[Tensor]:
    """The caches after token slots `from` moved to `to`, `turn` positions further on (inputs
    (n_cells,) i32 each). `drafter`: whose layers lie behind the model's.

    All are read before any is written. This is llama.cpp's K-shift: keys are rotated in f32 and
    rounded to the cache's type again."""
    source, to, turn = (feed(name, (n_cells,), "i32") for name in ("from", "to", "turn"))
    full, local = rotary.shift_angles(turn), rotary.shift_angles(turn, local=True)
    written = []
    for i, (keys, *_) in memory.full.layers.items():
        of, layer, angles = h, i, local if h.is_local(i) and rotary.local_frequency is not None else full
        if drafter is not None and i >= h.n_layer:
            of, layer, angles = drafter.file.hparams, i - h.n_layer, drafter.rotary.shift_angles(turn)
        k = load_k(keys, source)
        if of.has_rope(layer):
            k = rotate(rope(rotate(k, keys), angles, interleaved=of.interleaved), keys)
        written.append(store_k(keys, k, to))
    for i, (_, *values) in memory.full.layers.items():
        if i in memory.indexed:
            index, kind = values.pop(), h.architecture.attention.indexer
            assert kind is not None
            k = rope(rotate(load_k(index, source), index), full, interleaved=kind.interleaved)
            written.append(store_k(index, rotate(k, index), to))
        written += [store_v(cache, load_v(cache, source), to) for cache in values]
    return written
