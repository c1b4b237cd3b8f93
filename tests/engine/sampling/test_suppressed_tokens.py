"""Suppressed tokens (tokenizer.ggml.suppress_tokens) on the real engine: never sampled.

They have a bias of -∞ in every request, as in llama.cpp's sampler; log-probabilities stay the
model's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from logitless.engine.errors import InvalidRequest
from logitless.engine.params import Generation
from logitless.engine.requests import CompletionRequest, Token, TokenProb
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.grammar_mask import GrammarConstraint
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sampling.sampler import RowSampler
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.frontend.fields import read
from logitless.frontend.sampling import parse_sampling
from logitless.graph.ops.sampling import samplers as s
from logitless.models import tokenizer as tokenizers
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, copied_keys, tensor, write_gguf
from logitless.models.grammar import Grammar
from logitless.models.tokenizer import Tokenizer
from tests.models.architectures.test_llama_cpp import answers

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine(shared_data: Path) -> Iterator[ModelRunner]:
    engine = ModelRunner(shared_data / "models" / "stories260K.gguf", RunnerOptions(128, 1, 32, threads=1))
    engine.load()
    yield engine
    engine.close()


def vocabulary(engine: ModelRunner, *suppressed: int) -> Tokenizer:
    given = {"tokenizer.ggml.suppress_tokens": list(suppressed)} if suppressed else {}
    return tokenizers.from_metadata({**engine.gguf.metadata, **given})


def first(engine: ModelRunner, vocab: Tokenizer, **sampling: Any) -> TokenProb:
    """The first token after the prompt, and what was likely."""
    scheduler = Scheduler(engine, vocab, SchedulerConfig(n_slots=1, n_ctx=128, n_ubatch=32))
    params = SamplingParams(**{"temperature": 0.0, "seed": 3, "n_probs": 6, **sampling})
    scheduler.submit(CompletionRequest(tuple(vocab.encode(PROMPT)), n_predict=1, sampling=params))
    result = []
    while not scheduler.idle:
        result += [event for _, event in scheduler.step() if isinstance(event, Token)]
    assert len(result) == 1
    assert result[0].prob is not None
    return result[0].prob


def test_the_likeliest_that_is_left_is_taken(engine: ModelRunner) -> None:
    before = first(engine, vocabulary(engine))
    likely = [id for id, _ in before.top]
    assert before.id == likely[0]
    after = first(engine, vocabulary(engine, *likely[:2]))
    assert after.id == likely[2]
    assert after.top == before.top
    assert after.value == before.top[2][1]
    biased = first(engine, vocabulary(engine, likely[0]), logit_bias=((likely[0], 100.0),))
    assert biased.id == likely[1]


@pytest.mark.parametrize("samplers", [(), ("top_k", "temperature"), ("penalties", "dry", "top_p", "temperature")])
def test_any_chain_leaves_them_out(engine: ModelRunner, samplers: tuple[str, ...]) -> None:
    vocab = vocabulary(engine, *range(3, 500))
    options = {"temperature": 5.0, "samplers": samplers, "repeat_penalty": 1.1, "dry_multiplier": 0.5}
    chosen = [first(engine, vocab, seed=seed, post_sampling_probs=True, **options) for seed in range(8)]
    assert all(not 3 <= prob.id < 500 for prob in chosen)
    assert all(not 3 <= id < 500 for prob in chosen for id, _ in prob.top)


def test_a_grammar_takes_what_it_allows_of_the_rest(engine: ModelRunner) -> None:
    vocab = vocabulary(engine)
    likely = [id for id, _ in first(engine, vocab).top]
    texts = " | ".join(f"<[{id}]>" for id in likely[:2])
    fewer = vocabulary(engine, likely[0])
    grammar = GrammarConstraint(Grammar.compile("lark", f"start: {texts}", fewer))
    assert first(engine, fewer, grammar=grammar).id == likely[1]


def test_rows_and_requests(engine: ModelRunner) -> None:
    vocab = vocabulary(engine, 7, 5)
    rows = RowSampler(SamplingParams(seed=1, logit_bias=((9, 1.0),)), vocab, 64).draft_feeds([1, 2])
    for row in rows:
        assert list(row.ids) == [9, 5, 7]
        assert list(row.values) == [1.0, -np.inf, -np.inf]
        assert list(row.kinds) == [s.BIAS_ENTRY] * 3
    rest = [[id, False] for id in range(vocab.n_vocab) if id not in (5, 7)]
    with pytest.raises(InvalidRequest, match="no token is left"):
        parse_sampling(read(Generation, {"logit_bias": rest}), SamplingParams(), vocab, 0)
    parse_sampling(read(Generation, {"logit_bias": rest[1:]}), SamplingParams(), vocab, 0)


LLAMA_CPP = """
path, bodies = json.load(sys.stdin)
server = opened(path, 128)
for body in bodies:
    print(json.dumps(server.handle_completions(body)["choices"][0]["logprobs"]["content"][0]))
"""


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_llama_cpp_takes_the_same(engine: ModelRunner, tmp_path: Path) -> None:
    likely = [id for id, _ in first(engine, vocabulary(engine)).top]
    path, held = tmp_path / "m.gguf", GGUFReader(engine.gguf.path).tensors
    keys = copied_keys(engine.gguf.metadata)
    numbers = Key([likely[0], likely[2]], ValueType.ARRAY, ValueType.INT32)
    tensors = ((t.name, tensor(t.data.reshape(t.shape[::-1]))) for t in held)
    write_gguf(path, "llama", keys | {"tokenizer.ggml.suppress_tokens": numbers}, tensors)
    with GGUFFile.open(path) as gguf:
        vocab = tokenizers.from_metadata(gguf.metadata)
    assert vocab.suppressed_ids == tuple(sorted((likely[0], likely[2])))
    asked = {"prompt": vocab.encode(PROMPT), "max_tokens": 1, "temperature": 0, "logprobs": 6}
    grammar = f"root ::= {' | '.join(json.dumps(vocab.piece(id).decode()) for id in likely[:2])}"
    bodies = [asked, asked | {"grammar": grammar}, asked | {"logit_bias": [[likely[0], 100.0]]}]
    free, bound, biased = (json.loads(line) for line in answers(LLAMA_CPP, json.dumps([str(path), bodies])))
    got = first(engine, vocab)
    assert got.id == likely[1] == free["id"] == bound["id"] == biased["id"]
    assert [id for id, _ in got.top] == [entry["id"] for entry in free["top_logprobs"]]
    np.testing.assert_allclose([p for _, p in got.top], [e["logprob"] for e in free["top_logprobs"]], atol=1e-2)
    assert first(engine, vocab, grammar=GrammarConstraint(Grammar.compile("gbnf", grammar, vocab))).id == bound["id"]
