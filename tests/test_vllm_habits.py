"""Habits of programs for vLLM: adapters of requests, encode, beam search, logits processors, n."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    Error,
    LoRARequest,
    ModelError,
    RequestError,
    SamplingParams,
    Trainer,
)
from logitless import jobs as face

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TALK = [{"role": "user", "content": "Good night!"}]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(parallel=4, ctx_size=2048, threads=1) as one:
        yield one


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "a.gguf"
    rows = [{"prompt": "Who is there?", "completion": " Nay, answer me."}] * 8
    with Trainer(None, rows, ctx_size=32, batch_size=4, iterations=3, learning_rate=2e-2) as trainer:
        trainer.fit()
        trainer.save(path)
    return path


# -- adapters


def test_lora_requests_of_one_batch_equal_models_with_the_adapter(llm: LLM, adapter: Path) -> None:
    lora = LoRARequest("nay", 1, adapter)
    prompts = ["Who is there?", "Who is there?", "ROMEO:"]
    plain, tuned, other = llm.generate(prompts, GREEDY, lora_request=[None, lora, lora])
    assert plain.text == llm.generate("Who is there?", GREEDY).text != tuned.text
    with LLM(lora=adapter, threads=1) as loaded:
        assert [c.text for c in loaded.generate(prompts[1:], GREEDY)] == [tuned.text, other.text]
        assert llm.chat(TALK, GREEDY, lora_request=lora).text == loaded.chat(TALK, GREEDY).text
    assert "".join(chunk.text for chunk in llm.stream("ROMEO:", GREEDY, lora_request=lora)) == other.text
    assert llm.generate("ROMEO:", GREEDY, lora_request=LoRARequest("nay", 1, str(adapter))).text == other.text


@pytest.mark.parametrize(
    ("lora", "params", "kind", "line"),
    [
        (LoRARequest("x", 1, "nowhere.gguf"), None, ModelError, "nowhere.gguf: no such file"),
        ({"lora_name": "x"}, None, RequestError, "lora_request: expected LoRARequest, not dict"),
        ([None], None, RequestError, "lora_request: expected LoRARequest, not list"),
        (
            LoRARequest("x", 1, "a.gguf"),
            SamplingParams(adapters={"a.gguf": 1}),
            RequestError,
            "lora_request and SamplingParams.adapters are the same",
        ),
    ],
)
def test_wrong_lora_requests_are_one_line(llm: LLM, lora: Any, params: Any, kind: type[Error], line: str) -> None:
    with pytest.raises(kind) as refusal:
        llm.chat(TALK, params, lora_request=lora)
    assert line in str(refusal.value)


def test_lora_requests_of_another_number_than_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lora_request: 1 of them for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, lora_request=[None])


# -- embeddings


def test_encode_has_the_vectors_of_embed(llm: LLM) -> None:
    texts = ["Good night", "Nay, answer me"]
    results = llm.encode(texts, pooling="mean")
    assert (np.stack([r.outputs.data for r in results]) == llm.embed(texts, pooling="mean")).all()
    assert [[*r.prompt_token_ids] for r in results] == [llm.tokenize(text) for text in texts]
    assert len(llm.encode("Good night", pooling="mean")) == len(llm.encode({"prompt": "a"}, pooling="mean")) == 1
    assert llm.encode([], pooling="mean") == []
    with pytest.raises(RequestError, match="pooling_task: 'token_embed' is not there; 'embed' is"):
        llm.encode(texts, pooling_task="token_embed")


# -- several results


def test_n_results_equal_requests_of_the_next_seeds(llm: LLM) -> None:
    three = llm.generate(["ROMEO:", "Nay"], SamplingParams(n=3, seed=5, max_tokens=6))
    for result, prompt in zip(three, ("ROMEO:", "Nay"), strict=True):
        alone = [llm.generate(prompt, SamplingParams(seed=seed, max_tokens=6)).text for seed in (5, 6, 7)]
        assert [c.text for c in result.outputs] == alone
    answers = llm.chat(TALK, SamplingParams(n=2, seed=5, max_tokens=6))
    alone = [llm.chat(TALK, SamplingParams(seed=seed, max_tokens=6)).text for seed in (5, 6)]
    assert (
        [a.text for a in answers.outputs]
        == alone
        == [a.text for a in llm.chat(TALK, seed=5, max_tokens=6, n=2).outputs]
    )
    assert len(llm.generate("ROMEO:", SamplingParams(n=6, max_tokens=1)).outputs) == 6  # more than slots
    with pytest.raises(RequestError, match="field 'n': a stream has one result, not 2"):
        list(llm.stream("ROMEO:", SamplingParams(n=2)))


# -- beam search


def reference(llm: LLM, prompt: list[int], width: int, n: int) -> list[tuple[list[int], float]]:
    """The beams, by scores of whole texts."""
    beams = [(prompt, 0.0)]
    for _ in range(n):
        longer = []
        for tokens, value in beams:
            (step,) = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=1, logprobs=1000))
            longer += [([*tokens, id], value + logprob) for id, logprob in step.logprobs[0].top]
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    return beams


def test_beam_search_finds_the_beams_of_an_exhaustive_ranking(llm: LLM) -> None:
    prompts = ["ROMEO:", {"prompt": "The king"}]
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    for output, prompt in zip(llm.beam_search(prompts, params), ("ROMEO:", "The king"), strict=True):
        ids = llm.tokenize(prompt)
        expected = reference(llm, ids, 3, 4)
        assert [[*s.tokens] for s in output.sequences] == [tokens for tokens, _ in expected]
        for sequence in output.sequences:
            scored = llm.score([[*sequence.tokens]])[0].logprobs[len(ids) - 1 :]
            assert sequence.cum_logprob == pytest.approx(float(scored.sum()), abs=1e-3)
            assert sequence.text == llm.detokenize(sequence.tokens)
            assert sequence.finish_reason == "length"
    (one,) = llm.beam_search(["ROMEO:"], BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))
    assert one.sequences[0].tokens[-8:] == llm.generate("ROMEO:", GREEDY).token_ids


def test_beam_search_ends_at_end_tokens_and_ranks_by_length() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    search = face.BeamSearch([7], params, {0})
    search.extend([[(0, -0.4), (1, -0.6), (2, -2.0), (3, -9.0)]])
    assert [beam.tokens for beam in search.beams] == [(7, 1), (7, 2)]
    search.extend([[(0, -0.1), (4, -0.3), (5, -8.0)], [(4, -0.1), (5, -0.2)]])
    found = search.result(str)
    # mean log-probabilities: (7 1 4) -0.9/3, (7 1 0) -0.7/2, (7 0) -0.4/1
    assert [(s.tokens, s.finish_reason) for s in found] == [((7, 1, 4), "length"), ((7, 1, 0), "stop")]
    assert found[0].cum_logprob == pytest.approx(-0.9)


@pytest.mark.parametrize("field", ["beam_width", "max_tokens"])
def test_beam_search_without_width_is_refused(field: str) -> None:
    with pytest.raises(RequestError, match=f"field '{field}': must be a whole number of 1 or more, not 0"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, field: 0})


def test_beam_search_of_wrong_types_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params: expected BeamSearchParams, not dict"):
        llm.beam_search(["a"], {"beam_width": 2})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompts: expected a list, not str"):
        llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=1))


# -- logits processors


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 3},
        {"seed": 3, "repeat_penalty": 1.3, "presence_penalty": 0.2, "dry_multiplier": 0.8},
        {"seed": 3, "xtc_probability": 0.5, "typical_p": 0.9},
        {"seed": 3, "mirostat": 2},
        {"seed": 3, "samplers": ["temperature", "adaptive_p"], "adaptive_target": 0.3},
        {"seed": 3, "json_schema": SCHEMA},
        {"seed": 3, "logprobs": 2, "logit_bias": {5: 3.0}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_processor_that_changes_nothing_gives_the_devices_result(llm: LLM, fields: dict[str, Any]) -> None:
    plain = llm.generate("ROMEO:", SamplingParams(max_tokens=24, **fields))
    params = SamplingParams(max_tokens=24, **fields, logits_processors=[lambda ids, logits: logits])
    host = llm.generate("ROMEO:", params)
    assert (host.text, host.token_ids, host.finish_reason) == (plain.text, plain.token_ids, plain.finish_reason)
    assert [(p.id, p.top) for p in host.logprobs] == [(p.id, p.top) for p in plain.logprobs]
    assert [p.logprob for p in host.logprobs] == pytest.approx([p.logprob for p in plain.logprobs], rel=1e-5)


def test_processors_change_their_own_request_only(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[list[int], list[int]]] = []

    def only(prompt: list[int], generated: list[int], logits: np.ndarray) -> np.ndarray:
        calls.append((prompt, generated))
        logits[:] = -np.inf
        logits[5 + len(generated)] = 0
        return logits

    def lower(generated: list[int], logits: np.ndarray) -> np.ndarray:
        return logits / 2

    face._warn_of_processors.cache_clear()
    params = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=3, logits_processors=[lower, only]),
        SamplingParams(seed=1, max_tokens=8),
    ]
    with caplog.at_level(logging.WARNING, "logitless"):
        first, forced, last = llm.generate(["ROMEO:", "Nay", "The king"], params)
        llm.generate("Nay", params[1])
    assert forced.token_ids == (5, 6, 7)
    assert first == _like(first, llm.generate("ROMEO:", params[0]))
    assert last == _like(last, llm.generate("The king", params[2]))
    ids = llm.tokenize("Nay")
    assert calls[:3] == [(ids, []), (ids, [5]), (ids, [5, 6])]
    assert caplog.text.count("logits_processors are slow") == 1
    assert llm.chat(TALK, SamplingParams(temperature=0, max_tokens=2, logits_processors=[only])).token_ids == (5, 6)


def _like(one: Any, other: Any) -> Any:
    """The other result with the first one's time, cached tokens and seed."""
    return replace(other, seconds=one.seconds, cached_tokens=one.cached_tokens, seed=one.seed)


