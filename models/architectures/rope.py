"""RoPE frequencies: base, linear scaling, NTK, Llama 3 and LongRoPE factors, YaRN (Peng et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.compressed import block_starts
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.rope import FARTHEST, mrope_angles, rope_angles
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor
from logitless.models.architectures.position_bias import define_bias
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.rope_scaling import RopeScalingType
from logitless.models.weights.weights import vector


@dataclass(frozen=True)
class Rotary:
    """RoPE frequencies (rope_dim/2,) of full-attention layers, and of sliding-window layers
    where they differ; biases of scores by distance; hashes of tokens."""

    frequency: Tensor
    magnitude: float
    local_frequency: Tensor | None = None
    temperature: Tensor | None = None  # (positions, 1): attention-temperature scale of queries
    component: Tensor | None = None  # (rope_dim/2,) i32: M-RoPE's component of a position for each pair
    bias: tuple[Tensor, ...] = ()  # models/architectures/position_bias.py
    hashes: Tensor | None = None  # of n-grams (graph/ops/gather.py, ngram_rows)

    def angles(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin (T, 2, rope_dim/2) of full-attention layers, and of sliding-window layers.

        pos: (T,), or (4, T) with M-RoPE: in time, height, width and images.
        """
        if len(pos.shape) == 2:
            assert self.component is not None
            full = mrope_angles(pos, self.frequency, self.component, magnitude=self.magnitude)
        else:
            full = rope_angles(pos, self.frequency, magnitude=self.magnitude)
        if self.local_frequency is None:
            return full, full
        return full, rope_angles(pos, self.local_frequency, magnitude=1.0)

    def start_angles(self, pos: Tensor, sizes: Iterable[int]) -> dict[int, Tensor]:
        """Cos and sin of the first positions of the blocks of these sizes that pos (T,) lie in; 0: no blocks."""
        starts = {size: block_starts(pos, size=size, limit=FARTHEST) for size in sorted({*sizes} - {0})}
        return {size: self.angles(start)[0] for size, start in starts.items()}

    def query_scale(self, pos: Tensor) -> Tensor | None:
        """Attention-temperature scale (T, 1, 1) of queries at these positions, if the model has
        one."""
        return None if self.temperature is None else reshape(get_rows(self.temperature, pos), shape=(-1, 1, 1))

    def score_bias(self, pos: Tensor) -> tuple[Tensor, ...]:
        """Biases of scores (AttentionParams.bias) for keys at these positions, if the model has some."""
        if len(self.bias) < 2:
            return self.bias
        slopes, positions, table = self.bias
        return slopes, get_rows(positions, pos), table

    def shift_angles(self, n: Tensor, *, local: bool = False) -> Tensor:
        """Angles that shift cached keys by n (T,) positions (K-shift); their magnitude is kept."""
        frequency = self.local_frequency if local and self.local_frequency is not None else self.frequency
        return rope_angles(n, frequency, magnitude=1.0)


def define_rotary(session: Session, gguf: GGUFFile, h: Hparams, n_ctx: int, prefix: str = "") -> Rotary:
    """RoPE frequencies as constants of the session, with `prefix` in front of their names; `n_ctx`
    of one sequence selects the long or short factors."""
    factors = rope_factors(gguf, h, n_ctx)

    def define(name: str, values: npt.NDArray[Any]) -> Tensor:
        return session.constant(prefix + name, values)

    frequency, magnitude = frequencies(h, factors)
    if not np.isfinite(frequency).all():
        raise ModelFileError(gguf.path, "its rope.freq_base and rope.scaling give frequencies that are not finite")
    local, temperature = None, None
    if h.rope_base_local:
        local = define("rope.local_frequency", frequencies(h, local=True)[0])
    t = h.temperature
    if t is not None and t.scale and n_ctx + t.offset > t.length:
        steps = (np.arange(n_ctx) + t.offset) // t.length
        scales = 1 + t.scale * np.log(steps + 1)
        temperature = define("attention.temperature", scales.astype(np.float32)[:, None])

    component = define("rope.component", np.array(h.mrope, np.int32)) if h.mrope else None
    hashes = define("ngrams.hashes", h.ngrams.hashes) if h.ngrams else None
    if not frequency.size:  # no layer rotates
        frequency = np.zeros(1, np.float32)
    bias = define_bias(session, gguf, h, n_ctx, prefix)
    return Rotary(define("rope.frequency", frequency), magnitude, local, temperature, component, bias, hashes)


def frequencies(
    h: Hparams, factors: npt.NDArray[np.float32] | None = None, *, local: bool = False
) -> tuple[npt.NDArray[np.float32], float]:
    """(frequency per pair in rad per position (rope_dim/2,), magnitude of cos and sin).

    `factors` divide the frequencies (`rope_freqs`, `rope_factors_*`); `local`: a sliding-window
    layer.
    """
    base = h.rope_base_local if local else h.rope_base
    scaling = h.rope_scaling
    rope_dim = next((h.sizes(i).rope_dim for i in range(h.n_layer) if h.is_local(i) == local), h.rope_dim)
    index = np.arange(rope_dim // 2, dtype=np.float64)
    extrapolated = base ** (-2.0 * index / rope_dim)
    if factors is not None:
        extrapolated = extrapolated / factors[: len(index)].astype(np.float64)
    factor = 1.0 if local or scaling.kind is RopeScalingType.NONE else scaling.factor
    interpolated = extrapolated / factor
    magnitude = scaling.attn_factor
    if scaling.kind is not RopeScalingType.YARN or local:
        return interpolated.astype(np.float32), magnitude

    def pair_at(rotations: float) -> float:
        """The pair with this number of rotations within the original context."""
        # 2 ln(base) is 0 for a base of 1, whose pairs all turn alike: then any pair will do
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(base) or 1.0)

    low = max(0.0, math.floor(pair_at(scaling.beta_fast)))
    high = min(rope_dim - 1.0, math.ceil(pair_at(scaling.beta_slow)))
    # 1: high frequency, extrapolated
    keep = 1 - np.clip((index - low) / max(0.001, high - low), 0, 1)
    mixed = interpolated * (1 - keep) + extrapolated * keep
    taken = 1.0 if h.architecture.rope.yarn_scales_scores and scaling.log_multiplier else scaling.log_multiplier
    more, less = (1 + 0.1 * m * math.log(max(1.0, factor)) for m in (1.0, taken))
    return mixed.astype(np.float32), magnitude * more / less


def rope_factors(gguf: GGUFFile, h: Hparams, n_ctx: int) -> npt.NDArray[np.float32] | None:
    """The file's frequency factors for this context, if any; Phi files do not name their
    scaling."""
    longer = n_ctx > h.rope_scaling.original_context
    for name in ("rope_freqs.weight", f"rope_factors_{'long' if longer else 'short'}.weight"):
        info = gguf.tensors.get(name)
        if info is not None:
            factors = vector(gguf.bytes_of(name), info.dtype)
            if not (np.isfinite(factors) & (factors > 0)).all():
                raise ModelFileError(gguf.path, f"tensor '{name}' holds a factor that is not positive")
            return factors
    return None
