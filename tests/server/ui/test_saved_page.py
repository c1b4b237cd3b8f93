"""Storage of the web page: two tabs, reloads, addresses, deletion with undo, imports, an older page's rows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.helpers.browser import Browser
from tests.helpers.chat_fakes import HERMES_LIKE, chatting
from tests.server.ui.conftest import Page
from tests.server.ui.test_chat_page import GIVE

STORED = """(async () => {
    const done = r => new Promise(resolve => { r.onsuccess = () => resolve(r.result); });
    const database = await done(indexedDB.open('logitless'));
    const rows = await done(database.transaction('messages').objectStore('messages').getAll());
    const heads = await done(database.transaction('conversations').objectStore('conversations').getAll());
    database.close();
    return [heads.map(h => h.title), rows.map(r => r.node.content).sort(),
        rows.filter(r => r.node.stream).length]; })()"""
STREAMS = """(async () => {
    const done = r => new Promise(resolve => { r.onsuccess = () => resolve(r.result); });
    const database = await done(indexedDB.open('logitless'));
    const rows = await done(database.transaction('messages').objectStore('messages').getAll());
    database.close();
    return rows.flatMap(r => r.node.stream ? [r.node.stream.id] : []); })()"""
VERSIONS = """(async () => {
    const done = r => new Promise(resolve => { r.onsuccess = () => resolve(r.result); });
    const database = await done(indexedDB.open('logitless'));
    const heads = await done(database.transaction('conversations').objectStore('conversations').getAll());
    database.close();
    return heads.map(h => h.version); })()"""
DEAF = "delete globalThis.BroadcastChannel; Object.defineProperty(document, 'visibilityState', {value: 'visible'});"
OLD = """new Promise(resolve => { const request = indexedDB.open('logitless', 1);
    request.onupgradeneeded = () => { request.result.createObjectStore('conversations', {keyPath: 'id'});
        request.result.createObjectStore('preferences'); };
    request.onsuccess = () => { const all = request.result.transaction(['conversations', 'preferences'], 'readwrite');
        for (const one of %s) all.objectStore('conversations').put(one);
        all.objectStore('preferences').put('dark', 'theme');
        all.oncomplete = () => { request.result.close(); resolve(0); }; }; })"""


@asynccontextmanager
async def second(page: Page, browser: Browser, script: str = "") -> AsyncIterator[Page]:
    """Another tab of the same profile, which runs `script` before the page's own."""
    async with browser.tab(page.tab) as tab:
        if script:
            await tab.call("Page.enable")
            await tab.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        other = Page(tab, page.server)
        await other.open()
        await other.until("all('.list .title').length > 0")
        await other.run("all('.list .title')[0].click()")
        await other.until("all('article').length > 0")
        yield other
        assert tab.said == []


async def stored(page: Page, n: int, running: bool = False) -> list[Any]:
    """Titles and the messages' texts in the storage, once it has `n` messages, of which none or one is running."""
    async with asyncio.timeout(60):
        while True:
            titles, texts, n_running = await page.run(STORED)
            if len(texts) == n and all(texts) and n_running == running:
                return [titles, texts]


async def test_stale_tab_that_writes_loses_no_message(page: Page, browser: Browser) -> None:
    """Neither tab hears the other: as a tab that was frozen, or a browser without channels."""
    await page.ask("First", "one")
    await stored(page, 2)
    async with second(page, browser, DEAF) as other:
        await page.run("BroadcastChannel.prototype.postMessage = () => {}; 0")
        await page.ask("Mine", "two")
        await stored(page, 4)
        await other.ask("Theirs", "three")
        titles, texts = await stored(page, 6)
        assert (titles, texts) == ([""], ["First", "Mine", "Theirs", "one", "three", "two"])
        await other.until("one('.branches')?.textContent.includes('2 / 2')")  # it has read the first tab's by now
        await page.ask("More", "four")
        assert (await stored(page, 8))[1][1:3] == ["Mine", "More"]


