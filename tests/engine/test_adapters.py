"""Adapters of a server: a request's result does not depend on adapters of earlier requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from logitless.engine.adapters import Adapters
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.models.adapters.full_finetunes import digest_of
from logitless.models.adapters.lora import Adapter
from logitless.models.adapters.merge import merge
from tests.models.adapters.test_lora import log_probs, random_adapter

MIX = ((0, 0.5), (1, 2.0), (2, -1.0))


@pytest.fixture(scope="module")
def engine(shared_data: Path) -> Iterator[ModelRunner]:
    engine = ModelRunner(
        shared_data / "models" / "arch-llama-gqa-F32.gguf", RunnerOptions(n_ctx=64, n_slots=2, n_ubatch=64)
    )
    engine.load()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def given(engine: ModelRunner) -> list[Adapter]:
    return [random_adapter(engine.gguf, i, rank) for i, rank in enumerate((3, 9, 4))]


def registry(engine: ModelRunner, given: list[Adapter]) -> Adapters:
    """Of a server that has just started."""
    engine.adapters.keep([])
    adapters = Adapters(engine.adapters, engine.weight_sets)
    for i, adapter in enumerate(given):
        adapters.add(f"{i}.gguf", partial(lambda adapter: adapter, adapter))
    return adapters


def test_order_of_first_use_changes_no_bit(engine: ModelRunner, given: list[Adapter]) -> None:
    """Products are added in the order of ids, wherever the adapters came to lie; who runs keeps what it has."""
    found = []
    for order in itertools.permutations(range(3)):
        adapters = registry(engine, given)
        alone = [adapters.resolve(((id, 1.0),)) for id in order]
        adapters.in_use = lambda alone=alone: alone
        before = [log_probs(engine, [choice.mix]) for choice in alone]
        choice = adapters.resolve(MIX)
        found.append((log_probs(engine, [choice.mix]), adapters.names(choice)))
        assert [log_probs(engine, [choice.mix]) for choice in alone] == before
        assert adapters.resolve(MIX) == choice  # and is not brought there again
    assert found == found[:1] * 6
    assert found[0][1] == tuple((given[id].digest, scale) for id, scale in MIX)


def test_a_file_that_is_given_twice_is_found_twice(engine: ModelRunner, given: list[Adapter]) -> None:
    adapters = registry(engine, [given[0], given[0]])
    choice = adapters.resolve(((0, 0.5), (1, 2.0)))
    assert adapters.choice_of(adapters.names(choice)) == choice


def test_a_finetune_that_was_put_away_has_its_name_still(
    engine: ModelRunner, given: list[Adapter], tmp_path: Path
) -> None:
    """A slot that was computed with it may be saved."""
    adapters = registry(engine, [])
    for i, adapter in enumerate(given):
        merge(tmp_path / f"{i}.gguf", engine.gguf, engine.hparams, [(adapter, 1.0)])
        adapters.add(tmp_path / f"{i}.gguf", None)
    first = adapters.resolve(((0, 1.0),))
    adapters.remembered = lambda: [first]
    names = adapters.names(first)
    assert names == ((digest_of(tmp_path / "0.gguf"), 1.0),)
    for id in (1, 2):
        adapters.resolve(((id, 1.0),))
    assert first.weights not in engine.weight_sets
    assert adapters.names(first) == names
    again = adapters.choice_of(names)
    assert (again != first, adapters.names(again)) == (True, names)


def test_adapter_of_no_slot_is_forgotten(engine: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often adapters come and go."""
    monkeypatch.setattr("logitless.engine.adapters.MAX_RESIDENT", 2)
    bank = engine.adapters
    adapters = registry(engine, [random_adapter(engine.gguf, i) for i in range(3)])
    slots = [adapters.resolve(((0, 1.0),))]
    adapters.remembered = lambda: slots
    names = adapters.names(slots[0])
    for i in range(12):
        adapters.resolve(((i % 3, 1.0),))
        assert len(bank._digests) <= 3
    assert slots[0].mix[0][0] not in bank
    assert adapters.names(slots[0]) == names


def test_the_stack_grows_with_what_is_in_it_only(engine: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair wants its second adapter behind its first, which lies farther on every time."""
    monkeypatch.setattr("logitless.engine.adapters.MAX_RESIDENT", 4)
    adapters = registry(engine, [random_adapter(engine.gguf, i, 8) for i in range(40)])
    before = engine.adapters.n_columns
    for i in range(39):
        adapters.resolve(((i, 1.0), (i + 1, 1.0)))
    assert engine.adapters.n_columns <= max(before, 128)
