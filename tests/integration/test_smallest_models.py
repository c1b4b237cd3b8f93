"""Smallest models of every architecture: one layer, head and slot, a context of one page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.cli.commands.benchmark.bench import greedy
from logitless.engine.batch import UBatch
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from tests.helpers.architecture_specs import COHERE_MOE, PLAIN
from tests.helpers.reference_model import Spec, write
from tests.models.architectures.test_gemma3n import GEMMA3N, SMALL

N = 16  # tokens of a page, and of the context
PROMPT = [5, 9, 13, 2, 30, 31, 7, 8, 20, 21]
SIZES = {"one kv head", "heads without groups", "heads per layer", "no kv heads named"}  # with one head all are llama
SIZES |= {"head 10", "head 80", "deepseek2 of odd heads"}  # of tests of whole models
SPECS = {name: spec for name, spec in PLAIN.items() if name not in SIZES}
SPECS |= {"cohere2moe": COHERE_MOE, "gemma4": SMALL, "gemma3n": GEMMA3N["gemma3n"]}
HEADS = ("attention.head_count", "attention.head_count_kv")


def cut(s: Spec, first: int, n: int) -> Spec:
    """The model of these layers alone, with one head."""
    keys: dict[str, Any] = {}
    for name, value in s.keys.items():
        of_layers = isinstance(value, list) and len(value) == s.n_layer and name != "rope.dimension_sections"
        keys[name] = value[first : first + n] if of_layers else value
        if name in HEADS and isinstance(keys[name], list):
            keys[name] = [min(1, count) for count in keys[name]]
    keys |= {name: 0 for name in ("leading_dense_block_count", "attention.shared_kv_layers") if name in keys}
    size = max(16, s.head_dim or s.d)  # attention is compiled for each size of a head: 3 s
    return replace(s, n_layer=n, n_head=1, n_head_kv=1, head_dim=size, n_vocab=32, n_ctx_train=N, keys=keys)


def smallest(tmp_path: Path, s: Spec) -> Iterator[Path]:
    """Files of a single layer, each kind that a model has; of as few as there can be where one is too few."""
    for n in range(1, s.n_layer + 1):
        seen: list[Spec] = []
        for first in range(s.n_layer - n + 1):
            if (spec := cut(s, first, n)) in seen:
                continue
            with contextlib.suppress(ModelFileError):
                write(path := tmp_path / f"{first}-{n}.gguf", spec)
                with GGUFFile.open(path) as gguf:
                    hparams_of(gguf)
                seen.append(spec)
                yield path
        if seen:
            return
    raise AssertionError("no part of it is a model")


@contextmanager
def engine_of(path: Path, **options: Any) -> Iterator[ModelRunner]:
    """An engine with all plans that it makes ahead, the preemptible ones included."""
    engine = ModelRunner(path, RunnerOptions(n_ctx=N, n_slots=1, n_ubatch=N, threads=1, **options))
    try:
        engine.load()
        while engine.prepare_ahead():
            pass
        yield engine
    finally:
        engine.close()


def batch_of(engine: ModelRunner, first: int, stop: int, *, sample: bool) -> UBatch:
    """Tokens of the one sequence, its states in rows 1 and 2 in turn."""
    n, pos = stop - first, list(range(first, stop))
    batch = UBatch(PROMPT[first:stop], pos, [0] * n, pos, tables={0: [0]})
    if engine.states is not None:
        batch.begin = [1 if first else 0] + [-1] * (n - 1)
        batch.end = [-1] * (n - 1) + [2 if first else 1]
    if sample:
        batch.out, batch.rows, batch.targets, batch.n_top = [n - 1], [greedy()], [-1], 4
    return batch


def last_of_prompt(engine: ModelRunner, n_prefilled: int, *, preemptible: bool = False) -> bytes:
    """Log-probabilities after the prompt, its first tokens in a step that wants no logits."""
    if n_prefilled:
        batch = batch_of(engine, 0, n_prefilled, sample=False)
        if preemptible:
            list(engine.run_in_parts(batch))
        else:
            engine.step(batch)
    result = engine.step(batch_of(engine, n_prefilled, len(PROMPT), sample=True))
    assert result.logprobs is not None
    assert np.isfinite(result.logprobs).all()
    return result.logprobs.tobytes()


@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_in_two_steps_has_the_bits_of_one(tmp_path: Path, name: str) -> None:
    for path in smallest(tmp_path, SPECS[name]):
        with engine_of(path) as engine:
            at_once = last_of_prompt(engine, 0)
            for n in (1, len(PROMPT) - 1):
                assert last_of_prompt(engine, n) == at_once
            if engine.part_sizes:
                assert last_of_prompt(engine, 7, preemptible=True) == at_once
