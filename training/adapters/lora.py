"""LoRA parameters of a model, their start (at random, PiSSA, DoRA's norms), and the adapter that they make."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, mul, scale, scaled, sum_to
from logitless.graph.ops.linear import linear
from logitless.graph.ops.pointwise import div, sqrt
from logitless.graph.ops.shape import detached, reshape
from logitless.graph.ops.slicing import set_block, transpose
from logitless.graph.tensor import Tensor, const
from logitless.models.adapters.lora import Adapter, matrix_shape, turned
from logitless.models.adapters.low_rank import EMBEDDING, EXPERTS, NORMS, LowRank
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model
from logitless.models.weights.weights import check_weights, numbers_of
from logitless.training.adapters.options import LoraOptions
from logitless.training.errors import TrainingError
from logitless.training.trainable import LORA, Trainable

F32 = npt.NDArray[np.float32]
EXACT_SVD = 512  # rows or columns up to which PiSSA's singular vectors are exact
SVD_ROUNDS = 16  # of the power iteration of larger matrices, as peft's pissa_niter_16


def lora(
    session: Session,
    model: Model,
    options: LoraOptions,
    prefix: str = "train",
    gguf: GGUFFile | None = None,
) -> Trainable:
    """LoRA parameters with product 0: A is normal with deviation 1/√n_in, B is 0. Other starts
    read the weights from `gguf`."""
    tensors = model.weights.tensors
    options.check_targets(tensors.keys())
    rng = np.random.default_rng([options.seed, 4])
    weight_of = None if gguf is None else _reader(gguf, model.hparams)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    factors: dict[str, float] = {}
    deltas: dict[str, Tensor] = {}
    params: list[tuple[str, Tensor]] = []
    frozen: list[tuple[str, Tensor]] = []

    def define(kind: list[tuple[str, Tensor]], name: str, values: F32) -> Tensor:
        kind.append((name, session.define(f"{prefix}.{name}", values.shape, source=_bytes_of(values))))
        return kind[-1][1]

    for name, w in tensors.items():
        rank = options.rank_of(name)
        if rank <= 0:
            continue
        n_out, n_in = matrix_shape(w.shape)
        n = 1
        if EXPERTS.fullmatch(name):
            n, n_out = _experts(name, gguf, model.hparams)
        a_shape, b_shape = ((n_out, rank), (n_in, rank)) if name == EMBEDDING else ((n * rank, n_in), (n_out, rank))
        if n > 1:  # B transposed, see LowRank.added_of_experts
            b_shape = (n * rank, n_out // n)
        start = (rng.standard_normal(a_shape, np.float32) / np.float32(np.sqrt(n_in))).astype(np.float32)
        factors[name] = factor = options.factor(name)
        if options.start == "gaussian" and not options.dora:
            a = define(params, f"{name}.lora_a", start)
            params.append((f"{name}.lora_b", session.define(f"{prefix}.{name}.lora_b", b_shape)))
            pairs[name] = a, params[-1][1]
            continue
        if name == EMBEDDING or NORMS.fullmatch(name) or EXPERTS.fullmatch(name):
            field = "lora_dora" if options.dora else "lora_init"
            raise TrainingError(f"{field}: is of matrices of the blocks and the output, not of '{name}'")
        assert weight_of is not None
        values = weight_of(name)
        if options.dora:
            a = define(params, f"{name}.lora_a", start)
            b = define(params, f"{name}.lora_b", np.zeros(b_shape, np.float32))
            squares = np.square(values, dtype=np.float64).sum(1).astype(np.float32)
            m = define(params, f"{name}.lora_m", np.sqrt(squares))
            scale_of_w = model.weights.factor(name.removesuffix(".weight"))
            squared = define(frozen, f"{name}.squares", squares)
            pairs[name], deltas[name] = dora(w, scale_of_w, a, b, m, squared, factor)
            factors[name] = 1.0
            continue
        a0, b0 = principal(values, rank, factor, options.seed)
        a, b = define(params, f"{name}.lora_a", a0), define(params, f"{name}.lora_b", b0)
        pairs[name] = (
            set_block(define(frozen, f"{name}.pissa_a", np.concatenate([0 * a0, a0])), a, start=(0, 0)),
            set_block(define(frozen, f"{name}.pissa_b", np.concatenate([0 * b0, -b0], 1)), b, start=(0, 0)),
        )
    if not pairs:
        raise TrainingError("no tensor is left to train: all ranks are 0")
    names, variables = zip(*params, strict=True)
    adapted = model.adapted(LowRank(pairs, factors=factors, deltas=deltas))
    return Trainable(LORA, session, adapted, variables, names, options, frozen=tuple(frozen))


def dora(
    w: Tensor, scale_of_w: Tensor | None, a: Tensor, b: Tensor, m: Tensor, squares: Tensor, factor: float
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """DoRA's pair (A, d B) and d − 1 (n_out,), for d = m / ‖W + factor · B A‖ of each row.

    The norm has no gradient, as in the paper (4.3). Its square is ‖W‖² (`squares`, of the file's
    weights) + 2 factor B·(A Wᵀ) + factor² B A Aᵀ Bᵀ, so that W is read by one product of r rows."""
    b = scaled(b, factor)
    products = linear(a, w) if scale_of_w is None else mul(linear(a, w), scale_of_w)
    cross = sum_to(mul(b, transpose(products, axes=(1, 0))), shape=(b.shape[0], 1))
    own = sum_to(mul(b, linear(b, linear(a, a))), shape=(b.shape[0], 1))
    total = add(reshape(squares, shape=(b.shape[0], 1)), add(scale(cross, factor=2.0), own))
    norm = detached(sqrt(total))
    d = div(reshape(m, shape=norm.shape), norm)
    return (a, mul(b, d)), reshape(add(d, const(-1.0)), shape=m.shape)


def principal(w: F32, rank: int, factor: float, seed: int) -> tuple[F32, F32]:
    """PiSSA's A (r, n_in) and B (n_out, r): factor · B A is the best approximation of W of this
    rank. Large matrices: by subspace iteration (Halko et al., 2011)."""
    if rank > min(w.shape):
        raise TrainingError(
            f"lora_r: {rank} is more than a matrix of {w.shape[0]} × {w.shape[1]} has for lora_init pissa"
        )
    w = w.astype(np.float64 if min(w.shape) <= EXACT_SVD else np.float32)
    if min(w.shape) <= EXACT_SVD:
        u, s, v = np.linalg.svd(w, full_matrices=False)
    else:
        q = np.random.default_rng([seed, 6]).standard_normal((w.shape[1], min(rank + 8, *w.shape)), np.float32)
        for _ in range(SVD_ROUNDS):
            q = np.linalg.qr(w.T @ np.linalg.qr(w @ q)[0])[0]
        u, s, small = np.linalg.svd(w @ q, full_matrices=False)
        v = small @ q.T
    root = np.sqrt(s[:rank] / factor)
    a, b = root[:, None] * v[:rank], u[:, :rank] * root
    return np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)


def start_from(trainable: Trainable, adapter: Adapter) -> None:
    """Begin with an adapter's values instead. TrainingError: it has not these tensors and ranks.

    Of a fused matrix the file has one pair, with A stacked and B block-diagonal; a part's own
    columns are those where its B is not 0."""
    options = trainable.lora
    assert options is not None
    values: dict[str, F32] = {}
    for name in (n.removesuffix(".lora_a") for n in trainable.names if n.endswith(".lora_a")):
        pair = adapter.pairs.get(name)
        if pair is None:
            raise TrainingError(f"the adapter has no tensor '{name}.lora_a'")
        a, b = pair.a, pair.b
        if (rank := options.rank_of(name)) < pair.rank:
            first = int(b.any(axis=0).argmax()) // rank * rank
            a, b = a[first : first + rank], b[:, first : first + rank]
        if EXPERTS.fullmatch(name):
            b = turned(b, len(a) // rank)
        ratio = np.float32(adapter.factor(name) / options.factor(name))
        values |= {f"{name}.lora_a": a, f"{name}.lora_b": b * ratio}
    trainable.write(values)


def _experts(name: str, gguf: GGUFFile | None, h: Hparams) -> tuple[int, int]:
    """Number of experts, and outputs of all of them."""
    assert gguf is not None
    part = check_weights(gguf, h)[name]
    if part.shape[0] * part.shape[1] != math.prod(gguf.tensors[part.source].shape):
        raise TrainingError(f"lora_target_modules: '{name}' is a part of '{part.source}', which has no adapters")
    return part.n_experts, part.shape[0]


def _reader(gguf: GGUFFile, h: Hparams) -> Callable[[str], F32]:
    """Weights of the file by graph name."""
    declared = check_weights(gguf, h)

    def read(name: str) -> F32:
        part = declared[name]
        return part.gather(numbers_of(gguf, declared, part.source)).reshape(matrix_shape(part.graph_shape))

    return read


def _bytes_of(values: F32) -> Callable[[], npt.NDArray[np.uint8]]:
    return lambda: values.reshape(-1).view(np.uint8)
