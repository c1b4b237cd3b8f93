"""Scores of texts: log-probability of each token, loss, and norm of the loss's gradient.

The numbers are equal to a trainer's first evaluation, before any optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.training.optimizer import global_norm
from logitless.graph.tensor import Tensor
from logitless.models.batch import Sequences
from logitless.models.model import AdaptedModel, Model
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import Sample
from logitless.training.data.tokenize_rows import Example
from logitless.training.head import evaluation, gradients
from logitless.training.step import Feeds, Steps
from logitless.training.trainable import FULL, Trainable

_UNIT = 16  # windows are multiples of this long, or as long as possible, so that few plans serve all texts


@dataclass(frozen=True)
class Score:
    """Score of one text. `log_probs[i]` is of token i + 1; `loss` is the mean over `n_counted` labels."""

    log_probs: npt.NDArray[np.float32]
    loss: float
    n_counted: int
    gradient_norm: float | None = None


def score(tuned: AdaptedModel, example: Example, *, gradient: bool = False) -> Score:
    """Score a text. ValueError for fewer than two tokens. `gradient`: also the norm of the mean
    loss's gradient by all weights."""
    n = len(example.tokens) - 1
    if n < 1:
        raise ValueError("a text needs at least two tokens to be scored")
    length = -(-n // _UNIT) * _UNIT
    length = max(n, min(length, tuned.model(length).hparams.n_ctx_whole))
    trainable = Trainable(FULL, tuned.session, tuned.model(length), (), ())
    prefix = f"score.{tuned.name}.{length}"
    steps = Steps(trainable, TrainingConfig(optimizer="sgd", batch_size=1, ctx_size=length), prefix=prefix)
    tokens, labels = np.zeros(length, np.int32), np.zeros(length, np.int32)
    tokens[:n], labels[:n] = example.tokens[:-1], example.tokens[1:]
    every, counted = np.zeros(length, np.float32), np.zeros(length, np.float32)
    every[:n], counted[:n] = 1, example.learn[1:]
    more = tuned.feeds(length)
    losses = steps.evaluate([Sample(tokens, labels, every)], more).losses[:n]
    chosen = losses[example.learn[1:]]
    loss = float(chosen.sum(dtype=np.float64) / len(chosen)) if len(chosen) else float("nan")
    norm = _norm(steps, Sample(tokens, labels, counted), more) if gradient and len(chosen) else None
    return Score(-losses, loss, len(chosen), norm)


def _norm(steps: Steps, sample: Sample, more: Feeds) -> float:
    """Norm of the mean loss's gradient by all weights of the file."""
    tensors = steps.trainable.model.weights.tensors
    weights = [t for name, t in tensors.items() if not name.startswith("rope_")]

    def build() -> Sequence[Tensor]:
        rows = Sequences.feeds(1, steps.n_ctx)
        grads, _ = gradients(steps.trainable.model, (rows, rows), weights, segment=None)
        return [global_norm(list(grads.values()))]

    feeds = {**steps.feeds([sample], float(sample.weights.sum())), **more}
    (norm,) = steps.trainable.session.run((steps.prefix, "gradient"), build, feeds)
    return float(norm)


def window_losses(session: Session, model: Model, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Losses (n - 1,) of a window's tokens but the first, each given all before it."""
    n = len(tokens) - 1

    def build() -> list[Tensor]:
        rows = Sequences.feeds(1, n)
        return evaluation(model, (rows, rows))[::2]

    feeds: Feeds = {"tokens": tokens[:-1], "targets": tokens[1:]}
    feeds |= {"pos": np.arange(n, dtype=np.int32), "start": np.zeros(n, np.int32)}
    return np.concatenate([np.asarray(losses, np.float32) for losses in session.run(("losses", n), build, feeds)])
