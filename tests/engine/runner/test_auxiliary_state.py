"""Recurrent and sliding-window models on the real engine: the same bits in any batch.

Also however often a sequence is preempted and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.kv_cache.slot_actions import erase, install, snapshot
from logitless.engine.requests import CompletionRequest, Finished, Token
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.speculation.settings import SpeculationParams
from logitless.models.tokenizer import from_metadata
from tests.helpers.architecture_specs import MAPPED, PLAIN
from tests.helpers.reference_model import write
from tests.models.architectures.test_gemma3n import SHORT_3N, SMALL

STATES = ["qwen35", "qwen35 with a state last", "lfm2", "lfm2moe"]
STATES += ["granitehybrid", "nemotron_h", "falcon-h1", "mamba2", "rwkv6", "rwkv7", "kimi-k3", "glm5-next", "qwen4exp"]
FEW_KEPT = {"attention.compress_ratios": np.array([0, 4, 0, 4], np.uint32), "attention.sliding_window": 20}
WINDOWS = {
    "gpt-oss": replace(PLAIN["gpt-oss"], keys={"attention.sliding_window": 20}),
    "deepseek4 in two pools": replace(MAPPED["deepseek4"], keys=MAPPED["deepseek4"].keys | FEW_KEPT),
    "llama4": replace(PLAIN["llama4"], keys=PLAIN["llama4"].keys | {"attention.chunk_size": 20}),
    "gemma4": SMALL,
    "gemma3n": SHORT_3N,
}
PROMPTS = [[1, *((7 * i + j) % 300 + 150 for i in range(n))] for j, n in enumerate((5, 37, 70, 90))]


class LoadedModel:
    def __init__(self, path: Path, n_slots: int, n_ubatch: int, *, swa_full: bool = False) -> None:
        options = RunnerOptions(512, n_slots, n_ubatch, threads=2, swa_full=swa_full)
        self.engine = ModelRunner(path, options)
        self.engine.load()
        vocab = from_metadata(self.engine.gguf.metadata)
        sizes = {"n_slots": n_slots, "n_ctx": 512, "n_ubatch": n_ubatch}
        self.scheduler = Scheduler(self.engine, vocab, SchedulerConfig(**sizes, cache_ram=None))

    def answers(self, prompts: list[list[int]], **fields: Any) -> list[list[tuple[int, float]]]:
        """Ids and log-probabilities."""
        sampling = SamplingParams(temperature=0.9, seed=3, n_probs=1)
        seqs = [
            self.scheduler.submit(
                CompletionRequest(tuple(p), n_predict=12, ignore_eos=True, sampling=sampling, **fields)
            )
            for p in prompts
        ]
        found: dict[Any, list[tuple[int, float]]] = {seq: [] for seq in seqs}
        self.cached = {}
        while not self.scheduler.idle:
            for seq, event in self.scheduler.step():
                if isinstance(event, Token):
                    assert event.prob is not None
                    found[seq].append((event.id, event.prob.value))
                else:
                    assert isinstance(event, Finished), event
                    self.cached[seq.id] = event.n_cached
        return list(found.values())


SLOW = ("lfm2moe", "nemotron_h", "falcon-h1", "llama4", "gemma4")  # whose layers other ones of these have, too


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.long if n in SLOW else ()) for n in (*STATES, *WINDOWS)]
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("states") / "m.gguf"
    spec = (WINDOWS | PLAIN | MAPPED)[request.param]
    write(made, replace(spec, n_vocab=512, vocabulary=True, n_ctx_train=512))
    return made


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[LoadedModel]:
    served = LoadedModel(path, 1, 128, swa_full=True)
    yield served
    served.engine.close()


@pytest.fixture(scope="module")
def company(path: Path) -> Iterator[LoadedModel]:
    served = LoadedModel(path, 3, 24)
    yield served
    served.engine.close()


def test_in_company_and_in_pieces(alone: LoadedModel, company: LoadedModel) -> None:
    want = [alone.answers([prompt], cache_prompt=False)[0] for prompt in PROMPTS]
    assert company.answers(PROMPTS, cache_prompt=False) == want
    assert company.answers(PROMPTS) == want
    assert company.answers(PROMPTS) == want
    assert any(company.cached.values())


def test_going_on(alone: LoadedModel, company: LoadedModel) -> None:
    texts = [[*prompt, *(id for id, _ in alone.answers([prompt])[0]), 77, 78] for prompt in PROMPTS]
    want = [alone.answers([text], cache_prompt=False)[0] for text in texts]
    company.answers(PROMPTS)
    assert company.answers(texts) == want
    assert all(company.cached.values())


def test_guesses(alone: LoadedModel, company: LoadedModel) -> None:
    want = [alone.answers([prompt], cache_prompt=False)[0] for prompt in PROMPTS[:2]]
    for prompt, answer in zip(PROMPTS, want, strict=False):
        ids = [id for id, _ in answer]
        for n in (0, 3, 11):
            draft = (*ids[:n], (ids[n] + 1) % 512, *ids[n + 1 :])
            assert company.answers([prompt], speculation=SpeculationParams(draft=draft)) == [answer]


def test_host_memory_and_files(alone: LoadedModel, company: LoadedModel) -> None:
    """What others needed the place of, and what was taken out of one slot and put into another, is what it was."""
    scheduler, prompts = company.scheduler, [[1, *(id + 3 for id in prompt[1:])] for prompt in PROMPTS[1:]]
    texts = [[*prompt, *(id for id, _ in alone.answers([prompt])[0]), 77, 78] for prompt in prompts]
    want = [alone.answers([text], cache_prompt=False)[0] for text in texts]
    company.answers(prompts)
    states = [snapshot(scheduler, slot.id) for slot in scheduler.slots]
    scheduler.cache.sleep()
    assert not scheduler.cache.prefixes.nodes
    assert company.answers(texts) == want
    assert min(company.cached.values()) > 0
    for slot in scheduler.slots:
        erase(scheduler, slot.id)
    assert company.answers(prompts) == [alone.answers([prompt])[0] for prompt in prompts]
    assert max(company.cached.values()) == 0
    for slot in scheduler.slots:
        erase(scheduler, slot.id)
        install(scheduler, slot.id, states[slot.id])
    assert company.answers(texts) == want
    assert sorted(company.cached.values()) == [len(prompt) + 11 for prompt in prompts]


def test_windows_have_few_pages(company: LoadedModel, alone: LoadedModel) -> None:
    engine = company.engine
    assert alone.engine.window_kv is None
    assert (engine.window_kv is not None) == engine.hparams.has_windows
    assert engine.window_kv is None or engine.window_kv.n < engine.full_kv.n
    assert len(engine.memory.pools) == 1 + engine.hparams.has_windows


def test_tokens_are_not_forgotten(company: LoadedModel) -> None:
    options = RunnerOptions(n_ctx=64, n_slots=1, threads=1, moves="--context-shift", swa_full=False)
    keeps = company.engine.hparams.compression is not None
    if company.engine.hparams.has_windows and not keeps:  # then they keep everything
        engine = ModelRunner(company.engine.gguf.path, options)
        assert engine.window_kv is None
        engine.close()
        return
    why = "rows of blocks" if keeps else "layers keep states, which"
    with pytest.raises(ValueError, match=f"^--context-shift: this model's {why} cannot forget tokens"):
        ModelRunner(company.engine.gguf.path, options)
