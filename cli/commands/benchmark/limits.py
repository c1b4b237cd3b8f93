"""Least bytes and multiply-adds of a run: the arithmetic behind `limit_fraction`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logitless.backends.host import casts_to_bf16
from logitless.graph.execution.cost import Cost, expected_expert_fraction, macs_of

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.models.gguf.file import TensorInfo


@dataclass(frozen=True)
class _Weights:
    """Bytes and multiply-adds a row of the matrices in the layers and of the output matrix.

    Bytes count all experts, multiply-adds those of one token."""

    layer_bytes: int
    expert_bytes: int
    output_bytes: int
    layers: Cost
    output: Cost
    n_expert: int
    n_expert_used: int

    def read_bytes(self, n_tokens: int) -> float:
        """Bytes of the layers that a step of so many tokens reads, with the experts expected by random routing."""
        used = expected_expert_fraction(self.n_expert, self.n_expert_used, n_tokens)
        return self.layer_bytes + used * self.expert_bytes


def _weights(engine: ModelRunner) -> _Weights:
    tensors, h = engine.gguf.tensors, engine.hparams
    output = tensors.get("output.weight") or tensors["token_embd.weight"]
    names = [name for name in tensors if name.startswith("blk.") and name.endswith(".weight")]
    experts = [tensors[name] for name in names if _of_experts(name, tensors[name])]
    others = [tensors[name] for name in names if len(tensors[name].shape) > 1 and not _of_experts(name, tensors[name])]
    used, n_expert = (h.experts.n_used, h.experts.n) if h.experts else (0, 1)

    return _Weights(
        layer_bytes=sum(t.nbytes for t in others),
        expert_bytes=sum(t.nbytes for t in experts),
        output_bytes=output.nbytes,
        layers=sum((_met(t) for t in others), Cost()) + sum((_met(t, used / n_expert) for t in experts), Cost()),
        output=_met(output),
        n_expert=n_expert,
        n_expert_used=used,
    )


def _met(t: TensorInfo, part: float = 1) -> Cost:
    """A row's multiply-adds with a matrix, or, less than 1, with a part of experts."""
    return macs_of(math.prod(t.shape) * part, t.dtype, rounded=t.dtype == "bf16" and casts_to_bf16())


def _of_experts(name: str, t: TensorInfo) -> bool:
    """True for expert matrices, of which a row uses some; a row uses all heads of an MLA matrix."""
    return len(t.shape) == 3 and ".attn_" not in name


def _elements_read(engine: ModelRunner, n: int) -> tuple[int, int]:
    """Elements of keys (or values) that n tokens of one sequence read, summed over tokens and layers.

    Returns (elements, elements times the query heads that read each). A sliding window bounds its layers' part.
    """
    h, read, met = engine.hparams, 0, 0
    everything = n * (n + 1) // 2
    w = min(h.window or n, n)
    local = w * (w + 1) // 2 + (n - w) * w
    for layer in range(h.n_layer):
        if not h.attends(layer):
            continue
        size, cells = h.sizes(h.kv_source(layer)), local if h.is_local(layer) else everything
        read += size.n_head_kv * size.head_dim * cells
        met += size.n_head * size.head_dim * cells
    return read, met


def _read(engine: ModelRunner, first: int, last: int, n_batch: int) -> tuple[float, int]:
    """(bytes of the KV cache, f32 multiply-adds of attention) of n_batch sequences, from token `first` to `last`."""
    from logitless.graph.dtype import DTYPES
    from logitless.models.batch import cache_types

    options = engine.options
    (elements, met), (before, met_before) = (_elements_read(engine, n) for n in (last, first))
    each = sum(DTYPES[t].nbytes / DTYPES[t].block for t in cache_types(engine.hparams, options.type_k, options.type_v))
    return n_batch * (elements - before) * each, 2 * n_batch * (met - met_before)


def _state_macs(engine: ModelRunner, n: int) -> int:
    """f32 multiply-adds of n tokens with recurrent state (models/architectures/linear_attention.py)."""
    r = engine.hparams.recurrent
    return n * sum(r.layers) * (r.n_taps * r.n_columns + 3 * math.prod(r.state_shape)) if r else 0


def _state_bytes(engine: ModelRunner, n: int) -> int:
    """Bytes of recurrent state that n sequences read and write."""
    r = engine.hparams.recurrent
    return 2 * n * r.nbytes if r else 0


def prompt_work(engine: ModelRunner, n_prompt: int, n_batch: int, depth: int = 0) -> Cost:
    """Cost of prefill: n tokens after `depth` others, with logits of the last one. Each step reads the weights once."""
    w, n = _weights(engine), n_prompt * n_batch
    steps = -(-n // engine.options.n_ubatch)
    _, macs = _read(engine, depth, depth + n_prompt, n_batch)
    moved = steps * w.read_bytes(-(-n // steps)) + w.output_bytes + _state_bytes(engine, n_batch)
    return w.layers * n + w.output * n_batch + Cost(moved, f32_macs=macs + _state_macs(engine, n))


def decode_work(engine: ModelRunner, n_gen: int, n_batch: int, depth: int = 0) -> Cost:
    """Cost of decode: n steps of a token a sequence after `depth` others. Each step reads all weights and cells."""
    w, n = _weights(engine), n_gen * n_batch
    of_cache, macs = _read(engine, depth, depth + n_gen, n_batch)
    moved = n_gen * (w.read_bytes(n_batch) + w.output_bytes) + of_cache + _state_bytes(engine, n)
    return (w.layers + w.output) * n + Cost(moved, f32_macs=macs + _state_macs(engine, n))
