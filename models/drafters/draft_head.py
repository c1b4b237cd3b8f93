"""Draft head: a small head over a model's last hidden states predicts one token more, and learns to.

It takes the place of an MTP block (models/architectures/mtp.py) in models that have none. For a
token with embedding e, behind a token with the last hidden state h,

    y = keep ⊙ h + up · silu(down_h · norm_h(h) + down_e · norm_e(e))

stands for the token's own last hidden state: the logits of the next token are y times the rows of
the model's LM head, and y is the h of the next draft token. The logits have a column for each token
of the draft vocabulary only, so that a draft costs little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import numpy.typing as npt

from logitless.graph.autodiff import backward
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.paged_attention import load_v
from logitless.graph.ops.elementwise import add, mul, silu, sum_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.pointwise import argmax
from logitless.graph.ops.shape import after, reshape, slice_rows
from logitless.graph.ops.training.loss import cross_entropy
from logitless.graph.ops.training.optimizer import N_ADAMW, adamw_step, clip_factor, norm_of_sums, square_sums
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.architectures.mtp import Hidden
from logitless.models.batch import Batch, PagedMemory
from logitless.models.drafters.drafter import Drafter
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model

F32 = npt.NDArray[np.float32]
RANK = 512  # at most
N_COLUMNS = 4096  # tokens of the draft vocabulary, at most
N_COPY = 64  # rows of the LM head that one run copies
SEED = 1
MAX_NORM = 1.0  # of the gradient
PREFIX = "draft_head"
ROWS = f"{PREFIX}.rows"
TRAINING = ".training"  # suffix of the parameters that training changes


def shapes_of(h: Hparams) -> dict[str, tuple[int, ...]]:
    """Shapes of the head's parameters for a model."""
    n, rank = h.n_embd, min(RANK, h.n_embd)
    vectors = dict.fromkeys(("norm_h", "norm_e", "keep"), (n,))
    return {**vectors, "down_h": (rank, n), "down_e": (rank, n), "up": (n, rank)}


@dataclass
class HeadValues:
    """Values of a model's draft head on the host, and the draft vocabulary: `ids` by column.

    A head without training gives every token the same logit."""

    hparams: Hparams
    gguf: GGUFFile
    ids: list[int] = field(default_factory=list)
    params: dict[str, F32] = field(default_factory=dict)
    n_steps: int = 0  # optimizer steps so far
    accuracy: float = 0.0  # moving average: share of first draft tokens that are right, on new examples

    def __post_init__(self) -> None:
        h, rng = self.hparams, np.random.default_rng(SEED)
        self.ids = self.ids or list(range(min(N_COLUMNS, h.n_vocab)))
        for name, shape in shapes_of(h).items():
            if name.startswith("down"):
                self.params[name] = (rng.standard_normal(shape) / np.sqrt(h.n_embd)).astype(np.float32)
            else:
                self.params[name] = np.full(shape, name.startswith("norm"), np.float32)

    def define(self, session: Session) -> DraftHead:
        """The head's variables on a session. Parameters are read when a plan first needs them; rows are zeros
        until `write_rows`."""
        rows = session.define(ROWS, (len(self.ids), self.hparams.n_embd))
        return DraftHead(self.define_params(session), rows)

    def define_params(self, session: Session, suffix: str = "") -> dict[str, Tensor]:
        """The parameters as variables of a session, with `suffix` behind their names."""

        def source(name: str) -> Callable[[], npt.NDArray[np.uint8]]:
            return lambda: _bytes_of(self.params[name])

        shapes = shapes_of(self.hparams).items()
        return {name: session.define(f"{PREFIX}.{name}{suffix}", shape, "f32", source(name)) for name, shape in shapes}


