"""T5 (Raffel et al., 2020): the decoder behind its encoder, against float64 and llama.cpp, in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from logitless import LLM, RequestError, SamplingParams
from logitless.backends.cpu.backend import CPUBackend
from logitless.engine.batch import UBatch, token_slots
from logitless.engine.errors import InvalidRequest
from logitless.engine.loading.open_model import generating_hparams
from logitless.engine.loading.options import OptionConflict
from logitless.engine.requests import CompletionRequest
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.frontend.chat.chat import chat_tokens
from logitless.frontend.parser import RequestParser
from logitless.graph.execution.session import Session
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.overrides import Overrides
from logitless.models.model import hparams_of
from logitless.training.run import FineTuning
from tests.helpers.http_fakes import FakeTemplate
from tests.helpers.llama_cpp_library import OPENED, answers, needs_llama_cpp
from tests.helpers.reference_model import Spec, write

Array = np.ndarray[Any, Any]
START, N_VOCAB, HEADS = 3, 512, 4
SPEC = Spec(
    "t5",
    n_layer=3,
    n_head_kv=HEADS,
    n_vocab=N_VOCAB,
    n_ctx_train=128,
    untied=True,
    vocabulary=True,
    traits=("ffn_gate",),
    keys={"attention.relative_buckets_count": 32, "decoder_start_token_id": START, "decoder_block_count": 2},
)
RELU = replace(SPEC, traits=(), untied=False, keys=SPEC.keys | {"decoder_block_count": 3})
RNG = np.random.default_rng(0)
SOURCES = [RNG.integers(4, N_VOCAB, n).astype(np.int32) for n in (7, 40, 90)]
TARGETS = [np.array([START, *RNG.integers(4, N_VOCAB, n)], np.int32) for n in (20, 3, 150)]


def log_softmax(z: Array) -> Array:
    z = z.astype(np.float64) - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def computed(engine: ModelRunner, *which: int, from_: int = 0) -> list[Array]:
    """Log-probabilities (tokens, n_vocab) behind the tokens of these targets in one batch; `from_`: without those
    in front, which the cache has."""
    batch = UBatch(n_top=1 + N_VOCAB)
    for i in which:
        n, target = len(SOURCES[i]), TARGETS[i].tolist()[from_:]
        batch.tables[i] = table = list(range(16 * i, 16 * i + 16))
        if not from_:
            batch.sources.append((i, SOURCES[i].tolist(), token_slots(table, range(n))))
        pos = range(n + from_, n + from_ + len(target))
        batch.out += range(len(batch.tokens), len(batch.tokens) + len(target))
        batch.tokens += target
        batch.pos += pos
        batch.slot_mapping += token_slots(table, pos)
        for values, value in ((batch.slot, i), (batch.n_source, n), (batch.rows, None), (batch.targets, 0)):
            values += [value] * len(target)  # type: ignore[operator]
    result = engine.step(batch)
    assert result.top_ids is not None
    assert result.logprobs is not None
    rows = np.empty((len(batch.tokens), N_VOCAB))
    np.put_along_axis(rows, result.top_ids, result.logprobs[:, 1:], 1)
    return np.split(rows, np.cumsum([len(TARGETS[i]) - from_ for i in which])[:-1])


OPTIONS = RunnerOptions(n_ctx=1024, n_slots=3, n_ctx_slot=256, n_ubatch=64, type_k="f32", type_v="f32")
THEIRS = (
    OPENED
    + """
lib.llama_encode.restype, lib.llama_encode.argtypes = ctypes.c_int, [pointer, Batch]
for i in range(3):
    context = opened(512)
    source, target, every = cases[f"source.{i}"], cases[f"target.{i}"], np.ones(512, np.int8)
    for run, ids in ((lib.llama_encode, source), (lib.llama_decode, target)):
        assert run(context, Batch(len(ids), ids.ctypes.data, None, None, None, None, every.ctypes.data)) == 0
    results[str(i)] = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(target), n_vocab)).copy()
