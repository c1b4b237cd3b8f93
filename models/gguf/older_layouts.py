"""Tensors of older converters, shown in the layout that today's writes.

Qwen 3 Next, 2025: `ssm_in` has for each key head the rows of query, key, values and gates one after
the other; since 2026 they are `attn_qkv` (queries, keys, values) and `attn_gate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from logitless.models.gguf.parse import RowGroups, TensorInfo

_OLD, _QKV, _GATE = ".ssm_in.weight", ".attn_qkv.weight", ".attn_gate.weight"
_SIZES = ("ssm.group_count", "ssm.state_size", "ssm.inner_size")


def in_new_layout(tensors: dict[str, TensorInfo], metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors of a file by their names of today; those that need no change are the same."""
    if metadata.get("general.architecture") != "qwen3next":
        return tensors
    sizes = [size for key in _SIZES if isinstance(size := metadata.get(f"qwen3next.{key}"), int) and size > 0]
    if len(sizes) < len(_SIZES) or sizes[2] % sizes[0]:
        return tensors  # reading the hyper-parameters names the key at fault
    n_groups, n_key, n_value = sizes[0], sizes[1], sizes[2] // sizes[0]
    n_rows = 2 * (n_key + n_value)
    renamed: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        block = name.removesuffix(_OLD)
        if block == name or block + _QKV in tensors or info.shape[:1] != (n_groups * n_rows,):
            renamed[name] = info
            continue
        ends = (0, n_key, 2 * n_key, 2 * n_key + n_value, n_rows)  # of queries, keys, values, gates
        ranges = tuple(pairwise(ends))
        for new, own in ((block + _QKV, ranges[:3]), (block + _GATE, ranges[3:])):
            rows = n_groups * sum(stop - start for start, stop in own)
            renamed[new] = replace(
                info,
                name=new,
                shape=(rows, *info.shape[1:]),
                nbytes=info.nbytes // info.shape[0] * rows,
                source=RowGroups(n_groups * n_rows, n_groups, own),
            )
    return renamed
