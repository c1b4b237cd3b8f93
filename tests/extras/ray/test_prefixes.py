"""Prefix index and configuration of a fleet."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless import OptionError
from logitless.extras.ray.config import load_config, read_config
from logitless.extras.ray.prefixes import BLOCK, MAX_BLOCKS, PLACE, PrefixIndex, PrefixRoute, route_of

LONG = "All happy families are alike; every unhappy family is unhappy in its own way. " * 8


def blocks(body: dict[str, Any]) -> tuple[bytes, ...]:
    return route_of(body, {}).blocks


def shared(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Blocks that two prompts begin with."""
    return sum(1 for x, y in zip(blocks(a), blocks(b), strict=False) if x == y)


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    return {"messages": [{"role": roles[min(i, 2)], "content": text} for i, text in enumerate(texts)], **fields}


@given(st.text(max_size=600), st.text(max_size=600), st.text(max_size=600))
def test_equal_beginnings_have_equal_blocks_and_no_others(prefix: str, a: str, b: str) -> None:
    one, other = (prefix + a).encode(), (prefix + b).encode()
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    assert shared({"prompt": prefix + a}, {"prompt": prefix + b}) == n // BLOCK
    assert len(blocks({"prompt": prefix + a})) == len(one) // BLOCK


def test_a_conversation_goes_on_with_its_blocks() -> None:
    first = chat(LONG, "Who is Anna?")
    later = chat(LONG, "Who is Anna?", "A sister.", temperature=0.2)
    assert shared(first, later) == len(blocks(first)) > 3
    assert shared(first, chat(LONG, "Who is Levin?")) >= len(LONG) // BLOCK - 1
    assert shared(first, chat("X" + LONG, "Who is Anna?")) == 0


def test_adapters_and_images_make_other_prefixes() -> None:
    assert shared(chat(LONG, model="base"), chat(LONG, model="ft:base:a")) == 0
    assert shared(chat(LONG, lora=[{"id": 0, "scale": 1}]), chat(LONG)) == 0

    def seen(image: str) -> dict[str, Any]:
        url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + image}}
        return {"messages": [{"role": "user", "content": [url, {"type": "text", "text": LONG}]}]}

    assert shared(seen("A" * 10_000), seen("A" * 10_000)) == len(blocks(seen("A" * 10_000)))
    assert shared(seen("A" * 10_000), seen("A" * 9_999 + "B")) == 0
    assert len(blocks(seen("A" * 100_000))) < 10  # an image counts by its hash


@pytest.mark.parametrize("field", ["prompt", "input", "messages", "tools", "system", "documents", "lora", "model"])
def test_odd_bodies_have_a_route(field: str) -> None:
    for value in (None, 3, 1e400, True, [], {}, [None], {"a": [{"b": None}]}, "\ud800", [1, 2, 3] * 500):
        assert isinstance(route_of({field: value, "prompt_cache_key": value}, {}).session, str), value


def test_long_prompts_are_bounded() -> None:
    assert len(blocks({"prompt": "x" * (2 * BLOCK * MAX_BLOCKS)})) == MAX_BLOCKS
    assert blocks({"prompt": [7] * 10_000}) != blocks({"prompt": [8] * 10_000})


def test_the_longest_prefix_is_first_unless_its_queue_is_long() -> None:
    """A request there counts as much as PLACE blocks to compute."""
    index = PrefixIndex()
    short, whole = (PrefixRoute(tuple(b"%d" % i for i in range(n))) for n in (20, 30))
    index.add(short, "a")
    index.add(whole, "b")
    assert index.ranked({"a": 0, "b": 0, "c": 0}, whole, slack=9) == ["b", "a", "c"]
    assert index.ranked({"a": 0, "b": 2, "c": 0}, whole, slack=9) == ["b", "a", "c"]
    assert index.ranked({"a": 0, "b": 3, "c": 0}, whole, slack=9) == ["a", "b", "c"]
    assert index.ranked({"a": 6, "b": 8, "c": 0}, whole, slack=9) == ["c", "b", "a"]
    assert index.ranked({"a": 0, "b": 2, "c": 0}, whole, slack=1) == ["a", "c", "b"]  # its prefix does not count
    assert index.ranked({"a": 2, "b": 1, "c": 0}, PrefixRoute((b"x",)), slack=9) == ["c", "b", "a"]


def test_a_session_stays_where_it_was_last() -> None:
    index = PrefixIndex()
    index.add(PrefixRoute((b"1",), "s"), "a")
    index.add(PrefixRoute((b"1",), "s"), "b")
    assert index.ranked({"a": 0, "b": 1}, PrefixRoute((), "s"), slack=2)[0] == "b"
    index.keep({"a"})
    assert index.ranked({"a": 0}, PrefixRoute((b"1",), "s"), slack=2) == ["a"]
    assert [list(homes) for _, homes in index.matched(PrefixRoute((b"1",)))] == [["a"]]


