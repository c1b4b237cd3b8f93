"""Logits processors: functions of the program that change the logits of a row before the sampler chain.

They run on the host. So the device returns all logits for a row that has some, and the chain runs on the
host, too, by its definition (graph/ops/sampling/sample.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.ops.sampling import samplers as s
from logitless.graph.ops.sampling.sample import sample

F32 = npt.NDArray[np.float32]
# (generated ids, logits) or (prompt's ids, generated ids, logits) → logits, f32 (n_vocab,)
LogitsProcessor = Callable[..., Any]


def process(processors: Sequence[LogitsProcessor], prompt: Sequence[int], generated: Sequence[int], logits: F32) -> F32:
    """The logits after the processors, in order. ValueError: one of them failed."""
    for processor in processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            n = len(inspect.signature(processor).parameters)
            before = (list(prompt),) if n == 3 else ()
            result = np.asarray(processor(*before, list(generated), logits.copy()), np.float32)
        except Exception as error:
            raise ValueError(f"logits_processors: {name}: {type(error).__name__}: {error}") from error
        if result.shape != logits.shape or np.isnan(result).any():
            raise ValueError(f"logits_processors: {name}: its result is not {len(logits)} numbers")
        logits = result
    return logits


class HostSampler:
    """The op `sample` of one sequence, on the host. It has the state that is else on the device."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = np.zeros((1, s.N_STATE), np.float32)

    def sample(self, logits: F32, row: Any) -> int:
        """The packed token of a sampler's row (engine/sampling/sampler.py)."""
        bits = row.mask.wait(0.0) if row.mask is not None else None
        masks: list[npt.NDArray[Any]] = []
        if bits is not None:
            words = np.zeros((1, -(-len(logits) // 32)), np.uint32)
            words[0, : len(bits)] = bits
            masks = [words, np.zeros(1, np.int32)]
        out = sample.reference(
            logits[None],
            self._state,
            row.params[None],
            row.chain[None],
            np.array(row.draws, np.uint32).reshape(-1, 4)[: 2 if masks else 1],
            np.array([0, len(row.ids)], np.int32),
            np.array(row.kinds, np.int32),
            np.array(row.ids, np.int32),
            np.array(row.values, np.float32),
            np.zeros(1, np.int32),
            *masks,
        )
        return int(out.view(np.uint32)[0, 0])