@pytest.mark.parametrize(
    ("processor", "line"),
    [
        (lambda ids, logits: {}[5], "logits_processors: <lambda>: KeyError: 5"),
        (lambda ids, logits: logits[:3], "logits_processors: <lambda>: its result is not"),
        (lambda ids, logits: None, "logits_processors: <lambda>: its result is not"),
        (lambda ids, logits: logits * np.nan, "logits_processors: <lambda>: its result is not"),
    ],
)
def test_processor_that_fails_ends_its_request(llm: LLM, processor: Callable[..., Any], line: str) -> None:
    wrong = SamplingParams(max_tokens=4, logits_processors=[processor])
    with pytest.raises(RequestError) as refusal:
        llm.generate(["ROMEO:"], wrong)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert llm.generate("ROMEO:", GREEDY).finish_reason == "length"


def test_processors_that_are_none_are_refused(llm: LLM) -> None:
    for wrong in (["boost"], 5, len):
        with pytest.raises(RequestError, match="field 'logits_processors': expected a list of functions"):
            SamplingParams(logits_processors=wrong)  # type: ignore[arg-type]
    none = SamplingParams(temperature=0, max_tokens=8, logits_processors=None, n=None)  # type: ignore[arg-type]
    assert llm.generate("ROMEO:", none).text == llm.generate("ROMEO:", GREEDY).text
    both = SamplingParams(max_tokens=1, samplers=["infill"], logits_processors=[lambda ids, logits: logits])
    with pytest.raises(RequestError, match="logits_processors cannot be had with infill"):
        llm.generate("ROMEO:", both)


# -- event loops


def test_async_model_serves_several_loops_in_sequence() -> None:
    model = AsyncLLM(threads=1)

    async def text() -> str:
        return (await model.complete(["ROMEO:"], GREEDY))[0].text

    async def leave() -> str:
        async for chunk in model.generate("ROMEO:", SamplingParams(max_tokens=200, ignore_eos=True)):
            return chunk.text
        return ""

    first = asyncio.run(text())
    for _ in range(3):
        assert asyncio.run(leave())
        assert asyncio.run(text()) == first

    async def close() -> dict[str, float]:
        stats = await model.stats()
        await model.close()
        return stats

    assert asyncio.run(close())["requests_processing"] == 0
    assert not model.alive


def test_async_model_in_a_second_loop_beside_the_first_says_so() -> None:
    model = AsyncLLM(threads=1)

    async def use() -> None:
        await model.complete(["a"], SamplingParams(max_tokens=1))

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(use())
        for work in (use, model.close):
            with pytest.raises(Error, match="belongs to the event loop that uses it"):
                second.run(work())
        first.run(use())
        first.run(model.close())
