"""The frequencies of rotary embedding: base, linear, Llama 3 and long factors, YaRN (Peng et al., 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graph.ops.rope import rope_angles
from graph.session import Session
from graph.tensor import Tensor
from models.errors import ModelFileError
from models.gguf_file import GGUFFile
from models.hparams import Hparams
from models.weights import vector


@dataclass(frozen=True)
class Rotary:
    """The frequencies (rope_dim/2,) of a model's layers, and of its sliding-window layers where they differ."""

    frequency: Tensor
    magnitude: float
    local_frequency: Tensor | None = None
    local_magnitude: float = 1.0

    def angles(self, pos: Tensor) -> Tensor:
        return rope_angles(pos, self.frequency, magnitude=self.magnitude)

    def turns(self, n: Tensor, *, local: bool = False) -> Tensor:
        """Angles that move what was rotated already, magnitude and all, by n (T,) positions more."""
        frequency = self.local_frequency if local and self.local_frequency is not None else self.frequency
        return rope_angles(n, frequency, magnitude=1.0)

    def local_angles(self, pos: Tensor) -> Tensor:
        if self.local_frequency is None:
            return self.angles(pos)
        return rope_angles(pos, self.local_frequency, magnitude=self.local_magnitude)


def define_rotary(session: Session, gguf: GGUFFile, h: Hparams, n_ctx: int) -> Rotary:
    """The model's frequencies as constants of the session; `n_ctx` (of one sequence) chooses between long factors."""
    factors = rope_factors(gguf, h, n_ctx)

    def define(name: str, values: npt.NDArray[np.float32]) -> Tensor:
        return session.define(name, values.shape, "f32", lambda: values.view(np.uint8), constant=True)

    frequency, magnitude = frequencies(h, factors)
    rotary = Rotary(define("rope.frequency", frequency), magnitude)
    if h.arch == "gemma3":
        local, local_magnitude = frequencies(h, local=True)
        return replace(rotary, local_frequency=define("rope.local_frequency", local), local_magnitude=local_magnitude)
    return rotary


def frequencies(
    h: Hparams, factors: npt.NDArray[np.float32] | None = None, *, local: bool = False
) -> tuple[npt.NDArray[np.float32], float]:
    """(frequency per pair in rad per position (rope_dim/2,), magnitude of cos and sin).

    `factors` divide the frequencies (`rope_freqs`, `rope_factors_*`); `local`: a sliding-window layer of Gemma 3.
    """
    base = h.rope_base_local if local else h.rope_base
    scaling = h.rope_scaling
    index = np.arange(h.rope_dim // 2, dtype=np.float64)
    extrapolated = base ** (-2.0 * index / h.rope_dim)
    if factors is not None:
        extrapolated = extrapolated / factors.astype(np.float64)
    factor = 1.0 if local or scaling.kind == "none" else scaling.factor
    interpolated = extrapolated / factor
    magnitude = scaling.attn_factor
    if scaling.kind != "yarn" or local:
        return interpolated.astype(np.float32), magnitude

    def pair_at(rotations: float) -> float:
        """The pair that turns this many times within the original context."""
        # 2 ln(base) is 0 for a base of 1, whose pairs all turn alike: then any pair will do
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return h.rope_dim * math.log(turns) / (2 * math.log(base) or 1.0)

    low = max(0.0, math.floor(pair_at(scaling.beta_fast)))
    high = min(h.rope_dim - 1.0, math.ceil(pair_at(scaling.beta_slow)))
    keep = 1 - np.clip((index - low) / max(0.001, high - low), 0, 1)  # 1: turns often, stays as trained
    mixed = interpolated * (1 - keep) + extrapolated * keep
    return mixed.astype(np.float32), magnitude * (1 + 0.1 * math.log(max(1.0, factor)))


def rope_factors(gguf: GGUFFile, h: Hparams, n_ctx: int) -> npt.NDArray[np.float32] | None:
    """The tensor of factors that the file holds for this context, if any; Phi's files do not name their scaling."""
    longer = n_ctx > h.rope_scaling.original_context
    for name in ("rope_freqs.weight", f"rope_factors_{'long' if longer else 'short'}.weight"):
        info = gguf.tensors.get(name)
        if info is not None:
            factors = vector(gguf.bytes_of(name), info.dtype)
            if not (np.isfinite(factors) & (factors > 0)).all():
                raise ModelFileError(gguf.path, f"tensor '{name}' holds a factor that is not positive")
            return factors
    return None
