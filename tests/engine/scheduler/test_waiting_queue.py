"""Waiting queue: priorities, turns of clients, limits, common prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from logitless.engine.batch import BLOCK_SIZE
from logitless.engine.errors import RequestError, TooManyRequests, Unavailable
from logitless.engine.requests import BATCH_PRIORITY, Failed
from logitless.engine.scheduler.scheduler import Scheduler
from logitless.engine.scheduler.step_budget import shares
from logitless.engine.sequence import PLACES_PER_PRIORITY, Sequence
from tests.helpers.http_fakes import running
from tests.helpers.scheduler_fakes import N_VOCAB, Bench, FakeSampler, oracle


def prompt(n: int, salt: int = 0) -> list[int]:
    return [1 + (i * i + 7 * salt + i // 3) % (N_VOCAB - 1) for i in range(n)]


def order_of_ends(bench: Bench, seqs: list[Sequence]) -> list[int]:
    """Which of the requests ended first, second, ..."""
    ended: list[int] = []
    while not bench.scheduler.idle:
        bench.step()
        ended += [i for i, seq in enumerate(seqs) if seq.done and i not in ended]
    return ended


def test_the_least_priority_is_first() -> None:
    bench = Bench(n_slots=1)
    priorities = [0, 5, -1, 0, -(2**31)]
    seqs = [bench.submit(prompt(5, i), n_predict=2, priority=p) for i, p in enumerate(priorities)]
    assert order_of_ends(bench, seqs) == [4, 2, 0, 3, 1]


def test_oldest_request_of_a_priority_decides_its_turn() -> None:
    bench = Bench(n_slots=1)
    seqs = [bench.submit(prompt(5, p), n_predict=2, priority=p, client=client) for p, client in enumerate("ac")]
    bench.scheduler._n_submitted += PLACES_PER_PRIORITY  # as many requests later
    seqs.append(bench.submit(prompt(5, 9), n_predict=2, client="b"))
    assert order_of_ends(bench, seqs) == [0, 1, 2]


def test_a_late_one_of_less_priority_has_the_pages() -> None:
    bench = Bench(n_slots=3, n_ctx=96)
    early = [bench.submit(prompt(20, salt), n_predict=60, ignore_eos=True) for salt in range(2)]
    bench.step(3)
    late = bench.submit(prompt(20, 9), n_predict=60, ignore_eos=True, priority=-1)
    assert order_of_ends(bench, [*early, late])[0] == 2
    assert bench.scheduler.stats.preemptions > 0
    for seq in (*early, late):
        assert bench.answers[seq].outcome() == oracle(seq.request, 96)


def test_requests_of_batches_give_way() -> None:
    """They leave their slots when others come, those with the fewest tokens first."""
    bench = Bench(n_slots=2)
    batch = [bench.submit(prompt(5, i), n_predict=20, ignore_eos=True, priority=BATCH_PRIORITY) for i in range(3)]
    bench.step(4)
    assert [seq.slot is not None for seq in batch] == [True, True, False]
    early = bench.submit(prompt(5, 9), n_predict=20, ignore_eos=True)
    bench.step()
    assert [seq.done for seq in batch] == [False, True, False]
    assert early.slot is not None
    event = bench.answers[batch[1]].events[-1]
    assert isinstance(event, Failed)
    assert (event.code, event.type) == (503, "gave_way_error")
    more = [bench.submit(prompt(5, 10 + i), n_predict=20, ignore_eos=True) for i in range(3)]
    while not bench.scheduler.idle:
        bench.step()
    for seq in (early, *more, batch[2]):
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)
    assert isinstance(bench.answers[batch[0]].events[-1], Failed)
    assert bench.scheduler.queue.n_tokens == 0


def test_requests_of_batches_fill_no_queue() -> None:
    bench = Bench(n_slots=1, queue_requests=0)
    for i in range(3):
        bench.submit(prompt(5, i), n_predict=9, ignore_eos=True, priority=BATCH_PRIORITY)
    bench.step(2)
    bench.submit(prompt(5, 8), n_predict=9)  # the slot counts as free
    with pytest.raises(Unavailable):
        bench.submit(prompt(5, 9), n_predict=9, client="b")


def test_request_behind_better_priorities_runs_in_the_end() -> None:
    """Better ones come whenever one ends. For a seat, for pages, for its own slot: every turn comes."""
    bench = Bench(n_slots=2, n_ctx=96)
    worse = [bench.submit(prompt(40, 99), n_predict=30, ignore_eos=True, priority=1)]
    worse.append(bench.submit(prompt(40, 98), n_predict=30, ignore_eos=True, priority=1, id_slot=0))
    seqs: list[Sequence] = []
    while not all(seq.done for seq in worse):
        n_running = sum(not seq.done for seq in seqs)
        for _ in range(3 - n_running):
            seqs.append(bench.submit(prompt(40, len(seqs)), n_predict=20, ignore_eos=True, client=str(len(seqs) % 5)))
        bench.step()
        assert len(seqs) < 120
    assert len(seqs) > 80  # it is worth something all the same
    while not bench.scheduler.idle:
        bench.step()
    for seq in (*worse, *seqs):
        assert bench.answers[seq].outcome() == oracle(seq.request, 96)


def test_clients_take_turns() -> None:
    """One has sent eight requests before the others come; with two seats he has one of them."""
    bench = Bench(n_slots=2)
    clients = ["greedy"] * 8 + ["b", "c", "b"]
    seqs = [bench.submit(prompt(5, i), n_predict=2, ignore_eos=True, client=c) for i, c in enumerate(clients)]
    ends = order_of_ends(bench, seqs)
    assert ends[:6] == [0, 8, 1, 9, 2, 10]
    assert ends[6:] == [3, 4, 5, 6, 7]


def test_client_with_the_fewest_slots_comes_before_the_one_whose_turn_is_longest_ago() -> None:
    bench = Bench(n_slots=2)
    bench.submit(prompt(5, 0), n_predict=20, ignore_eos=True, client="a")
    bench.submit(prompt(5, 1), n_predict=2, ignore_eos=True, client="b")
    bench.step()
    seqs = [bench.submit(prompt(5, 2 + i), n_predict=2, ignore_eos=True, client=c) for i, c in enumerate("ab")]
    assert order_of_ends(bench, seqs) == [1, 0]


def test_one_seat_goes_round() -> None:
    """One who sends all at once does not hold up those who send one after the other, nor they him."""
    bench = Bench(n_slots=1)
    order: list[str] = []
    waiting = {bench.submit(prompt(5, i), n_predict=2, ignore_eos=True, client="greedy"): "greedy" for i in range(6)}
    while not bench.scheduler.idle:
        for client in "bc":
            if client not in waiting.values() and order.count(client) < 4:
                seq = bench.submit(prompt(5, len(order)), n_predict=2, ignore_eos=True, client=client)
                waiting[seq] = client
        bench.step()
        for seq in [seq for seq in waiting if seq.done]:
            order.append(waiting.pop(seq))
    assert "".join(client[0] for client in order) == "gbc" * 4 + "gg"


def test_limits_of_the_queue() -> None:
    bench = Bench(n_slots=2, queue_requests=3)
    seqs = [bench.submit(prompt(5, i), n_predict=3, client="a") for i in range(5)]  # two of them have seats
    with pytest.raises(TooManyRequests, match="3 requests wait already, and no more than 3 may") as caught:
        bench.submit(prompt(5), client="a")
    assert caught.value.retry_after is not None
    assert 1 <= caught.value.retry_after <= 600
    with pytest.raises(Unavailable, match="the queue is full"):
        bench.submit(prompt(5), client="b")
    bench.scheduler.cancel(seqs[4])
    bench.submit(prompt(5), client="b")
    bench.drain()
    assert not len(bench.scheduler.queue)
    assert bench.scheduler.queue.n_tokens == 0


def test_limits_of_tokens() -> None:
    bench = Bench(n_slots=1, queue_tokens=100)
    bench.submit(prompt(900))  # it has a seat
    bench.step()
    bench.submit(prompt(60))
    bench.submit(prompt(40))
    with pytest.raises(RequestError, match="prompts of 100 tokens wait already, and no more than 100 may") as caught:
        bench.submit([1])
    assert caught.value.code == 429
    none = Bench(n_slots=1, queue_requests=0)
    none.submit([1])
    with pytest.raises(TooManyRequests):
        none.submit([2])


def test_results_of_one_prompt_compute_it_once() -> None:
    bench = Bench(n_slots=4, n_ubatch=32)
    seqs = [bench.submit(prompt(200), n_predict=9, ignore_eos=True) for _ in range(4)]
    bench.drain()
    assert sum(len(batch.tokens) for batch in bench.engine.batches) == 200 + 3 * 8 + 4 * 8
    assert [bench.answers[seq].finished.n_cached for seq in seqs] == [0, 192, 192, 192]  # none waits for the last 8
    for seq in seqs:
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


def test_prompts_that_begin_alike_compute_that_once() -> None:
    bench = Bench(n_slots=3, n_ubatch=32)
    seqs = [bench.submit([*prompt(100), salt, *prompt(30, salt)], n_predict=1) for salt in (1, 2, 3)]
    alone = bench.submit(prompt(40, 8), n_predict=1)
    bench.drain()
    assert sum(len(batch.tokens) for batch in bench.engine.batches) == 131 + 2 * 35 + 40
    for seq in (*seqs, alone):
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


def test_sequence_that_waits_for_common_prefix_goes_on_when_its_owner_leaves() -> None:
    bench = Bench(n_slots=2, n_ubatch=32)
    first, second = (bench.submit(prompt(200), n_predict=3) for _ in range(2))
    bench.step(2)
    assert not second.started
    bench.scheduler.cancel(first)
    bench.drain()
    assert bench.answers[second].outcome() == oracle(second.request, 1024)
    assert bench.answers[second].finished.n_cached == 64


def test_without_the_cache_nobody_waits_for_a_prompt() -> None:
    bench = Bench(n_slots=2)
    seqs = [bench.submit(prompt(100), n_predict=1, cache_prompt=False) for _ in range(2)]
    bench.drain()
    assert [bench.answers[seq].finished.n_cached for seq in seqs] == [0, 0]


def test_a_short_prompt_passes_a_long_one() -> None:
    bench = Bench(n_slots=2, n_ctx=4096, n_ubatch=64)
    long, short = bench.submit(prompt(2000, 1), n_predict=1), bench.submit(prompt(50, 2), n_predict=1)
    bench.step(2)
    assert short.done
    assert long.n_computed == 64 - 32 + 64 - 18


@given(st.lists(st.integers(1, 300), max_size=8), st.integers(1, 200))
def test_shares(debts: list[int], room: int) -> None:
    got = shares(debts, room)
    assert sum(got) == min(room, sum(debts))
    assert all(0 <= n <= debt for n, debt in zip(got, debts, strict=True))
    if debts:
        assert got[0] >= min(debts[0], (room + 1) // 2)
    later = list(zip(debts, got, strict=True))[1:]
    for a, n in later:
        for b, m in later:
            assert not (a < b and a < debts[0] and n < a and m > 0), "a longer one went before a shorter one"


@pytest.mark.parametrize("broken", ["init", "begin", "feeds", "accept"])
def test_a_broken_sampler_ends_its_own_request(broken: str) -> None:
    class Broken(FakeSampler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if self.seed == 13:
                setattr(self, broken, self.breaks)
            if broken == "init":
                self.breaks() if self.seed == 13 else None

        def breaks(self, *_: object) -> Any:
            raise KeyError("a bug")

    bench = Bench(n_slots=4)
    bench.scheduler.make_sampler = Broken
    params = bench.submit([1], n_predict=1).request.sampling
    good = [bench.submit(prompt(9, i), n_predict=9, ignore_eos=True) for i in range(2)]
    bad = bench.submit(prompt(9, 2), sampling=replace(params, seed=13))
    late = bench.submit(prompt(9, 3), n_predict=9)
    bench.drain()
    failed = bench.answers[bad].events[-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.type) == (500, "server_error")
    assert "a bug" in failed.message
    for seq in (*good, late):
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


def test_a_device_error_of_any_kind_is_halved() -> None:
    bench = Bench()
    step, calls = bench.engine.step, []

    def fails_twice(batch: Any) -> Any:
        calls.append(len(batch.tokens))
        if len(calls) in (3, 4):
            raise RuntimeError("device lost")
        return step(batch)

    bench.engine.step = fails_twice  # type: ignore[method-assign]
    seqs = [bench.submit(prompt(9, salt), n_predict=6, ignore_eos=True) for salt in range(4)]
    bench.drain()
    assert calls[:8] == [36, 4, 4, 2, 1, 2, 1, 4]  # the rest of the halved batches runs in the same step
    assert calls[-1] == 4  # it has grown back
    for seq in seqs:
        assert bench.answers[seq].outcome() == oracle(seq.request, 1024)


async def test_over_http() -> None:
    """Refused with 429 and Retry-After before a stream begins; users and priorities reach the scheduler."""

    async with running() as server:
        scheduler = server.scheduler
        body = {"prompt": "x", "n_predict": 1, "priority": -3, "user": "ann"}
        assert (await server.post("/completion", body))[0] == 200
        assert (await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "model": "m"}))[0] == 200
        assert [request.priority for request in scheduler.requests] == [-3, 0]
        assert scheduler.clients[0].endswith(" ann")
        assert scheduler.clients[0] != scheduler.clients[1]
        status, answer = await server.post("/completion", {**body, "priority": "high"})
        assert (status, answer["error"]["message"]) == (400, "field 'priority': expected an integer, got a string")

        def full(*_: object) -> Any:
            error = TooManyRequests("the queue is full")
            error.retry_after = 7
            raise error

        scheduler.submit = full
        for stream in (False, True):
            async with server.http.post(server.url + "/v1/completions", json={**body, "stream": stream}) as reply:
                assert (reply.status, reply.headers["Retry-After"]) == (429, "7")
                error = (await reply.json())["error"]
                assert (error["code"], error["type"]) == (429, "rate_limit_error")


def test_a_scheduler_without_limits_takes_everything() -> None:
    bench = Bench(n_slots=1)
    assert isinstance(bench.scheduler, Scheduler)
    for i in range(300):
        bench.submit(prompt(BLOCK_SIZE, i), n_predict=1)
    assert bench.scheduler.stats.requests_deferred == 300
    bench.drain()
    assert bench.scheduler.stats.requests_deferred == 0
