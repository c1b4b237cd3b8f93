"""Step graph: tokens → logits → sampled ids.

Everything that differs between requests is an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from logitless.engine.runner.buckets import StepShape
from logitless.engine.runner.step_inputs import sampling_feeds
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.sampling.sample import log_probs, sample
from logitless.graph.tensor import Tensor, feed
from logitless.models.architectures.mtp import Hidden, follow, guess
from logitless.models.batch import Batch, Cached, PagedMemory
from logitless.models.drafters.drafter import Drafter, FileDrafter
from logitless.models.model import Model


@dataclass(frozen=True)
class StepGraph:
    """Builds the graphs of steps on the KV cache and states of one session."""

    memory: PagedMemory
    sampler_state: Tensor  # (slots, N_STATE) f32
    # last hidden states for the MTP head (models/architectures/mtp.py)
    hidden: Tensor | None = None
    media: Sequence[Tensor] = ()  # rows of images (engine/media/media_encoder.py)
    drafter: Drafter | None = None  # drafts instead of the MTP head

    def nodes(self, model: Model, shape: StepShape) -> tuple[list[Tensor], list[Tensor]]:
        """Nodes of a step: (nodes that only run, fetched nodes).

        The fetched nodes are the ids of the sampled positions and, if asked for, log-probabilities and logits.
        """
        logits, effects = self._logits(model, shape)
        if logits is None:
            return effects, []
        sampling = sampling_feeds(shape.n_out, shape.n_list, shape.n_masks, logits.shape[-1])
        ids = sample(logits, self.sampler_state, *sampling, n_probs=shape.n_probs)
        fetched = [ids]
        if shape.n_top:
            fetched.append(log_probs(logits, ids, feed("targets", (shape.n_out,), "i32"), n=shape.n_top - 1))
        return effects, [*fetched, logits] if shape.logits else fetched

    def _logits(self, model: Model, shape: StepShape) -> tuple[Tensor | None, list[Tensor]]:
        """Logits of the sampled positions, or None without any, and nodes that only run."""
        media, mrope = self.media if shape.media else (), bool(model.hparams.mrope)
        if model.hparams.n_encoder:
            source = feed("source", (3, shape.n_tokens), "i32")
            batch = replace(Batch.feeds(shape.n_tokens), source=source)
            if not shape.n_out:
                return None, model.cache_writes(batch, self.memory)
            x = model.hidden(batch, Cached(self.memory, batch))
            rows = None if shape.whole else feed("out", (shape.n_out,), "i32")
            return model.head(x if rows is None else get_rows(x, rows), rows), []
        if self.hidden is None:
            n_out = shape.n_out if shape.n_out and not shape.whole else None
            batch = Batch.feeds(shape.n_tokens, n_out, media, mrope=mrope)
            if not shape.n_out:
                return None, model.cache_writes(batch, self.memory)
            return model.logits(batch, self.memory), []
        batch = Batch.feeds(shape.n_tokens, None, media, mrope=mrope)
        hidden = Hidden.feeds(self.hidden, shape.n_tokens)
        drafter, out = self.drafter, None
        if shape.n_out and not shape.whole:
            out = feed("out", (shape.n_out,), "i32")
        if shape.mtp and drafter is not None:
            batch = replace(batch, seen=feed("seen", (2, shape.n_tokens), "i32"))
            return drafter.guess(model, batch, self.memory, hidden, out)
        if shape.mtp:
            logits, last = guess(model, batch, self.memory, hidden)
            return logits, [last]
        before_norm = drafter is None and model.hparams.architecture.mtp.as_layer
        inputs: list[Tensor] | None = [] if before_norm or isinstance(drafter, FileDrafter) else None
        cached = Cached(self.memory, batch)
        x = model.hidden(batch, cached, inputs)
        if drafter is None:
            effects = follow(model, batch, self.memory, hidden, inputs[-1] if inputs else x)
        else:
            effects = drafter.follow(model, batch, self.memory, hidden, x, inputs or ())
        if not shape.n_out:  # a drafter may read less than the last layers
            return None, [*effects, *cached.writes(model.hparams.n_layer_kv - 1)]
        return model.head(x if out is None else get_rows(x, out), out), effects
