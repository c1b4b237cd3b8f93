"""Fleet: started and evicted models, with fake child processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from logitless.engine.errors import BadGateway, InvalidRequest, NotFound, Unavailable
from logitless.router.downloads import Downloads
from logitless.router.fleet import CRASHED, LOADED, LOADING, UNLOADED, Entry, Fleet, StartFailed


class FakeChild:
    def __init__(self, name: str) -> None:
        self.name = name
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stopped_after: float | None = None

    async def ended(self) -> int:
        return await asyncio.shield(self.end)

    async def stop(self, seconds: float) -> None:
        self.stopped_after = seconds
        await asyncio.sleep(0)
        if not self.end.done():
            self.end.set_result(0)


class House:
    """A fleet whose children start at once, or when the test says so (`slow`), or not at all (`broken`)."""

    def __init__(self, names: Iterable[str], limit: int) -> None:
        self.fleet: Fleet[FakeChild] = Fleet([Entry(name, ()) for name in names], self._start, limit)
        self.started: list[str] = []
        self.slow: dict[str, asyncio.Event] = {}
        self.broken: dict[str, str] = {}

    async def _start(self, entry: Entry) -> FakeChild:
        self.started.append(entry.name)
        if entry.name in self.slow:
            await self.slow[entry.name].wait()
        if entry.name in self.broken:
            raise StartFailed(self.broken[entry.name], 1)
        return FakeChild(entry.name)

    @property
    def loaded(self) -> str:
        return "".join(name for name, model in self.fleet.models.items() if model.state == LOADED)

    async def use(self, name: str, **kwargs: Any) -> FakeChild:
        async with self.fleet.lease(name, **kwargs) as child:
            assert child.name == name
            assert not child.end.done()
            return child


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_one_used_longest_ago_makes_room():
    house = House("abc", 2)
    a = await house.use("a")
    await house.use("b")
    assert await house.use("a") is a
    await house.use("c")
    assert house.loaded == "ac"
    assert house.started == ["a", "b", "c"]
    await house.use("b")
    assert house.loaded == "bc"
    assert a.stopped_after == 10.0


async def test_no_limit():
    house = House("abcdefgh", 0)
    for name in "abcdefgh":
        await house.use(name)
    assert house.loaded == "abcdefgh"


async def test_a_busy_model_ends_its_requests_first_and_an_idle_one_goes_before_it():
    house = House("abc", 2)
    async with house.fleet.lease("a") as a:
        await house.use("b")
        await house.use("c")  # b goes, although a was used longer ago
        assert house.loaded == "ac"
        async with house.fleet.lease("c"):
            waiting = asyncio.create_task(house.use("b"))
            await settle()
            assert not waiting.done()
            assert not a.end.done()
        await waiting
        assert house.loaded == "ab"


async def test_reader_does_not_wait_for_model_that_is_to_be_unloaded():
    """It may be the one who ends it."""
    house = House("ab", 1)
    async with house.fleet.lease("a") as a:
        waiting = asyncio.create_task(house.use("b"))
        await settle()
        user, looker = (asyncio.create_task(house.use("a", uses=uses)) for uses in (True, False))
        await settle()
        assert (user.done(), looker.done()) == (False, True)
        assert looker.result() is a
    await asyncio.gather(waiting, user)
    assert house.started == ["a", "b", "a"]


async def test_work_that_outlives_its_request_counts_as_one():
    house = House("ab", 1)
    over = asyncio.Event()

    async def rest(child: FakeChild) -> None:
        assert child.name == "a"
        await over.wait()

    await house.use("a", rest=rest)
    waiting = asyncio.create_task(house.use("b"))
    await settle()
    assert (house.loaded, waiting.done()) == ("a", False)
    over.set()
    await waiting
    assert house.loaded == "b"
    over.clear()
    await house.use("a", rest=rest)
    await house.fleet.close()  # nobody waits for it then
    assert house.loaded == ""


async def test_many_requests_for_one_missing_model_cost_one_place():
    house = House("abc", 2)
    await house.use("a")
    await house.use("b")
    house.slow["c"] = asyncio.Event()
    waiting = [asyncio.create_task(house.use("c")) for _ in range(3)]
    await settle()
    house.slow["c"].set()
    await asyncio.gather(*waiting)
    assert house.loaded == "bc"
    assert house.started == ["a", "b", "c"]


async def test_a_client_that_leaves_while_it_waits_costs_nobody_anything():
    house = House("ab", 1)
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(house.fleet.lease("a"))
        leaver = asyncio.create_task(house.use("b"))
        await settle()
        later = asyncio.create_task(house.use("a"))  # after b's turn, as it seems
        await settle()
        assert not later.done()
        leaver.cancel()
        await asyncio.wait([leaver])
        assert await later is a
    await settle()
    assert house.loaded == "a"
    assert house.started == ["a"]


async def test_a_client_that_leaves_while_its_model_loads_gives_the_place_to_those_who_wait():
    house = House("abc", 1)
    a = await house.use("a")
    house.slow |= {name: asyncio.Event() for name in "bc"}
    leaver = asyncio.create_task(house.use("b"))
    await settle()
    assert a.end.done()
    leaver.cancel()
    await settle()
    assert house.fleet.models["b"].state == LOADING  # nobody else wants the place
    assert await house.use("a") is not a
    model = house.fleet.models["b"]
    assert (house.loaded, model.state, model.error, model.n_failures) == ("a", UNLOADED, "", 0)
    house.fleet.load("b")  # by hand: it is wanted
    await settle()
    waiting = asyncio.create_task(house.use("a"))
    await settle()
    assert (model.state, waiting.done()) == (LOADING, False)
    house.slow["b"].set()
    await waiting
    assert house.loaded == "a"
    back = asyncio.create_task(house.use("c"))
    await settle()
    back.cancel()
    waiting, back = asyncio.create_task(house.use("a")), asyncio.create_task(house.use("c"))
    await settle()
    house.slow["c"].set()
    await asyncio.gather(waiting, back)  # who comes back while it is cancelled waits for it anew


async def test_a_model_that_is_loaded_by_hand_while_it_unloads_comes_back():
    house = House("a", 1)
    a = await house.use("a")
    house.fleet.unload("a")
    house.fleet.load("a")
    with pytest.raises(InvalidRequest, match="already unloading"):
        house.fleet.load("a")
    await settle()
    assert house.loaded == "a"
    assert await house.use("a") is not a


async def test_places_go_in_order_of_arrival_and_new_requests_cannot_keep_one():
    house = House("abc", 1)
    done: list[str] = []

    async def use(name: str) -> None:
        await house.use(name)
        done.append(name)

    async with house.fleet.lease("a"):
        tasks = []
        for name in "bca":  # the last one finds a loaded, but it is not its turn
            tasks.append(asyncio.create_task(use(name)))
            await settle()
    await asyncio.gather(*tasks)
    assert done == ["b", "c", "a"]
    assert house.started == ["a", "b", "c", "a"]


async def test_a_model_that_cannot_start_fails_its_requests_and_is_tried_again():
    house = House("ab", 1)
    house.broken["a"] = "no\nsuch file"
    waiting = [asyncio.create_task(house.use("a")) for _ in range(2)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(r) for r in results] == [BadGateway, BadGateway]
    assert "model 'a' could not be loaded: no such file" in str(results[0])
    model = house.fleet.models["a"]
    assert (model.state, model.error, model.exit_code) == (UNLOADED, "no such file", 1)
    assert house.started == ["a"]
    await house.use("b")  # its place is free
    del house.broken["a"]
    await house.use("a")
    assert model.error == ""


async def test_a_child_that_crashes_is_started_again_by_the_next_request():
    house = House("a", 1)
    child = await house.use("a")
    child.end.set_result(-11)
    await settle()
    model = house.fleet.models["a"]
    assert (model.state, model.error, model.exit_code) == (UNLOADED, CRASHED, -11)
    assert await house.use("a") is not child
    assert model.error == ""


async def test_a_name_with_ollamas_tag():
    """Open WebUI sends the names of /api/tags to /v1/chat/completions."""
    house = House(["a", "b", "b:latest"], 2)
    assert house.fleet.get("a:latest") is house.fleet.get("a")
    assert house.fleet.find("b:latest").entry.name == "b:latest"
    for name in ("c:latest", ":latest", "a:other", "a:latest:latest"):
        assert house.fleet.get(name) is None


async def test_unknown_names_and_autoload():
    house = House("a", 1)
    with pytest.raises(NotFound, match=r"model '\.\./a' not found"):
        await house.use("../a")
    with pytest.raises(InvalidRequest, match="model 'a' is not loaded"):
        await house.use("a", autoload=False)
    house.fleet.load("a")
    await house.use("a")
    assert (await house.use("a", autoload=False)).name == "a"


async def test_a_model_that_is_unloaded_before_its_loading_began():
    """Both requests may come in one round of the event loop, and a task that has not begun runs nothing of its own."""
    house = House("ab", 1)
    house.fleet.load("a")
    house.fleet.unload("a")
    await settle()
    assert house.fleet.models["a"].state == UNLOADED
    assert (await house.use("b")).name == "b"  # the place is free


async def test_a_download_that_is_cancelled_before_it_began():
    async def nothing() -> None:
        raise AssertionError

    downloads = Downloads(lambda asked, report: nothing(), nothing, lambda: None)
    refused, _ = await asyncio.gather(downloads.begin("m", "m"), downloads.cancel("m"), return_exceptions=True)
    assert str(refused) == "it was cancelled"
    assert (downloads.running, [event["event"] for event in downloads.since(0)]) == ({}, ["download_failed"])


async def test_loading_and_unloading_by_hand():
    house = House("ab", 1)
    house.slow["a"] = asyncio.Event()
    house.fleet.load("a")
    assert house.fleet.models["a"].state == LOADING
    with pytest.raises(InvalidRequest, match="already loading"):
        house.fleet.load("a")
    request = asyncio.create_task(house.use("a"))
    house.fleet.load("b")
    await settle()
    house.fleet.unload("a")  # while it loads: its request fails, and b has the place
    with pytest.raises(BadGateway, match="unloaded while it was loading"):
        await request
    await settle()
    assert house.loaded == "b"
    with pytest.raises(InvalidRequest, match="already loaded"):
        house.fleet.load("b")
    async with house.fleet.lease("b") as child:
        house.fleet.unload("b")  # now, whatever it does
        await settle()
        assert child.end.done()
    assert house.fleet.models["b"].error == ""
    with pytest.raises(InvalidRequest, match="is not loaded"):
        house.fleet.unload("b")


async def test_new_sources_keep_what_has_not_changed():
    house = House("abc", 0)
    kept, changed = await house.use("a"), await house.use("b")
    house.fleet.update([Entry("a", ()), Entry("b", ("-c", "1")), Entry("d", ())])
    assert list(house.fleet.models) == ["a", "b", "d"]
    await settle()
    assert changed.end.done()
    assert await house.use("a") is kept
    assert await house.use("b") is not changed
    with pytest.raises(NotFound):
        await house.use("c")


async def test_the_end_ends_all_and_refuses_who_waits():
    house = House("abcd", 2)
    house.slow |= {"b": asyncio.Event(), "c": asyncio.Event()}
    a = await house.use("a")
    waiting = [asyncio.create_task(house.use(name)) for name in "bcd"]
    await settle()
    await house.fleet.close()
    assert a.end.done()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(r) for r in results} == {Unavailable}
    assert house.loaded == ""


async def test_a_model_is_found_by_its_file_where_no_other_has_it() -> None:
    async def start(entry: Entry) -> FakeChild:
        return FakeChild(entry.name)

    files = {
        "one": "/m/x.gguf",
        "two": "/m/big-00001-of-00002.gguf",
        "x": "/n/y.gguf",
        "b": "/a/z.gguf",
        "c": "/b/z.gguf",
    }
    fleet = Fleet([Entry(name, (), path) for name, path in files.items()], start, 1)

    def found(name: str) -> str:
        model = fleet.get(name)
        return "" if model is None else model.entry.name

    names = ("one", "x.gguf", "/m/x.gguf", "big", "two", "x", "y", "z", "z.gguf", "/b/z.gguf", "")
    assert [found(name) for name in names] == ["one", "one", "one", "two", "two", "x", "x", "", "", "c", ""]
