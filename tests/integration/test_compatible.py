"""llama-server's own tests with stories260K (facts, not their code), and counters of /metrics."""

from __future__ import annotations

import json
import re
import urllib.error
from typing import Any

import pytest

from tests.helpers.paths import MODELS

MODEL = MODELS / "stories260K.gguf"
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K.gguf beside the checkout")

MEANING = "I believe the meaning of life is"
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]


@pytest.fixture(scope="module")
def server(serve_here_module: Any) -> Any:
    flags = "-c 512 -np 2 -b 32 -n 64 --seed 42 --temp 0.8 --alias tinyllama-2 --metrics -t 1"
    return serve_here_module(MODEL, *flags.split())


def test_a_completion(server: Any) -> None:
    answer = server.post("/completion", {"prompt": MEANING, "n_predict": 8, "cache_prompt": False})
    assert (answer["timings"]["prompt_n"], answer["timings"]["predicted_n"]) == (18, 8)
    assert re.search("going|bed", answer["content"])
    assert answer["prompt"] == "<s> " + MEANING
    joke = "Write a joke about AI from a very long prompt which will not be truncated"
    answer = server.post("/completion", {"prompt": joke, "cache_prompt": False})
    assert (answer["timings"]["prompt_n"], answer["timings"]["predicted_n"]) == (46, 64)  # as -n 64 says
    assert re.search("princesses|everyone|kids|Anna|forest", answer["content"])


@pytest.mark.parametrize(
    ("user", "n_prompt", "text"),
    [
        ("Hey", 69, "But she couldn't|Some of her"),
        ("What is the best book", 77, 'Suddenly|{ " Sarax.|Timmy'),
        ([{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}], 79, "Whillicter|Some"),
    ],
)
def test_a_chat(server: Any, user: Any, n_prompt: int, text: str) -> None:
    answer = server.post(
        "/chat/completions", {"messages": [BOOK[0], {"role": "user", "content": user}], "max_tokens": 8}
    )
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (n_prompt, 8)
    assert re.search(text, answer["choices"][0]["message"]["content"])


def test_the_context_of_a_slot(server: Any) -> None:
    assert server.get("/props")["default_generation_settings"]["n_ctx"] == 256
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post("/chat/completions", {"messages": BOOK * 100, "stream": True})
    error = json.loads(caught.value.read())["error"]
    assert (caught.value.code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 256)
    assert error["n_prompt_tokens"] > 256


def test_slots_keep_and_forget(server: Any) -> None:
    def n_evaluated(country: str, slot: int) -> int:
        body = {"prompt": f"What is the capital of {country}?", "id_slot": slot, "temperature": 0}
        n: int = server.post("/completion", body)["timings"]["prompt_n"]
        shown = server.get("/slots")[slot]
        assert shown["n_prompt_tokens_processed"] == n
        assert shown["n_prompt_tokens"] == n + shown["n_prompt_tokens_cache"]
        return n

    server.post("/slots/0?action=erase", {})
    server.post("/slots/1?action=erase", {})
    assert [n_evaluated(*use) for use in (("France", 1), ("Germany", 1), ("Germany", 0), ("Germany", 1))] == [
        21,
        6,
        22,
        1,
    ]
    assert server.post("/slots/1?action=erase", {}) == {"id_slot": 1, "n_erased": 85}
    assert n_evaluated("France", 1) == 21


def test_four_bytes_a_token(server: Any) -> None:
    """Whatever the samplers, nothing but the ids comes back."""

    def counters() -> tuple[float, float]:
        values = dict(line.rsplit(" ", 1) for line in server.get("/metrics").splitlines() if line[0] != "#")
        return float(values["logitless:bytes_read_total"]), float(values["llamacpp:tokens_predicted_total"])

    before = counters()
    for samplers in (
        {"temperature": 0},
        {"mirostat": 2},
        {"dry_multiplier": 1, "repeat_penalty": 1.2},
        {"xtc_probability": 0.5, "typical_p": 0.9},
        {"logit_bias": [[5, 1]], "adaptive_target": 0.3},
    ):
        server.post("/completion", {"prompt": [MEANING * 5, "The"], "n_predict": 20, "ignore_eos": True, **samplers})
    n_bytes, n_tokens = (after - start for after, start in zip(counters(), before, strict=True))
    assert (n_bytes, n_tokens) == (4 * 200, 200)


def test_the_samplers_that_editors_ask_for(server: Any) -> None:
    """llama.vim's chain: infill chooses among what the device leaves, and nothing else."""
    body = {"prompt": MEANING, "n_predict": 12, "seed": 3, "n_probs": 64, "post_sampling_probs": True, "top_p": 0.9}
    before = server.post("/completion", body | {"samplers": ["top_k", "top_p"]})["completion_probabilities"]
    chain = body | {"samplers": ["top_k", "top_p", "infill"]}
    answer = server.post("/completion", chain)
    after = answer["completion_probabilities"]
    first, left = ({t["id"]: t["prob"] for t in each[0]["top_probs"]} for each in (before, after))
    assert set(left) < set(first)
    assert all(p >= 0.2 for p in left.values())
    for each in after:
        shown = {t["id"]: t["prob"] for t in each["top_probs"]}
        assert each["prob"] == shown[each["id"]]
        assert sum(shown.values()) == pytest.approx(1, abs=1e-5)
    raw = body | {"post_sampling_probs": False, "n_predict": 1}
    told = server.post("/completion", raw | {"samplers": ["top_k"]})["completion_probabilities"][0]["top_logprobs"]
    for seed in range(8):
        one = server.post("/completion", raw | {"samplers": chain["samplers"], "n_probs": 2, "seed": seed})
        chosen = one["completion_probabilities"][0]
        assert chosen["top_logprobs"] == told[:2]
        assert chosen["logprob"] == next(t["logprob"] for t in told if t["id"] == chosen["id"])
    again = server.post("/completion", chain | {"n_probs": 0, "post_sampling_probs": False, "cache_prompt": False})
    assert again["content"] == answer["content"]
    assert answer["generation_settings"]["samplers"] == ["top_k", "top_p", "infill"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post("/completion", chain | {"grammar": 'root ::= "a"'})
    assert caught.value.code == 400
    assert "infill cannot be had with a grammar" in json.loads(caught.value.read())["error"]["message"]
