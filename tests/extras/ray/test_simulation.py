"""Simulation of a fleet: conservation, determinism, and the order of routers on small fleets."""

from __future__ import annotations

import pytest

from logitless.extras.ray.config import Autoscaling
from scripts.simulate_fleet import BLOCK, ROUTERS, Fleet, Ours, Replica, RoundRobin, Speed, Traffic

SMALL = Fleet(replicas=6, seconds=200.0, traffic=Traffic(rate=0.05, systems=8))


def test_every_router_answers_the_same_requests() -> None:
    told = {name: SMALL.run(kind).told() for name, kind in ROUTERS.items()}
    assert len({row["requests"] for row in told.values()}) == 1
    assert told["ours"]["requests"] > 100
    for row in told.values():
        assert 0 < row["first_token_p50_s"] <= row["first_token_p99_s"]
        assert 0 < row["cache_hit_rate"] <= 1
    assert told["ours"]["cache_hit_rate"] > 0.95 > 0.7 > told["round robin"]["cache_hit_rate"]
    assert told["ours"]["first_token_p50_s"] < told["round robin"]["first_token_p50_s"]
    assert SMALL.run(Ours).told() == told["ours"]


def test_replicas_follow_the_queue() -> None:
    scales = Autoscaling(min=1, max=5, target=1, upscale_delay=5, downscale_delay=20)
    fleet = Fleet(replicas=6, seconds=300.0, scales=scales, traffic=SMALL.traffic)
    result = fleet.run(Ours)
    fixed = SMALL.run(Ours)
    assert result.most_replicas == 5
    assert result.n_requests >= fixed.n_requests  # none is lost while replicas leave
    assert 300 < result.replica_seconds < 5 * 300


def test_a_request_alone_takes_its_prompt_and_its_tokens() -> None:
    """One replica, one conversation of one turn: the times are the speed's."""
    speed = Speed(prefill=100.0, decode=((1, 10.0), (2, 16.0)))
    traffic = Traffic(rate=0.01, turns=1, burst=1)
    runs = (Fleet(replicas=1, seconds=200.0, speed=speed, traffic=traffic, seed=n).run(RoundRobin) for n in range(50))
    alone = next(run for run in runs if run.n_requests == 1)
    assert alone.first == [pytest.approx(alone.n_prompt / 100)]
    assert alone.n_cached == alone.n_reusable == 0
    assert [speed.step(n) for n in (1, 2, 4)] == [0.1, 0.125, 0.25]


def test_a_cache_forgets_the_deepest_blocks_of_the_oldest_prompt_first() -> None:
    replica = Replica(0, n_slots=1, n_blocks=4)
    replica.remember([b"a", b"b", b"c"])
    assert replica.cached([b"a", b"b", b"x"]) == 2
    replica.remember([b"d", b"e"])
    assert replica.cached([b"a", b"b", b"c"]) == 2
    assert BLOCK * replica.n_blocks == 128
