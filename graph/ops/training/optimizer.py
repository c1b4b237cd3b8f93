"""Optimizer step ops: parameters and moments are variables, written in place; every number is a feed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from logitless.graph.op import Array, Case, Variable, op
from logitless.graph.scalar import elementwise, where
from logitless.graph.tensor import Shape, Tensor

SUM_CHUNK = 4096  # elements of a partial sum of squares
RATE, BETA_1, BETA_2, REST_1, REST_2, EPS, DECAY, CORRECTION_1, CORRECTION_2 = range(9)
N_ADAMW, N_SGD = 9, 2


def adamw_params(
    step: int, rate: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0
) -> npt.NDArray[np.float32]:
    """The feed of `adamw_step` at a step (from 1), computed in float64: 1 − βᵗ needs its bits."""
    if step < 1:
        raise ValueError(f"step {step}: the first one is 1")
    b1, b2 = betas
    values = (rate, b1, b2, 1 - b1, 1 - b2, eps, decay, 1 / (1 - b1**step), 1 / (1 - b2**step))
    return np.array(values, np.float32)


def sgd_params(rate: float, *, decay: float = 0.0) -> npt.NDArray[np.float32]:
    """The feed of `sgd_step`."""
    return np.array([rate, decay], np.float32)


@op(
    "w f32",
    "m f32",
    "v f32",
    "g f32",
    "params f32 (9)",
    "factor f32 ()",
    gives="w",
    needs="w.shape == m.shape == v.shape == g.shape",
    writes=(0, 1, 2),
)
def adamw_step(w: Array, m: Array, v: Array, g: Array, params: Array, factor: Array, *, decays: bool = True) -> Array:
    """A step of AdamW (Loshchilov and Hutter, 2019; torch's formula) on w and its moments m, v, of
    any shape.

    params (9,) f32 as `adamw_params` gives them; the gradient is g · factor, factor being a scalar
    (`clip_factor`). The moments are all the state there is. `decays` False: no weight decay (biases
    and norms)."""
    p = params
    g = g * factor
    m[...] = p[BETA_1] * m + p[REST_1] * g
    v[...] = p[BETA_2] * v + p[REST_2] * g * g
    keep = 1 - p[RATE] * p[DECAY] if decays else 1
    w[...] = w * keep - p[RATE] * (m * p[CORRECTION_1]) / (np.sqrt(v * p[CORRECTION_2]) + p[EPS])
    return w


def _adamw_case(r: np.random.Generator, shape: Shape, decays: bool) -> Case:
    w, m, v = r.normal(size=shape), r.normal(size=shape) * 0.1, r.random(size=shape) * 0.1
    params = adamw_params(3, 1e-2, decay=0.1).astype(np.float64)
    src = [Variable(w, "f32"), Variable(m, "f32"), Variable(v, "f32"), r.normal(size=shape), params, np.array(0.7)]
    return src, {"decays": decays}


adamw_step.case(_adamw_case, (5, 37), True)
adamw_step.case(_adamw_case, (9000,), False)


@op("w f32", "g f32", "params f32 (2)", "factor f32 ()", gives="w", needs="w.shape == g.shape", writes=(0,))
def sgd_step(w: Array, g: Array, params: Array, factor: Array, *, decays: bool = True) -> Array:
    """w · (1 − α·decay) − α·factor·g; params (2,) f32 are α and decay. There is no state."""
    keep = 1 - params[0] * params[1] if decays else 1
    w[...] = w * keep - params[0] * (g * factor)
    return w


@sgd_step.case
def _(r: np.random.Generator) -> Case:
    return [Variable(r.normal(size=(5, 37)), "f32"), r.normal(size=(5, 37)), np.array([0.1, 0.5]), np.array(0.7)], {}


@sgd_step.case
def _(r: np.random.Generator) -> Case:
    src = [Variable(r.normal(size=9000), "f32"), r.normal(size=9000), np.array([0.1, 0.5]), np.array(1.0)]
    return src, {"decays": False}


@op(writes=(0,))
def accumulate(total: Array, x: Array) -> Array:
    """total += x: a state that collects gradients over micro-batches."""
    total += x
    return total


accumulate.case(lambda r: ([Variable(r.normal(size=(70, 130)), "f32"), r.normal(size=(70, 130))], {}))


@op(writes=(0,))
def clear(total: Array) -> Array:
    """total = 0, after everything that reads it."""
    total[...] = 0
    return total


clear.case(lambda r: ([Variable(r.normal(size=(70, 130)), "f32")], {}))


@op(gives="f32 (-(-(x.nbytes // 4) // SUM_CHUNK),)")
def square_sums(x: Array) -> Array:
    """The sum of squares of each 4096 consecutive elements: (⌈n / 4096⌉,)."""
    flat = x.reshape(-1)
    return np.add.reduceat(flat * flat, np.arange(0, flat.size, SUM_CHUNK))


square_sums.case(lambda r: ([r.normal(size=(70, 130))], {}))


@op(gives="f32 ()", needs="sums")
def norm_of_sums(*sums: Array) -> Array:
    """√ of the sum of all elements of any number of vectors: with `square_sums`, the norm of a set of tensors."""
    return np.sqrt(sum(s.sum() for s in sums))


norm_of_sums.case(lambda r: ([r.random(size=3), r.random(size=40), r.random(size=1)], {}))


@elementwise
def clip_factor(norm: Array, limit: Array) -> Array:
    """Factor that clips a norm: limit / norm above the limit, else 1; limit ≤ 0: no clipping."""
    return where(limit > 0, where(norm > limit, limit / norm, 1), 1)


clip_factor.takes("norm f32 ()", "limit f32 ()")


for _norm, _limit in ((3.0, 1.0), (0.5, 1.0), (7.0, 0.0)):
    clip_factor.case(lambda r, n, m: ([np.array(n), np.array(m)], {}), _norm, _limit)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, a scalar."""
    return norm_of_sums(*(square_sums(g) for g in gradients))
