"""`logitless perplexity`: a model's perplexity on a text, as llama-perplexity measures it."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np

from logitless.cli.flags.flags import UsageError
from logitless.cli.progress import COMPILING, StatusLine
from logitless.cli.setup.text_windows import text_run
from logitless.training.score import window_losses


def run(o: SimpleNamespace) -> int:
    if o.ctx_size is not None and o.ctx_size < 4:
        raise UsageError("perplexity: --ctx-size is less than 4, of which the second half counts")
    losses: list[np.ndarray] = []
    with text_run(o, "perplexity") as text:
        line = StatusLine()
        for i, tokens in enumerate(text.windows, 1):
            # the first half is context
            losses.append(window_losses(text.session, text.model, tokens)[o.ctx_size // 2 :].astype(np.float64))
            COMPILING.end()
            if sys.stderr.isatty():
                line.show(f"{i} of {len(text.windows)} windows: {math.exp(np.concatenate(losses).mean()):.4f}")
        line.end()
    every = np.concatenate(losses)
    perplexity = math.exp(every.mean())
    error = perplexity * every.std() / math.sqrt(max(1, len(every) - 1))
    print(f"perplexity {perplexity:.4f} ± {error:.4f} of {len(every)} tokens")
    return 0
