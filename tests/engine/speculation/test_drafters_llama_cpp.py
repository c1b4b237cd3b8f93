"""llama.cpp as the oracle of drafters: the same draft tokens, and the same acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions
from logitless.engine.requests import CompletionRequest, Finished, Token
from logitless.engine.sampling.params import SamplingParams
from tests.helpers.drafter_files import write_dflash, write_eagle3, write_gemma4_assistant
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import SMALL
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
KIND = "COMMON_SPECULATIVE_TYPE_DRAFT_"
SPEC = Spec("llama", n_layer=3, n_vocab=512, n_ctx_train=256, vocabulary=True, untied=True, traits=("agrees", "much"))
Counts = tuple[str, int, int]  # a text, draft tokens, and how many were accepted


def eagle3_files(path: Path, folder: Path) -> list[Path]:
    """Drafters with the model's matrices or their own, and with each of the flags."""
    t = write(path, SPEC)
    ids, head = np.sort(np.random.default_rng(1).permutation(SPEC.n_vocab)[:400]), t["output.weight"]
    own = {"token_embd.weight": t["token_embd.weight"], "output.weight": head, "rope_freqs.weight": None}
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"norm_before_residual": True}, {"d2t": ids, "output.weight": head[ids]}),
        ({"norm_before_fc": True}, {**own, "enc.output_norm.weight": np.linspace(0.5, 1, 3 * SPEC.n_embd)}),
    ]
    paths = [folder / f"eagle3-{i}.gguf" for i in range(len(variants))]
    for drafter, (keys, tensors) in zip(paths, variants, strict=True):
        write_eagle3(drafter, SPEC, keys, **tensors)
    return paths


def dflash_files(path: Path, folder: Path) -> list[Path]:
    """Drafters with full attention, with sliding windows and sinks, and with causal blocks and some tokens only."""
    t = write(path, SPEC)
    ids, head = np.sort(np.random.default_rng(1).permutation(SPEC.n_vocab)[:400]), t["output.weight"]
    windows = {"attention.sliding_window": 20, "attention.sliding_window_pattern": [False, True]}
    sinks = {f"blk.{i}.attn_sinks.weight": np.linspace(-1, 1, 4) for i in range(2)}
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        (windows, sinks),
        ({"attention.causal": True}, {"d2t": ids, "output.weight": head[ids]}),
    ]
    paths = [folder / f"dflash-{i}.gguf" for i in range(len(variants))]
    for drafter, (keys, tensors) in zip(paths, variants, strict=True):
        write_dflash(drafter, SPEC, keys, embedding=t["token_embd.weight"], **tensors)
    return paths


def gemma4_files(path: Path, folder: Path) -> list[Path]:
    """Assistants that guess well and badly, of a model whose last layers share caches. llama.cpp of October 2026 cannot
    load those of grouped tokens."""
    spec, rng = replace(SMALL, n_vocab=512, n_ctx_train=256, vocabulary=True), np.random.default_rng(5)
    embedding = write(path, spec)["token_embd.weight"]
    ungrouped: dict[str, Any] = {"masked_embd_centroids.weight": None, "masked_embd_ordering": None}
    t = write_gemma4_assistant(good := folder / "good.gguf", spec, embedding, **ungrouped)
    other = t["nextn.pre_projection.weight"] + 0.04 * rng.standard_normal((32, 128))
    more = ungrouped | {"nextn.pre_projection.weight": other}
    write_gemma4_assistant(bad := folder / "bad.gguf", spec, embedding, **more)
    return [good, bad]


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
@pytest.mark.parametrize(("kind", "make"), [("EAGLE3", eagle3_files), ("DFLASH", dflash_files), ("MTP", gemma4_files)])
def test_drafts_are_llama_cpps(tmp_path: Path, kind: str, make: Callable[[Path, Path], list[Path]]) -> None:
    drafters = make(path := tmp_path / "m.gguf", tmp_path)
    runs = [(path, drafter, n) for drafter in drafters for n in MOST]
    bodies = [(str(path), str(drafter), KIND + kind, TEXT, N_TOKENS, n) for _, drafter, n in runs]
    bodies.append((str(path), str(path), "", TEXT, N_TOKENS, 3))
    *theirs, plain = [tuple(json.loads(line)) for line in answers(DRAFTS, json.dumps(bodies))]
    found = [ours(*run) for run in runs]
    assert found == theirs
    assert {text for text, *_ in found} == {ours(path, None, 1)[0]}
    assert all(4 < n_accepted < n_drafted for _, n_drafted, n_accepted in found), [counts for _, *counts in found]
    # a whole model drafts nothing there without --spec-type, as here
    assert plain[1:] == ours(path, path, 3)[1:] == (0, 0)