@pytest.mark.parametrize("what", ["the conversation", "a message"])
async def test_stale_tab_that_deletes_keeps_what_it_has_not_seen(page: Page, browser: Browser, what: str) -> None:
    await page.ask("First", "one")
    await stored(page, 2)
    async with second(page, browser, DEAF) as other:
        await page.ask("Later", "two")
        await stored(page, 4)
        await other.run("globalThis.confirm = () => true; 0")
        await other.press("Delete “First”" if what == "the conversation" else "Delete from here on")
        await other.until("one('.list .title') && (all('.said').length === 2 || !one('article'))")
        assert (await stored(page, 4))[1] == ["First", "Later", "one", "two"]


async def test_two_tabs_show_each_others_changes(page: Page, browser: Browser) -> None:
    await page.ask("First", "one")
    await stored(page, 2)
    async with second(page, browser) as other:
        await page.ask("Second", "two")
        await other.until("all('.answer').at(-1).textContent === 'two' && !one('#stop')")
        await other.ask("Third", "three")
        await page.until("all('.answer').at(-1).textContent === 'three' && !one('#stop')")
        await page.click("#settings")
        await page.fill("#theme", "dark")
        await page.fill("#preset-name", "Poet")
        await page.press("Save")
        await other.until("document.documentElement.dataset.theme === 'dark'")
        await other.click("#settings")
        await other.until("[...one('#preset').options].some(o => o.textContent === 'Poet')")
        await page.run("globalThis.confirm = () => true; 0")
        await page.press("Delete “First”")
        await other.until("!one('.list .title') && !one('article')")
        await page.press("Undo")
        await other.until("one('.list .title')?.textContent === 'First'")


async def test_second_tab_follows_and_stops_the_firsts_answer(page: Page, browser: Browser) -> None:
    await page.ask("First", "one")
    page.server.scheduler.gate = threading.Semaphore(0)
    await page.ask("Count", "one two three", wait=False)
    page.server.scheduler.gate.release(5)
    await page.until("all('.answer').at(-1).textContent.startsWith('one')")
    async with second(page, browser) as other:
        await other.until("all('.answer').at(-1)?.textContent.startsWith('one') && one('#stop')")
        page.server.scheduler.gate.release(2)
        await other.until("all('.answer').at(-1).textContent.startsWith('one t')")
        await other.click("#stop")
        await other.until("one('.cut')?.textContent.startsWith('Stopped.') && !one('#stop')")
        await page.until("one('.cut')?.textContent.startsWith('Stopped.') && !one('#stop')")
        page.server.scheduler.gate.release(1000)


NO_LOCKS = """for (const [of, name] of [[navigator, 'locks'], [crypto, 'randomUUID']])
    Object.defineProperty(of, name, {value: undefined});"""


@pytest.mark.parametrize("script", ["", NO_LOCKS], ids=["locks", "no locks"])
async def test_second_tab_goes_on_with_the_answer_of_one_that_is_left(
    page: Page, browser: Browser, script: str
) -> None:
    """Without locks, as at an address without TLS, both follow the stream at once."""
    await page.ask("First", "one")
    await stored(page, 2)
    gate = page.server.scheduler.gate = threading.Semaphore(0)
    async with second(page, browser, script) as other:
        await other.ask("Count", "one two three", wait=False)
        gate.release(5)
        await page.until("all('.answer').at(-1).textContent.startsWith('one') && one('#stop')")
        await other.tab.open("about:blank")
        gate.release(1000)
        await page.until("all('.answer').at(-1).textContent === 'one two three' && !one('#stop')")
        assert (await stored(page, 4))[1] == ["Count", "First", "one", "one two three"]


