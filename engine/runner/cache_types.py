"""Checks of the types of the KV cache against the heads of a model and its devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from logitless.graph.backend import Backend
from logitless.graph.dtype import KV_TYPES
from logitless.graph.op import OPS
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, variable
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.layer_sizes import LayerSizes

_ATTENTION = ("attention", "latent_attention", "biased_attention", "sparse_attention", "sparse_latent_attention")


def check_types(h: Hparams, type_k: str, type_v: str, of: str = "", drafter: Sequence[LayerSizes | int] = ()) -> None:
    """ValueError for a type that does not exist, or whose blocks do not fit the heads. `of`: end of the flags.
    `drafter`: the sizes of a drafter's layers."""
    heads = {"this model's": [h.sizes(i) for i in range(h.n_layer_kv) if h.attends(i)]}
    heads["the drafter's"] = [sizes for sizes in drafter if not isinstance(sizes, int)]
    # pages of a single row are whole words, which are copied
    whole, indexer = (64, h.compression.index_size) if h.compression else (32, h.indexer.size if h.indexer else 0)
    odd = [(whose, s.head_dim) for whose, sizes in heads.items() for s in sizes if s.head_dim % whole]
    if indexer % whole:
        odd.append(("this model's indexer's", indexer))
    for flag, kind in ((f"cache-type-k{of}", type_k), (f"cache-type-v{of}", type_v)):
        if kind not in KV_TYPES:
            raise ValueError(f"--{flag} {kind}: the cache can be {', '.join(KV_TYPES)}")
        if KV_TYPES[kind].bits and odd:
            whose, size = min(odd, key=lambda pair: pair[1])
            plain = ", ".join(name for name, t in KV_TYPES.items() if not t.bits)
            has = f"needs heads of a multiple of {whole} elements, {whose} have {size}"
            raise ValueError(f"--{flag} {kind}: {has}; {plain} take any")


def refusal(graph: Iterable[Tensor], devices: Sequence[Backend], type_k: str, type_v: str, of: str = "") -> str:
    """A line that names a device without attention over caches of these types, but over those of f16; else ""."""
    for t in toposort(graph):
        if t.op not in _ATTENTION:
            continue
        plain = [variable("", s.shape, "f16") if s.dtype in KV_TYPES and len(s.shape) == 4 else s for s in t.src]
        for device in devices:
            if not device.supports(t) and device.supports(OPS[t.op](*plain, **t.attrs)):
                lacks = f"{device.name} has no attention over these; equal types would do, or another device"
                return f"--cache-type-k{of} {type_k} --cache-type-v{of} {type_v}: {lacks}"
    return ""
