"""`python -m examples.sine`: a one-layer llama that predicts the next of eight heights.

After llama.cpp's "baby-llama": vocabulary 8, context 8, width 32, 8 heads, one layer; 32 batches of
64 waves with 16 iterations of L-BFGS each; the targets are logits of −1, and +1 for the next token,
and the loss their squared error. The result is the mean of the last batches' parameters, because so
many iterations fit a batch better than other waves. Cross entropy, AdamW and matrices of a low rank
are there to be compared with these.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.devices import open_session, parser
from examples.lbfgs import minimize
from logitless.graph.autodiff import backward
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import scale, sum_to
from logitless.graph.ops.linear import linear
from logitless.graph.ops.training.loss import cross_entropy, square_error
from logitless.graph.ops.training.optimizer import N_ADAMW, adamw_params, adamw_step
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.adapters.low_rank import EMBEDDING
from logitless.models.batch import Sequences
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.synthetic.model import ModelShape
from logitless.models.weights.weights import Weights
from logitless.training.scratch import write_model
from logitless.training.trainable import Trainable, full

N_VOCAB = N_CTX = 8
N_BATCH = 64  # waves: with fewer, L-BFGS overfits
N_ITER = 16  # of L-BFGS on a batch
N_STEPS = 24  # of AdamW, which are as many evaluations
ADAM_RATE = 1e-3
LOSSES, OPTIMIZERS = ("mse", "cross-entropy"), ("lbfgs", "adamw")
SHAPE = ModelShape(n_embd=32, n_layer=1, n_head=8, n_head_kv=8, n_ff=96, n_vocab=N_VOCAB, n_ctx=N_CTX)
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


@dataclass
class Sine:
    """The toy on a session. `folder` gets the untrained model's file."""

    session: Session
    folder: Path
    seed: int = 1337
    loss_kind: str = "mse"  # one of LOSSES
    optimizer: str = "lbfgs"  # one of OPTIMIZERS
    rank: int = 0  # of its layer's matrices; 0: as they come

    def __post_init__(self) -> None:
        path = self.folder / "sine.gguf"
        write_model(path, {}, N_VOCAB, SHAPE, self.seed, "sine")
        with GGUFFile.open(path) as gguf:
            h = hparams_of(gguf)
            model = define_model(self.session, gguf, h, N_CTX)
            self.trainable: Trainable = full(self.session, model, gguf, h)
            if self.rank:
                self.trainable = low_rank(self.trainable, self.rank, self.seed)
            self.session.plan(lambda: self._build(N_BATCH))  # reads the file's weights
        if not self.rank:
            self.trainable.write(start_values(self.trainable, self.seed))
        kinds = "mv" if self.optimizer == "adamw" else ""
        self._moments = [[self.session.define(f"{k}.{p.name}", p.shape) for k in kinds] for p in self.trainable.params]
        self.n_evaluations = 0

    def _logits(self, n: int) -> Tensor:
        return self.trainable.model.training_logits(Sequences.feeds(n, N_CTX))

    def _build(self, n: int) -> list[Tensor]:
        logits = self._logits(n)
        if self.loss_kind == "mse":
            errors = square_error(logits, feed("targets", logits.shape))
        else:
            errors = cross_entropy(logits, feed("labels", logits.shape[:1], "i32"))
        loss = scale(sum_to(errors, shape=()), factor=1 / n)
        gradients = backward(loss, self.trainable.params)
        return [loss, *(gradients[p] for p in self.trainable.params)]

    def _build_step(self) -> list[Tensor]:
        loss, *gradients = self._build(N_BATCH)
        params, one = feed("adamw", (N_ADAMW,)), const(1.0)
        of = zip(self.trainable.params, self._moments, gradients, strict=True)
        return [loss, *(adamw_step(p, *moments, g, params, one) for p, moments, g in of)]

    def _feeds(self, tokens: I32) -> dict[str, I32]:
        n = tokens.size
        return {
            "tokens": tokens.reshape(-1),
            "pos": np.arange(n, dtype=np.int32) % N_CTX,
            "start": np.zeros(n, np.int32),
        }

    def loss(self, tokens: I32, labels: I32) -> tuple[float, F64]:
        """The loss of a batch (B, 8), and its gradient by all parameters in a row."""
        feeds = self._labelled(tokens, labels)
        loss, *gradients = self.session.run("loss", lambda: self._build(N_BATCH), feeds)
        return float(loss), np.concatenate([g.reshape(-1) for g in gradients]).astype(np.float64)

    def _labelled(self, tokens: I32, labels: I32) -> dict[str, npt.NDArray[Any]]:
        """The feeds of an evaluation, which is counted."""
        self.n_evaluations += 1
        feeds: dict[str, npt.NDArray[Any]] = {**self._feeds(tokens)}
        if self.loss_kind == "mse":
            feeds["targets"] = np.where(np.eye(N_VOCAB, dtype=bool)[labels.reshape(-1)], 1, -1).astype(np.float32)
        else:
            feeds["labels"] = labels.reshape(-1).astype(np.int32)
        return feeds

    def _loss_at(self, flat: F64, tokens: I32, labels: I32) -> tuple[float, F64]:
        self.write(flat)
        return self.loss(tokens, labels)

    def read(self) -> F64:
        return np.concatenate([values.reshape(-1) for values in self.trainable.read().values()]).astype(np.float64)

    def write(self, flat: F64) -> None:
        at, values = 0, {}
        for name, p in zip(self.trainable.names, self.trainable.params, strict=True):
            n = p.nbytes // 4
            values[name] = flat[at : at + n].reshape(p.shape).astype(np.float32)
            at += n
        self.trainable.write(values)

    def train(self, n_batches: int = 32, on_batch: Callable[[int, float], None] | None = None) -> list[float]:
        """The loss of each batch before its iterations."""
        rng = np.random.default_rng([self.seed, 7])
        losses: list[float] = []
        last: list[F64] = []
        for i in range(n_batches):
            heights = np.stack([wave(rng.uniform(0, 2 * math.pi), N_CTX + 1) for _ in range(N_BATCH)])
            losses.append(self.learn(heights[:, :-1], heights[:, 1:], i))
            if i >= n_batches - max(1, n_batches // 8):
                last.append(self.read())
            if on_batch is not None:
                on_batch(i + 1, losses[-1])
        self.write(np.mean(last, axis=0))
        return losses

    def learn(self, tokens: I32, labels: I32, i: int) -> float:
        """Train on batch i (from 0); returns its loss before the update."""
        return self._lbfgs(tokens, labels) if self.optimizer == "lbfgs" else self._adamw(tokens, labels, i * N_STEPS)

    def _lbfgs(self, tokens: I32, labels: I32) -> float:
        start = self.read()
        found = minimize(partial(self._loss_at, tokens=tokens, labels=labels), start, n_iter=N_ITER)
        self.write(found.x)
        return found.first

    def _adamw(self, tokens: I32, labels: I32, n_done: int) -> float:
        losses: list[float] = []
        for i in range(N_STEPS):
            feeds = self._labelled(tokens, labels) | {"adamw": adamw_params(n_done + i + 1, ADAM_RATE)}
            rows = [None, *[0] * len(self.trainable.params)]
            losses.append(float(self.session.cached_plan("step", self._build_step).run(feeds, rows)[0]))
        return losses[0]

    def draw(self, n: int, phase: float = 0.0) -> list[int]:
        """n heights that the model makes of the first half window of a sine."""
        heights: list[int] = wave(phase, N_CTX).tolist()
        for _ in range(n):
            tokens = np.array(heights[-N_CTX:], np.int32)
            (logits,) = self.session.run("draw", lambda: [self._logits(1)], self._feeds(tokens))
            heights.append(int(logits[-1].argmax()))
        return heights[N_CTX:]


def start_values(trainable: Trainable, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Start of a training by whole batches: matrices are normal with a deviation of 1/√n_in.

    With 0.02, as large models begin, the network lies beside a saddle point, where all windows have
    the same answer: the gradient is small there, and L-BFGS, also SciPy's, needs hundreds of
    evaluations to leave it, while AdamW's steps do not depend on the gradient's size.
    """
    rng = np.random.default_rng([seed, 9])
    values = trainable.read()
    for name, w in values.items():
        if w.ndim == 2:
            values[name] = (rng.standard_normal(w.shape) / math.sqrt(w.shape[1])).astype(np.float32)
    return values


def low_rank(whole: Trainable, rank: int, seed: int) -> Trainable:
    """The network with B · A for every matrix but the embedding, as llama.cpp's low-rank-only
    baby-llama."""
    rng = np.random.default_rng([seed, 11])
    session, tensors = whole.session, dict(whole.model.weights.tensors)
    params: dict[str, Tensor] = {}

    def drawn(name: str, shape: tuple[int, int], deviation: float) -> Tensor:
        values = (rng.standard_normal(shape) * deviation).astype(np.float32)
        params[name] = session.define(name, shape, source=lambda: values.reshape(-1).view(np.uint8))
        return params[name]

    for name, w in tensors.items():
        if len(w.shape) == 2 and name != EMBEDDING:
            n_out, n_in = w.shape  # entries of B · A vary as those of a matrix with a deviation of 1/√n_in
            b = drawn(f"{name}.lora_b", (n_out, rank), rank**-0.5)
            tensors[name] = linear(b, drawn(f"{name}.lora_a", (n_in, rank), n_in**-0.5))
        else:
            params[name] = w
    model = replace(whole.model, weights=Weights(tensors))
    return Trainable(whole.kind, session, model, tuple(params.values()), tuple(params))


def wave(phase: float, n: int) -> I32:
    """Heights 0 to 7 of a sine with a period of N_VOCAB · 2 steps."""
    t = phase + np.arange(n) * (2 * math.pi / 16)
    return np.asarray(np.clip(np.floor((np.sin(t) + 1) / 2 * N_VOCAB), 0, N_VOCAB - 1), np.int32)


def picture(heights: list[int]) -> str:
    """One line a height, as llama.cpp's toy prints it."""
    return "\n".join(" " * (3 * height) + "*" for height in heights)


def main(words: Sequence[str] | None = None) -> None:
    """Train, and draw three periods."""
    flags = parser(__doc__ or "")
    flags.add_argument("--batches", type=int, default=32, help=f"of {N_BATCH} waves")
    flags.add_argument("--optimizer", choices=OPTIMIZERS, default="lbfgs")
    flags.add_argument("--loss", choices=LOSSES, default="mse")
    flags.add_argument("--rank", type=int, default=0, help="matrices are products of two thin ones; 0: whole")
    o = flags.parse_args(words)
    with open_session(o) as session, tempfile.TemporaryDirectory(prefix="logitless-") as folder:
        toy = Sine(session, Path(folder), o.seed, o.loss, o.optimizer, o.rank)
        toy.train(o.batches, lambda i, loss: print(f"batch {i}: loss {loss:.3f}", flush=True))
        print(f"{toy.n_evaluations} evaluations")
        print(picture(toy.draw(48)))


if __name__ == "__main__":
    main()