async def test_tabs_that_have_heard_each_other_write_no_more(page: Page, browser: Browser) -> None:
    await page.ask("First", "one")
    await stored(page, 2)
    async with second(page, browser) as other:
        await page.click("#settings")
        await page.fill("#system", "Be brief.")
        await page.fill("#preset-name", "Poet")
        await page.press("Save")
        await other.click("#settings")
        await other.until("one('#system').value === 'Be brief.' && one('#preset').options.length === 2")
        versions = []
        for tab in (page, other, page, other):  # each round trip would be a writing
            versions.append(await tab.run(VERSIONS))
        assert versions == versions[:1] * 4


@pytest.mark.parametrize("ends", ["before the reload's", "after"])
async def test_reload_takes_up_the_answer_that_is_coming(page: Page, ends: str) -> None:
    gate = page.server.scheduler.gate = threading.Semaphore(6)
    await page.ask("Count", "wörds two three", wait=False)
    await page.until("one('.answer').textContent.startsWith('wörd')")
    address = await page.run("location.hash")
    assert address.startswith("#/c/")
    if ends != "after":
        gate.release(1000)
    await page.tab.call("Page.reload")
    await page.until("document.readyState === 'complete'")
    await page.until("document.querySelector('.answer')?.textContent.startsWith('wörd')")
    await page.name_selectors()
    gate.release(1000)
    await page.until("one('.answer').textContent === 'wörds two three' && !one('#stop')")
    assert await page.run("location.hash") == address
    assert len(page.server.scheduler.requests) == 1
    await page.ask("Again", "well")
    assert page.bodies()[-1] == "[user]Count[assistant]wörds two three[user]Again[assistant]"


async def test_answer_of_a_stream_that_is_gone_is_stopped(page: Page) -> None:
    page.server.scheduler.gate = threading.Semaphore(4)
    await page.ask("Count", "one two", wait=False)
    await page.until("one('.answer').textContent.startsWith('on')")
    await stored(page, 2, running=True)
    address = await page.run("location.hash")
    await page.tab.open(page.server.url + "/health")
    (name,) = await page.run(STREAMS)
    async with page.server.http.delete(f"{page.server.url}/v1/stream?conv_id={name}") as reply:
        assert reply.status == 204
    page.server.scheduler.gate.release(1000)
    await page.tab.open(page.server.url + "/" + address)
    await page.until("document.querySelector('.cut')?.textContent.startsWith('Stopped.')")
    assert (await page.run("document.querySelector('.answer').textContent")).startswith("on")
    assert await page.run("document.querySelector('#stop')") is None
    page.tab.said.clear()  # /health has no icon


async def test_address_of_a_conversation_opens_it(page: Page, browser: Browser) -> None:
    await page.ask("First", "one")
    first = await page.run("location.hash")
    await page.press("New conversation")
    assert await page.run("location.hash") == ""
    await page.ask("Second", "two")
    second = await page.run("location.hash")
    assert first != second
    await page.run("history.back(); 0")
    await page.until("one('.welcome')")
    await page.run("history.back(); 0")
    await page.until("one('.said')?.textContent === 'First'")
    await page.run(f"location.hash = {json.dumps(second)}; 0")
    await page.until("one('.said')?.textContent === 'Second'")
    await page.run("all('.views button')[2].click()")
    await page.until("location.hash === '#/tune'")
    await page.run("location.hash = '#/c/nobody'; 0")
    await page.until("one('#missing')")
    await page.ask("Third", "three")
    assert await page.texts(".list .title") == ["Third", "Second", "First"]
    page.tab.said.clear()  # a server that does not train says 501


async def test_deletion_can_be_undone(page: Page) -> None:
    await page.ask("A", "one")
    await page.ask("B", "two")
    await page.press("Delete from here on", 1)
    await page.until("all('article').length === 1 && one('#undo').textContent.startsWith('3 messages are deleted.')")
    await stored(page, 1)
    await page.press("Undo")
    await page.until("all('article').length === 4 && !one('#undo')")
    assert await page.texts(".said, .answer") == ["A", "one", "B", "two"]
    assert (await stored(page, 4))[1] == ["A", "B", "one", "two"]
    await page.run("globalThis.confirm = () => true; 0")
    await page.press("Delete “A”")
    await page.until("!one('article')")
    await page.press("Undo")
    await page.until("all('article').length === 4")


