"""`logitless warm`: compile a model's kernels into the kernel cache, for images of containers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from logitless.backends import disk_cache
from logitless.backends.registry import finish_compiling
from logitless.cli.flags.flags import CliError
from logitless.cli.progress import compile_progress
from logitless.cli.setup.model import find_draft_model, find_projector, model_options, model_path
from logitless.engine.async_engine import LoadedModel
from logitless.engine.loading.open_model import OpenModel, open_model
from logitless.engine.requests import CompletionRequest, Failed
from logitless.engine.sampling.params import SamplingParams
from logitless.training.data.tokenize_rows import Example
from logitless.training.score import score

N_PREDICT = 8


def run(options: SimpleNamespace) -> int:
    """Load the model as `serve` does, make the plans that a server makes while it is idle, and answer requests."""
    path = model_path(options, "warm")
    find_draft_model(options, path)
    find_projector(options, path)
    model = open_model(path, model_options(options))
    with compile_progress():
        served = model.load()
        assert served.engine is not None
        if options.training:
            served.engine.prepare_training()
        while served.prepare_ahead(lambda: False):
            pass
        if served.info.generates:
            _generate(model, served)
            if not served.info.untrainable:
                _score(model, served, gradient=options.training)
        if served.embedder is not None:
            served.embedder.embed([_prompt(model)], served.embedder.for_texts)
        finish_compiling()
    print(f"{path}: its kernels are in {disk_cache.writable_folder()}", file=sys.stderr)
    return 0


def _prompt(model: OpenModel) -> list[int]:
    return model.tokenizer.encode("The quick brown fox jumps over the lazy dog.") or [0]


def _generate(model: OpenModel, served: LoadedModel) -> None:
    """A request on every slot, with log-probabilities and with the drafts of the flags."""
    request = CompletionRequest(
        tuple(_prompt(model)),
        SamplingParams(n_probs=1),
        n_predict=N_PREDICT,
        ignore_eos=True,
        speculation=model.speculation,
    )
    scheduler = served.scheduler
    for _ in range(model.options.n_slots):
        scheduler.submit(request)
    while not scheduler.idle:
        for _, event in scheduler.step():
            if isinstance(event, Failed):
                raise CliError(event.message)


def _score(model: OpenModel, served: LoadedModel, *, gradient: bool) -> None:
    """A request of /v1/score."""
    import numpy as np

    assert served.engine is not None
    tokens = np.array(_prompt(model), np.int32)
    weights = served.engine.tuned(served.scheduler.resolve_lora(None))
    score(weights, Example(tokens, np.ones(len(tokens), bool)), gradient=gradient)