@given(st.randoms(use_true_random=False))
def test_ranks_are_those_of_the_definition(rng: random.Random) -> None:
    """By the blocks to compute, and PLACE for each request that is there; the first sixteen of many."""
    index, prompts = PrefixIndex(), {}
    for replica in range(40):
        prompts[replica] = [tuple(b"%d" % rng.randrange(2) for _ in range(rng.randrange(6))) for _ in range(2)]
        for prompt in prompts[replica]:
            index.add(PrefixRoute(tuple(b"/".join(prompt[:n]) for n in range(1, len(prompt) + 1))), replica)
    loads = {replica: rng.randrange(4) for replica in prompts}
    expected = tuple(b"%d" % rng.randrange(2) for _ in range(6))
    limit = min(loads.values()) + 2

    def cost(replica: int) -> int:
        lengths = [
            n for prompt in prompts[replica] for n in range(7) if prompt[:n] == expected[:n] and len(prompt) >= n
        ]
        return PLACE * loads[replica] + 6 - (max(lengths) if loads[replica] <= limit else 0)

    route = PrefixRoute(tuple(b"/".join(expected[:n]) for n in range(1, 7)))
    ranked = index.ranked(loads, route, slack=2)
    assert [cost(replica) for replica in ranked] == sorted(map(cost, loads))[:16]
    assert len(set(ranked)) == 16


def test_the_index_forgets_the_oldest() -> None:
    index = PrefixIndex(max_entries=100)
    for i in range(1000):
        index.add(PrefixRoute((str(i).encode(),)), i % 3)
    assert len(index) == 100
    assert list(index.matched(PrefixRoute((b"999",))))
    assert not list(index.matched(PrefixRoute((b"1",))))


def test_sessions_are_spread_and_find_their_cache_again() -> None:
    """Multi-turn conversations on four replicas: nearly all blocks of later turns are where they were computed."""
    rng, index = random.Random(1), PrefixIndex()
    loads = dict.fromkeys("abcd", 0.0)
    computed: dict[str, set[bytes]] = {name: set() for name in loads}
    sessions = [[f"system {i % 3} {LONG}"] for i in range(60)]
    hits = total = 0
    counts = dict.fromkeys(loads, 0)
    for _ in range(600):
        session = rng.choice(sessions)
        session.append(f"{rng.random()} {LONG[:300]}")
        route = route_of(chat(*session), {})
        best = index.ranked(loads, route, slack=4)[0]
        index.add(route, best)
        if len(session) > 2:
            reusable = blocks(chat(*session[:-1]))
            total += len(reusable)
            hits += len(computed[best] & set(reusable))
        computed[best].update(route.blocks)
        loads = {name: load * 0.9 + (name == best) for name, load in loads.items()}
        counts[best] += 1
    assert hits >= 0.95 * total > 0
    assert min(counts.values()) > 60


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["models"]),
        ({"models": []}, ["models must not be empty"]),
        ({"models": [{"model": "m.gguf", "replica": 2}]}, ["models[0]", "replica"]),
        ({"models": [{"model": "m.gguf", "replicas": 0}]}, ["models[0]", "replicas must be at least 1"]),
        ({"models": [{"replicas": {"min": 3, "max": 2}}]}, ["models[0].replicas", "min <= max"]),
        ({"models": [{"model": "a/m.gguf"}, {"model": "b/m.gguf"}]}, ["two models are called 'm'"]),
        ({"models": [{}], "data_dir": 7}, ["data_dir"]),
        ({"models": [{"rpc_servers": {"n": 0}}]}, ["models[0].rpc_servers", "n must be at least 1"]),
        ({"models": [{"rpc_servers": {"strategy": "FAR"}}]}, ["models[0].rpc_servers.strategy", "FAR"]),
        ({"models": [{"rpc_servers": {}, "options": {"rpc": ["h:1"]}}]}, ["models[0]", "rpc_servers and"]),
    ],
)
def test_wrong_configurations_name_the_field(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OptionError) as refused:
        read_config(config)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_models_have_the_name_of_their_file() -> None:
    config = read_config(
        {"models": [{"model": "a/m.gguf"}, {"options": {"hf_repo": "u/r:Q8_0"}}, {"name": "x"}, {"replicas": 2}]}
    )
    assert [model.id for model in config.models] == ["m", "r:Q8_0", "x", "demo"]
    assert config.models[0].limit == 8


def test_a_configuration_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "fleet.yaml"
    path.write_text("models:\n  - model: m.gguf\n    replicas: {min: 1, max: 3}\n")
    replicas: Any = load_config(path).models[0].replicas
    assert (replicas.min, replicas.max) == (1, 3)
    for text in ("models: [", "- 1", "models:\n  - model: 7\n"):
        path.write_text(text)
        with pytest.raises(OptionError, match=str(path)):
            load_config(path)
    with pytest.raises(OptionError, match="No such file"):
        load_config(tmp_path / "none.yaml")