async def test_storage_of_an_older_page_is_taken_over(page: Page, browser: Browser) -> None:
    nodes = {
        "m1": {"id": "m1", "parent": None, "role": "user", "content": "Old"},
        "m2": {"id": "m2", "parent": "m1", "role": "assistant", "content": "answer", "status": "running"},
    }
    good = {
        "id": "g",
        "title": "Good",
        "at": 5,
        "mode": "chat",
        "settings": {"system": "S"},
        "nodes": nodes,
        "leaf": "m2",
    }
    bad = good | {"id": "b", "title": 7, "nodes": {"m1": {"id": "m1"}}}
    async with browser.tab() as tab:
        await tab.open(page.server.url + "/health")
        await tab.run(OLD % json.dumps([good, bad]))
        other = Page(tab, page.server)
        await other.open()
        await other.until("one('#unsaved')?.textContent.startsWith('1 saved conversations are damaged')")
        assert await other.texts(".list .title") == ["Good"]
        await other.run("all('.list .title')[0].click()")
        await other.until("one('.cut')?.textContent.startsWith('Stopped.')")
        assert await other.run("document.documentElement.dataset.theme") == "dark"


async def test_malformed_import_is_told_and_the_view_stays(page: Page) -> None:
    await page.ask("Hello", "hi")
    await page.click("#settings")
    node = {"id": "m1", "parent": None, "role": "assistant", "content": "x", "calls": [None]}
    bad = {"id": "x", "leaf": "m1", "nodes": {"m1": node}}
    for one, told in ((bad, "nodes.m1.calls[0] must be an object"), ({**bad, "nodes": 3}, "nodes must be an object")):
        text = json.dumps({"format": "logitless-conversations", "conversations": [one]})
        await page.run(f"{GIVE}({json.dumps(text)})")
        await page.until(f"one('#imported').textContent.includes({json.dumps(told)})")
        assert await page.texts(".list .title") == ["Hello"]
    schema = {"type": "object", "properties": 5, "required": "x"}
    odd = {"id": "y", "leaf": None, "nodes": {}, "settings": {"schema": {"on": True, "value": schema}}}
    fine = {
        "id": "z",
        "leaf": "m1",
        "nodes": {"m1": {**node, "calls": [], "role": "user"}},
        "settings": odd["settings"],
    }
    text = json.dumps({"format": "logitless-conversations", "conversations": [odd, fine]})
    await page.run(f"{GIVE}({json.dumps(text)})")
    await page.until("one('#imported').textContent === '2 conversations imported.'")
    await page.run("all('.list .title').find(e => e.textContent === 'x').click()")
    await page.until("one('.said')?.textContent === 'x' && one('.drawer textarea.mono')?.value.includes('properties')")


async def test_full_storage_is_told(page: Page) -> None:
    fails = "throw new DOMException('no room', 'QuotaExceededError')"
    await page.run(f"IDBObjectStore.prototype.put = () => {{ {fails}; }}; 0")
    await page.ask("Hello", "hi")
    await page.until("one('#unsaved')?.textContent === 'Conversations are not saved: no room'")


async def test_wrong_key_is_told_with_its_field(browser: Browser) -> None:
    async with chatting(HERMES_LIKE, api_keys=("right",)) as server, browser.tab() as tab:
        page = Page(tab, server)
        await tab.open(server.url + "/")
        await page.name_selectors()
        await page.until("one('#state')?.textContent.startsWith('This server wants an API key.')")
        for key, told in (("wrong", "The server does not know this API key."), ("right", "")):
            await page.fill("#state #key", key)
            await page.run("one('#state #key').form.requestSubmit()")
            await page.until(f"(one('#state p')?.textContent ?? '') === {json.dumps(told)}")
        await page.ask("Hello", "hi")
        assert await page.texts(".answer") == ["hi"]
        tab.said.clear()  # the browser's own lines about 401
