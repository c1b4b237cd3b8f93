"""Worker threads: few, fair among clients, and freed when a client leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

from logitless.frontend import workers
from logitless.frontend.workers import ClientLeft, Workers


async def begun(work: threading.Event) -> None:
    assert await asyncio.to_thread(work.wait, 10)


async def test_one_client_leaves_a_thread_to_the_others():
    pool, go, names = Workers(3, "test"), threading.Event(), set[str]()

    def work() -> str:
        names.add(threading.current_thread().name + str(threading.get_ident()))
        assert go.wait(10)
        return "done"

    greedy = [asyncio.create_task(pool.do(work, "greedy")) for _ in range(20)]
    assert await asyncio.wait_for(pool.do(lambda: 5, "other"), 10) == 5
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(pool.do(lambda: 1 // 0, "other"), 10)
    assert not any(task.done() for task in greedy)
    go.set()
    assert await asyncio.gather(*greedy) == ["done"] * 20
    assert len(names) <= 2


async def test_a_limit_of_threads_holds_for_what_comes():
    """--threads-http."""
    pool, names = Workers(4, "test"), set[int]()
    pool.limit(1)
    await asyncio.gather(*(pool.do(lambda: names.add(threading.get_ident()), str(i)) for i in range(20)))
    assert len(names) == 1


class Large:
    """What a request names."""


async def test_an_error_keeps_nothing_of_its_work():
    """Without the garbage collector, which a busy server runs too seldom for large bodies."""
    pool, kept = Workers(1, "test"), list[weakref.ref[Large]]()

    def work(large: Large) -> None:
        kept.append(weakref.ref(large))
        raise ValueError("refused")

    async def ask() -> None:
        with pytest.raises(ValueError, match="refused") as caught:
            await pool.do(partial(work, Large()))
        del caught

    gc.disable()
    try:
        await ask()
        await pool.do(lambda: None)  # the thread has let go of the first
        assert kept[0]() is None
    finally:
        gc.enable()


async def test_clients_take_turns():
    pool, inside, go, order = Workers(1, "test"), threading.Event(), threading.Event(), list[str]()
    first = asyncio.create_task(pool.do(lambda: (inside.set(), go.wait(10)), "a"))
    await begun(inside)
    rest = [asyncio.create_task(pool.do(lambda name=name: order.append(name), name)) for name in "aaabbc"]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, *rest)
    assert order == ["a", "b", "c", "a", "b", "a"]


async def test_work_of_a_client_that_leaves():
    pool, inside, ended = Workers(1, "test"), threading.Event(), threading.Event()
    told: list[BaseException] = []

    def work() -> None:
        inside.set()
        try:
            while True:
                workers.check()
        except ClientLeft as error:
            told.append(error)
            raise
        finally:
            ended.set()

    running = asyncio.create_task(pool.do(work))
    await begun(inside)
    waiting = asyncio.create_task(pool.do(lambda: told.append(AssertionError())))
    await asyncio.sleep(0)
    for task in (waiting, running):
        task.cancel()
    await asyncio.wait([waiting, running])
    await begun(ended)
    assert await pool.do(lambda: 7) == 7
    assert len(told) == 1


def test_a_thread_without_a_client_is_never_told_to_end():
    workers.check()