np.savez(sys.argv[2], **results)
"""
)


@needs_llama_cpp
@pytest.mark.parametrize("spec", [SPEC, RELU], ids=["gated", "relu"])
def test_log_probabilities_are_llama_cpps_in_any_company(tmp_path: Path, spec: Spec) -> None:
    write(tmp_path / "t5.gguf", spec)
    cases = {f"{name}.{i}": ids for name, of in (("source", SOURCES), ("target", TARGETS)) for i, ids in enumerate(of)}
    theirs = answers(THEIRS, {"path": str(tmp_path / "t5.gguf"), "n_vocab": N_VOCAB, **cases}, tmp_path)
    engine = ModelRunner(tmp_path / "t5.gguf", OPTIONS)
    together = computed(engine, 0, 1, 2)
    for i, rows in enumerate(together):
        expected = log_softmax(theirs[str(i)])
        assert np.sqrt(np.mean((rows - expected) ** 2)) < 0.01 * expected.std()
        (alone,) = computed(engine, i)
        np.testing.assert_array_equal(alone, rows)
    (later,) = computed(engine, 2, from_=140)
    np.testing.assert_array_equal(later, together[2][140:])
    engine.close()


PROMPTS = [
    f"once upon a time {text}" for text in ("tom", "a cat and a dog", "the sun " * 8, "a boy " * 6, "it was " * 5)
]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write(path := tmp_path_factory.mktemp("t5") / "t5.gguf", SPEC)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, ctx_size=160, parallel=4, kv_unified=True, device="cpu") as llm:
        yield llm


def test_streams_have_the_same_bits_alone_together_and_preempted(llm: LLM) -> None:
    """The cache has no room for all: some wait, and some lose their blocks."""
    together = llm.generate(PROMPTS, GREEDY)
    for prompt, each in zip(PROMPTS, together, strict=True):
        alone = llm.generate([prompt], GREEDY)[0]
        assert (alone.token_ids, alone.logprobs) == (each.token_ids, each.logprobs)
    assert len({tuple(each.token_ids) for each in together}) == len(PROMPTS)
    assert llm.stats()["preemptions"] > 0


def test_cached_prompts_are_whole_ones(llm: LLM) -> None:
    """A prompt that begins as another does has nothing in common with it: the encoder reads both ways."""
    first, again = (llm.generate(["so it was said to all of them here"], GREEDY)[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, first.prompt_tokens - 1)
    assert again.logprobs == first.logprobs
    other = llm.generate(["so it was said to all of them here too"], GREEDY)[0]
    assert other.cached_tokens == 0
    assert other.logprobs != first.logprobs
    anew = llm.generate(["so it was said to all of them here too"], structs.replace(GREEDY, cache_prompt=False))[0]
    assert (anew.cached_tokens, anew.logprobs) == (0, other.logprobs)


def test_dry_run_counts_the_weights_of_the_encoder(path: Path) -> None:
    engine = ModelRunner(path, OPTIONS)
    (planned,), _ = engine.dry_run()
    assert planned.weights >= sum(t.nbytes for t in engine.gguf.tensors.values())
    engine.close()


def test_encoder_refusals_are_one_line(llm: LLM, path: Path) -> None:
    with pytest.raises(RequestError, match="an encoder reads the prompt: its tokens have no log-probabilities"):
        llm.generate(["once"], SamplingParams(max_tokens=1, prompt_logprobs=1))
    served = llm._llm.service.served
    assert served is not None
    with pytest.raises(InvalidRequest, match="n_cache_reuse: an encoder reads the prompt"):
        served.scheduler.submit(CompletionRequest((5,), n_cache_reuse=16))
    parsers = [
        RequestParser(served.tokenizer, llm._llm.config, 64, n_start=n, template=FakeTemplate())
        for n in (0, served.info.n_start)
    ]
    body = {"messages": [{"role": "user", "content": "once"}]}
    fewer, more = (chat_tokens(body, parser) for parser in parsers)  # type: ignore[arg-type]
    assert more == fewer + 1
    for refused in (lambda: llm.score(["once upon"]), lambda: llm.finetune([{"text": "once upon"}])):
        with pytest.raises(RequestError, match="has an encoder that reads prompts: it scores no texts and cannot be"):
            refused()
    with GGUFFile.open(path) as gguf, pytest.raises(OptionConflict, match="has an encoder that reads prompts"):
        generating_hparams(gguf, path)
    with pytest.raises(ValueError, match="--context-shift: this model's encoder has read the prompt"):
        ModelRunner(path, replace(OPTIONS, moves="--context-shift"))
    with (
        pytest.raises(ModelFileError, match="'t5' has an encoder that reads prompts and cannot be"),
        Session([CPUBackend(1)]) as session,
    ):
        FineTuning(session, path, [{"text": "once"}])
    for key, value, line in (
        ("decoder_start_token_id", N_VOCAB, "is 512, of 512 tokens"),
        ("decoder_block_count", 600, "is 600; supported are 1 to 512"),
        ("attention.causal", False, "is false, which is not supported in t5"),
    ):
        with GGUFFile.open(path, Overrides(own=((key, value),))) as gguf, pytest.raises(ModelFileError, match=line):
            hparams_of(gguf)
