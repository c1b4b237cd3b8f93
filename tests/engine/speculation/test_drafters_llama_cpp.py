"""llama.cpp as the oracle of drafters: the same draft tokens, and the same acceptance."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from logitless.engine.requests import CompletionRequest, Finished, Token
from logitless.engine.sampling.params import SamplingParams
from tests.helpers.drafter_files import write_eagle3
from tests.helpers.reference_model import Array, Spec, write
from tests.models.architectures.test_llama_cpp import TEXT, answers

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
N_TOKENS, MOST = 60, (1, 3)  # tokens of a text, and of a draft
DRAFTS = """
for path, drafter, kind, prompt, n_tokens, n_max in json.load(sys.stdin):
    speculative = xllamacpp.CommonParams().speculative
    speculative.types = [getattr(xllamacpp.common_speculative_type, kind)] if kind else []
    speculative.draft.n_max, speculative.draft.mparams.path = n_max, drafter
    server = opened(path, 256, speculative=speculative)
    body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    reply = server.handle_completions(body)
    timings = reply["timings"]
    counts = [timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)]
    print(json.dumps([reply["choices"][0]["text"], *counts]))
"""
EAGLE3 = "COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3"
Counts = tuple[str, int, int]  # a text, draft tokens, and how many were accepted


def eagle3_files(folder: Path) -> list[tuple[Path, Path]]:
    """A model, and drafters with the model's matrices or their own, and with each of the flags."""
    s = Spec("llama", n_layer=3, n_vocab=512, n_ctx_train=256, vocabulary=True, untied=True, traits=("agrees", "much"))
    t = write(path := folder / "llama.gguf", s)
    ids = np.sort(np.random.default_rng(1).permutation(s.n_vocab)[:400])
    head: Array = t["output.weight"]
    own = {"token_embd.weight": t["token_embd.weight"], "output.weight": head, "rope_freqs.weight": None}
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"norm_before_residual": True}, {"d2t": ids, "output.weight": head[ids]}),
        ({"norm_before_fc": True}, {**own, "enc.output_norm.weight": np.linspace(0.5, 1, 3 * s.n_embd)}),
    ]
    for i, (keys, tensors) in enumerate(variants):
        write_eagle3(folder / f"{i}.gguf", s, keys, **tensors)
    return [(path, folder / f"{i}.gguf") for i in range(len(variants))]


def ours(path: Path, drafter: Path | None, n_max: int) -> Counts:
    options = ModelOptions(
        model_draft=None if drafter is None else str(drafter),
        ctx_size=256,
        parallel=1,
        threads=1,
        device="cpu",
        spec_draft_n_max=n_max,
        spec_draft_adapt=False,
        warmup=False,
    )
    model = open_model(path, options)
    loaded = model.load()
    greedy = SamplingParams(temperature=0.0)
    request = CompletionRequest(tuple(TEXT), greedy, N_TOKENS, ignore_eos=True, speculation=model.speculation)
    loaded.scheduler.submit(request)
    events = []
    while not loaded.scheduler.idle:
        events += [event for _, event in loaded.scheduler.step()]
    loaded.engine.close()
    last = events[-1]
    assert isinstance(last, Finished)
    text = "".join(event.text for event in events if isinstance(event, Token)) + last.text
    return text, last.timings.draft_n, last.timings.draft_n_accepted


@pytest.mark.timeout(1200)
def test_eagle3_drafts_are_llama_cpps(tmp_path: Path) -> None:
    pairs = eagle3_files(tmp_path)
    runs = [(path, drafter, n) for path, drafter in pairs for n in MOST]
    asked = [(str(path), str(drafter), EAGLE3, TEXT, N_TOKENS, n) for path, drafter, n in runs]
    plain = str(pairs[0][0])
    *theirs, without = [
        tuple(json.loads(line)) for line in answers(DRAFTS, json.dumps([*asked, (plain, plain, "", TEXT, N_TOKENS, 3)]))
    ]
    found = [ours(*run) for run in runs]
    assert found == theirs
    assert {text for text, *_ in found} == {ours(pairs[0][0], None, 1)[0]}
    assert all(10 < n_accepted < n_drafted for _, n_drafted, n_accepted in found)
    # a plain model drafts nothing there without --spec-type, as here
    assert without[1:] == ours(pairs[0][0], pairs[0][0], 3)[1:] == (0, 0)
