"""Cache reuse (--cache-reuse, n_cache_reuse) on a real model: moved chunks, and unchanged other requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.paths import MODELS

MODEL = MODELS / "stories260K.gguf"
STORY = "Once upon a time there was a little girl who had a dog and a ball. The sun was warm. Tom saw a big red bird. "
LOGPROBS = {"temperature": 0, "n_predict": 12, "n_probs": 5, "return_tokens": True, "ignore_eos": True}


def ask(server: Any, prompt: list[int], **fields: Any) -> Any:
    return server.post("/completion", {"prompt": prompt, **LOGPROBS, **fields})


def test_a_shorter_prompt_is_moved_and_others_stay_exact(serve_here: Any) -> None:
    if not MODEL.exists():
        pytest.skip("no stories260K.gguf beside the checkout")
    server = serve_here(MODEL, "-c", "512", "-np", "2", "-kvu", "--cache-reuse", "16")
    plain = serve_here(MODEL, "-c", "512", "-np", "2", "-kvu")
    old = server.post("/tokenize", {"content": STORY * 2, "add_special": True})["tokens"]
    new = [*old[:9], *old[40:]]
    exact = ask(plain, new)
    results = []
    for url, field in ((server, {}), (plain, {"n_cache_reuse": 16})):
        ask(url, old, id_slot=1)
        results.append(ask(url, new, id_slot=1, **field))
        assert results[-1]["timings"]["cache_n"] == len(new) - 1
        assert results[-1]["generation_settings"]["n_cache_reuse"] == 16
    assert results[0]["completion_probabilities"] == results[1]["completion_probabilities"]
    first, wanted = (r["completion_probabilities"][0] for r in (results[0], exact))
    assert first["logprob"] != wanted["logprob"]  # the first layers' cells remember what was before them
    best = {top["id"]: top["logprob"] for top in wanted["top_logprobs"]}
    assert first["logprob"] == pytest.approx(best[first["id"]], abs=0.5)
    for fields in ({"n_cache_reuse": 0}, {"n_cache_reuse": 0, "id_slot": 1}, {"cache_prompt": False}):
        again = ask(server, new, **fields)
        for key in ("tokens", "completion_probabilities"):
            assert again[key] == exact[key]
