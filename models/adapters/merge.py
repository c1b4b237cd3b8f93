"""LoRA merge: adapters added to the weights of a model file, W + scale · ((alpha / r) · B A + δ ∘ W)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from logitless.models.adapters.lora import Adapter, Pair, fused
from logitless.models.adapters.low_rank import EMBEDDING, EXPERTS
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.write import Data, copied_keys, write_gguf
from logitless.models.hparams.hparams import Hparams
from logitless.models.quantization.quantize import DTYPES, F32, quantize
from logitless.models.quantization.quantize_model import plan_export
from logitless.models.weights.weights import check_weights, numbers_of

# Types of nearly the same numbers
WRITTEN_AS = {"iq1_s": "q5_0", "iq1_m": "q6_k", **dict.fromkeys(("tq1_0", "tq2_0", "q1_0", "q2_0"), "q4_0")}
WRITTEN_AS |= dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "nvfp4"), "q8_0")


def merge(
    path: str | Path, base: GGUFFile, h: Hparams, adapters: Sequence[tuple[Adapter, float]], file_type: str = ""
) -> list[str]:
    """Write the merged model; returns the names of the changed tensors. Tensors keep their type; a
    changed one of a type that is only read gets another (`WRITTEN_AS`). `file_type`: changed matrices
    get the types of this preset, and if it quantizes, all that are floats.

    ModelFileError for a type that cannot be written, and for an adapter of a tied embedding."""
    changes: dict[str, list[tuple[Pair, float, float]]] = {}
    for adapter, scale in adapters:
        for name, pair in fused(adapter, base, h).items():
            factor = scale * (adapter.alpha / pair.rank if adapter.alpha else 1.0)
            changes.setdefault(name, []).append((pair, factor, scale))
    if "token_embd.weight" in changes and "output.weight" not in base.tensors:
        raise ModelFileError(base.path, "the embedding is the output matrix too, and its adapter is for the one only")
    plan = plan_export(base, file_type, changes) if file_type else None
    types = {name: _writable(info.dtype) if name in changes else info.dtype for name, info in base.tensors.items()}
    types = types if plan is None else plan.types
    for name in changes:
        if types[name] not in DTYPES:
            raise ModelFileError(
                base.path, f"tensor '{name}' has type {base.tensors[name].dtype}, which is not written"
            )

    declared = check_weights(base, h)
    ones = {part.source for n, part in declared.items() if n.endswith(".factor") and _matrix_of(part.source) in changes}

    def tensors() -> Iterator[tuple[str, Data]]:
        for name, info in base.tensors.items():
            raw, dtype = base.bytes_of(name), types[name]
            if name in changes:
                raw = quantize(_changed(numbers_of(base, declared, name), name, changes[name]), dtype)
            elif name in ones:  # the changed numbers have it
                yield name, Data(np.ones(info.shape, np.float32), info.shape)
                continue
            elif plan is not None:
                yield name, Data(partial(plan.pieces, name), info.shape, dtype)
                continue
            if dtype == "f32":
                yield name, Data(raw.view(np.float32), info.shape)
            else:
                yield name, Data(raw.reshape(info.shape[0], -1), info.shape, dtype)

    write_gguf(path, h.arch, copied_keys(base.metadata) if plan is None else plan.keys(), tensors())
    return list(changes)


def _matrix_of(scale: str) -> str:
    return scale.removesuffix("scale") + "weight"


def _writable(dtype: str) -> str:
    return dtype if dtype in DTYPES else WRITTEN_AS.get(dtype, dtype)


def _changed(w: F32, name: str, changes: list[tuple[Pair, float, float]]) -> F32:
    base = w
    for pair, factor, scale in changes:
        if pair.delta is not None:
            w = w + np.float32(scale) * pair.delta[:, None] * base
        if EXPERTS.fullmatch(name):
            n = w.shape[0]
            product = pair.b.reshape(n, -1, pair.rank) @ pair.a.reshape(n, pair.rank, -1)
        else:
            product = pair.a @ pair.b.T if name == EMBEDDING else pair.b @ pair.a
        w = w + np.float32(factor) * product.reshape(w.shape)
    return w
