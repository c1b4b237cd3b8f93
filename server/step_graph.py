"""A step as a graph: tokens → logits → sampled ids, of which all that differs between requests is fed."""

from __future__ import annotations

from dataclasses import dataclass

from graph.ops.rows import get_rows
from graph.ops.select import log_probs, sample
from graph.tensor import Tensor, feed
from models.batch import Batch, Cached, PagedMemory
from models.model import Model
from models.nextn import Hidden, follow, guess
from server.plan_shapes import Shape
from server.step_feeds import sampling_feeds


@dataclass(frozen=True)
class StepGraph:
    """What steps of one session share."""

    memory: PagedMemory
    sampler_state: Tensor  # (slots, N_STATE) f32
    hidden: Tensor | None = None  # rows of models.nextn.Hidden, where a block guesses

    def nodes(self, model: Model, shape: Shape) -> tuple[list[Tensor], list[Tensor]]:
        """What has to run and is not fetched; and ids of the rows that are wanted, with log-probabilities where these
        are."""
        logits, kept = self._logits(model, shape)
        if logits is None:
            return kept, []
        sampling = sampling_feeds(shape.n_out, shape.n_list, shape.n_masks, logits.shape[-1])
        ids = sample(logits, self.sampler_state, *sampling, n_probs=shape.n_probs)
        if not shape.n_top:
            return kept, [ids]
        return kept, [ids, log_probs(logits, ids, feed("targets", (shape.n_out,), "i32"), n=shape.n_top - 1)]

    def _logits(self, model: Model, shape: Shape) -> tuple[Tensor | None, list[Tensor]]:
        """Those that are wanted, and what has to run besides."""
        if self.hidden is None:
            batch = Batch.feeds(shape.n_tokens, shape.n_out if shape.n_out and not shape.whole else None)
            if not shape.n_out:
                return None, model.remembered(batch, self.memory)
            return model.logits(batch, self.memory), []
        batch, hidden = Batch.feeds(shape.n_tokens), Hidden.feeds(self.hidden, shape.n_tokens)
        if shape.guesses:
            logits, rows = guess(model, batch, self.memory, hidden)
            return logits, [rows]
        x = model.hidden(batch, Cached(self.memory, batch))
        kept = follow(model, batch, self.memory, hidden, x)
        if shape.whole or not shape.n_out:
            return model.head(x) if shape.n_out else None, kept
        out = feed("out", (shape.n_out,), "i32")
        return model.head(get_rows(x, out), out), kept