def write_rows(session: Session, model: Model, tokens: Sequence[tuple[int, int]]) -> None:
    """Copy the LM head's rows of some tokens, (column, id) each, to their columns of the draft vocabulary."""
    weights = model.weights
    name = "output" if "output" in weights else "token_embd"
    matrix, factor = weights[name], weights.factor(name)

    def build() -> list[Tensor]:
        rows = get_rows(matrix, feed("learn.ids", (N_COPY,), "i32"))
        return [rows if factor is None else mul(rows, factor)]

    for start in range(0, len(tokens), N_COPY):
        part = tokens[start : start + N_COPY]
        ids = np.zeros(N_COPY, np.int32)
        ids[: len(part)] = [id for _, id in part]
        (rows,) = session.run(f"{PREFIX}.copy", build, {"learn.ids": ids}, [len(part)])
        for (column, _), row in zip(part, rows, strict=True):
            session.write(ROWS, row, column * row.nbytes)


def _bytes_of(values: F32) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class DraftHead(Drafter):
    """The head's variables on a session."""

    params: Mapping[str, Tensor]
    rows: Tensor  # (columns, n_embd): the LM head's rows of the draft vocabulary

    def guess(
        self, model: Model, batch: Batch, memory: PagedMemory, hidden: Hidden, out: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """As declared, with a column for each token of the draft vocabulary."""
        y = self.next_hidden(model, hidden.load(), batch.tokens)
        return self.logits(model, y if out is None else get_rows(y, out)), [hidden.store(y)]

    def next_hidden(self, model: Model, h: Tensor, tokens: Tensor) -> Tensor:
        """y (T, n_embd) of tokens (T,) behind tokens with last hidden states h (T, n_embd)."""
        p, eps = self.params, model.hparams.eps
        down_h = linear(rms_norm(h, p["norm_h"], eps=eps), p["down_h"])
        down_e = linear(rms_norm(model.weights.embedding(tokens), p["norm_e"], eps=eps), p["down_e"])
        return add(mul(h, p["keep"]), linear(silu(add(down_h, down_e)), p["up"]))

    def logits(self, model: Model, y: Tensor) -> Tensor:
        """Logits (T, columns) of y (T, n_embd)."""
        return model.scale_logits(linear(y, self.rows))


@dataclass(frozen=True)
class HeadTraining:
    """AdamW step of a draft head, on a copy of the parameters that draft."""

    head: DraftHead
    moments: Mapping[str, Sequence[Tensor]]  # of each parameter

    @classmethod
    def define(cls, session: Session, values: HeadValues, head: DraftHead) -> HeadTraining:
        params = values.define_params(session, TRAINING)
        moments = {name: [session.define(f"{t.name}.{kind}", t.shape) for kind in "mv"] for name, t in params.items()}
        return cls(DraftHead(params, head.rows), moments)

    def nodes(self, model: Model, hidden: Tensor, n: int, depth: int) -> list[Tensor]:
        """Graph of a step on n examples: the best columns (n,) after each of `depth` tokens, the gradient's
        norm, and the updates.

        Inputs: `learn.rows` (n,), rows of the buffer `hidden`; of each draft token k the inputs
        `learn.tokens`, `learn.targets` (columns) and `learn.weight`, at k·n to (k + 1)·n."""
        parts = [(k * n, (k + 1) * n) for k in range(depth)]
        tokens, targets = (feed(f"learn.{name}", (depth * n,), "i32") for name in ("tokens", "targets"))
        weight, optimizer = feed("learn.weight", (depth * n,)), feed("learn.optimizer", (N_ADAMW,))
        y = load_v(hidden, feed("learn.rows", (n,), "i32"))
        y = reshape(y, shape=(n, y.shape[2]))
        losses: list[Tensor] = []
        best: list[Tensor] = []
        for start, stop in parts:
            y = self.head.next_hidden(model, y, slice_rows(tokens, start=start, stop=stop))
            logits = self.head.logits(model, y)
            loss = cross_entropy(logits, slice_rows(targets, start=start, stop=stop))
            losses.append(mul(loss, slice_rows(weight, start=start, stop=stop)))
            best.append(argmax(logits))
        params = self.head.params
        gradients = backward(sum_to(reduce(add, losses), shape=()), list(params.values()))
        sums = [square_sums(g) for g in gradients.values()]
        norm = norm_of_sums(*sums)
        factor = clip_factor(norm, const(MAX_NORM))
        updates = [
            adamw_step(p, *self.moments[name], after(gradients[p], *sums), optimizer, factor, decays=False)
            for name, p in params.items()
        ]
        return [*best, norm, *updates]
