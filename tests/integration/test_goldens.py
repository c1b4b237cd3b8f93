"""Recorded answers of llama.cpp and of a float64 reference, repeated through the real port."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logitless.backends.host import has_bf16_dots
from tests.helpers.paths import DATA


def recorded(pattern: str, *parts: str) -> list[Any]:
    """One parameter per recorded file; one that skips, saying so, where the files are not there. Files whose names have
    none of the `parts` need --long: test_llama_cpp.py compares their kinds with llama.cpp itself."""
    files = sorted((DATA / "expected").glob(pattern))
    if not files:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"no {pattern} beside the checkout"))]
    slow = {f for f in files if parts and not any(part in f.name for part in parts)}
    return [pytest.param(f, id=f.name, marks=pytest.mark.long if f in slow else ()) for f in files]


@pytest.mark.parametrize("file", recorded("*.gguf.json", "stories"))
def test_answers_are_those_of_llama_cpp(serve_here: Any, file: Path) -> None:
    """On the CPU; test_devices.py has the others."""
    expected = json.loads(file.read_text())
    name = expected["file"]
    server = serve_here(DATA / "models" / name, "-c", "512", "-ctk", "f32", "-ctv", "f32")
    agrees_on_text_and_likelihood(server, expected)
    sampled = file.with_name(f"sampling-{name.removesuffix('.gguf')}.json")
    if sampled.exists():
        samples_as_recorded(server, json.loads(sampled.read_text()))


@pytest.mark.long
@pytest.mark.skipif(not has_bf16_dots(), reason="this processor has no products of bf16")
@pytest.mark.parametrize("file", recorded("*-BF16.gguf.json", "stories"))
def test_rows_rounded_to_bf16_cost_little(serve: Any, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("LOGITLESS_CPU_BF16", "1")
    expected = json.loads(file.read_text())
    server = serve(DATA / "models" / expected["file"], "-c", "512", "-ctk", "f32", "-ctv", "f32")
    agrees_on_text_and_likelihood(server, expected)


@pytest.mark.parametrize("file", recorded("sampling-*.json"))
def test_every_recording_of_samples_belongs_to_a_model_above(file: Path) -> None:
    model = json.loads(file.read_text())["model"]
    assert file.name == f"sampling-{model.removesuffix('.gguf')}.json"
    assert file.with_name(f"{model}.json").exists()


def agrees_on_text_and_likelihood(server: Any, expected: dict[str, Any]) -> None:
    """Prompt ids, greedy tokens and text, and the mean log-probability of a text are the recorded ones."""
    name = expected["file"]
    ids = server.post("/tokenize", {"content": expected["prompt"], "add_special": True})["tokens"]
    assert ids == expected["prompt_ids"]

    if any(kind in name for kind in ("F32", "F16", "stories260K.gguf")) and "BF16" not in name:
        n = len(expected["greedy_ids"])
        greedy = {"prompt": expected["prompt"], "n_predict": n, "temperature": 0, "return_tokens": True}
        answer = server.post("/completion", greedy)
        assert answer["tokens"] == expected["greedy_ids"]
        assert (expected["prompt"] + answer["content"]).strip() == expected["greedy_text"].strip()

    echo = {"prompt": expected["eval_ids"], "max_tokens": 0, "echo": True, "logprobs": 0}
    likelihoods = server.post("/v1/completions", echo)["choices"][0]["logprobs"]["token_logprobs"]
    assert likelihoods[0] is None
    assert len(likelihoods) == len(expected["eval_ids"])
    nll = -sum(likelihoods[1:]) / (len(likelihoods) - 1)
    bound = 0.002 if any(kind in name for kind in ("F32", "F16", "stories260K.gguf")) else 0.01
    assert nll == pytest.approx(expected["eval_mean_nll"], rel=bound)


def samples_as_recorded(server: Any, expected: dict[str, Any]) -> None:
    """Every recorded request but one at most gives the recorded tokens, and their probabilities."""
    missed = []
    for case in expected["cases"]:
        answer = server.post("/completion", case["request"])
        want = case["response"]
        same = all(
            answer[k] == want[k] for k in ("content", "tokens", "stop_type", "stopping_word", "tokens_predicted")
        )
        if not same:
            missed.append(case["case"])
            continue
        compare_probabilities(answer, want)
    assert len(missed) <= 1, missed
    assert "grammar" not in missed


def compare_probabilities(answer: dict[str, Any], want: dict[str, Any]) -> None:
    for got, expected in zip(
        answer.get("completion_probabilities", []), want.get("completion_probabilities", []), strict=True
    ):
        kind, top = ("prob", "top_probs") if "prob" in expected else ("logprob", "top_logprobs")
        assert got["id"] == expected["id"]
        assert got["token"] == expected["token"]
        assert got["bytes"] == expected["bytes"]
        assert got[kind] == pytest.approx(expected[kind], abs=2e-3)
        assert [t["id"] for t in got[top]] == [t["id"] for t in expected[top]]
        assert [t[kind] for t in got[top]] == pytest.approx([t[kind] for t in expected[top]], abs=2e-3)
