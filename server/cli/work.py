"""What a run must move and multiply at the least: the arithmetic behind `limit_fraction`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graph.cost import Cost, met_by_chance

if TYPE_CHECKING:
    from models.gguf_file import TensorInfo
    from server.engine import Engine

FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class _Weights:
    """Of the matrices that a token passes (`layers`) and of the output matrix: bytes, and elements by type. Of experts,
    bytes are all of them's, elements those of a token's."""

    layer_bytes: int
    expert_bytes: int
    output_bytes: int
    layer_int8: int
    layer_f32: int
    output_int8: int
    output_f32: int
    n_expert: int
    n_expert_used: int

    def read_bytes(self, n_tokens: int) -> float:
        """Of the layers, by a step of so many tokens: of the experts those that are expected to be chosen, if each
        token chooses by chance."""
        return self.layer_bytes + met_by_chance(self.n_expert, self.n_expert_used, n_tokens) * self.expert_bytes


def _weights(engine: Engine) -> _Weights:
    from models.held import held_nbytes

    tensors, h = engine.gguf.tensors, engine.hparams
    output = tensors.get("output.weight") or tensors["token_embd.weight"]
    names = [name for name in tensors if name.startswith("blk.") and name.endswith(".weight")]
    experts = [tensors[name] for name in names if _of_experts(name, tensors[name])]
    others = [tensors[name] for name in names if len(tensors[name].shape) > 1 and not _of_experts(name, tensors[name])]
    used, n_expert = (h.experts.n_used, h.experts.n) if h.experts else (0, 1)

    def elements(of: list[TensorInfo], *, floats: bool) -> int:
        return sum(math.prod(t.shape) for t in of if (t.dtype in FLOATS) == floats)

    def met(*, floats: bool) -> int:
        return elements(others, floats=floats) + used * elements(experts, floats=floats) // n_expert

    return _Weights(
        layer_bytes=sum(held_nbytes(t.dtype, t.nbytes) for t in others),
        expert_bytes=sum(held_nbytes(t.dtype, t.nbytes) for t in experts),
        output_bytes=held_nbytes(output.dtype, output.nbytes),
        layer_int8=met(floats=False),
        layer_f32=met(floats=True),
        output_int8=elements([output], floats=False),
        output_f32=elements([output], floats=True),
        n_expert=n_expert,
        n_expert_used=used,
    )


def _of_experts(name: str, t: TensorInfo) -> bool:
    """Whether a row meets some parts of it only; of what heads make of a row (models/latent.py) it meets all."""
    return len(t.shape) == 3 and ".attn_" not in name


def _cells_read(engine: Engine, n: int) -> int:
    """Cells that n tokens of one sequence look at, summed over tokens and layers; a window bounds its layers' part."""
    h = engine.hparams
    attending = [layer for layer in range(h.n_layer) if not h.recurrent_of(layer)]
    n_local = sum(map(h.is_local, attending))
    everything = n * (n + 1) // 2
    w = min(h.window or n, n)
    local = w * (w + 1) // 2 + (n - w) * w
    return (len(attending) - n_local) * everything + n_local * local


def _cell_bytes(engine: Engine) -> float:
    """Bytes of one cell of one layer, keys and values."""
    from models.batch import cache_types

    sizes = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}
    h, options = engine.hparams, engine.options
    return h.n_head_kv * h.head_dim * sum(sizes[t] for t in cache_types(h, options.type_k, options.type_v))


def _state_macs(engine: Engine, n: int) -> int:
    """What n tokens recall of states and change in them, in f32 (models/recurrent.py)."""
    r = engine.hparams.recurrent
    return n * sum(r.layers) * (r.n_taps * r.n_columns + 3 * math.prod(r.delta_shape)) if r else 0


def _state_bytes(engine: Engine, n: int) -> int:
    """States of n sequences, read and written."""
    r = engine.hparams.recurrent
    return 2 * n * r.nbytes if r else 0


def _attention_macs(engine: Engine, cells: int) -> int:
    """Keys by queries and probabilities by values, in f32."""
    return 2 * engine.hparams.n_head * engine.hparams.head_dim * cells


def prompt_work(engine: Engine, n_prompt: int, n_batch: int, depth: int = 0) -> Cost:
    """Prompts of n tokens after `depth` others, with logits for the last token of each. Each step reads the weights
    once."""
    w, n = _weights(engine), n_prompt * n_batch
    steps = -(-n // engine.options.n_ubatch)
    cells = n_batch * (_cells_read(engine, depth + n_prompt) - _cells_read(engine, depth))
    return Cost(
        nbytes=steps * w.read_bytes(-(-n // steps)) + w.output_bytes + _state_bytes(engine, n_batch),
        int8_macs=n * w.layer_int8 + n_batch * w.output_int8,
        f32_macs=n * w.layer_f32 + n_batch * w.output_f32 + _attention_macs(engine, cells) + _state_macs(engine, n),
    )


def decode_work(engine: Engine, n_gen: int, n_batch: int, depth: int = 0) -> Cost:
    """n steps of one token of each sequence after `depth` others: every step reads all weights and cells."""
    w, n = _weights(engine), n_gen * n_batch
    cells = n_batch * (_cells_read(engine, depth + n_gen) - _cells_read(engine, depth))
    return Cost(
        nbytes=n_gen * (w.read_bytes(n_batch) + w.output_bytes) + cells * _cell_bytes(engine) + _state_bytes(engine, n),
        int8_macs=n * (w.layer_int8 + w.output_int8),
        f32_macs=n * (w.layer_f32 + w.output_f32) + _attention_macs(engine, cells) + _state_macs(engine, n),
    )
