"""The page at `/` in a real browser: what a person does with it. Skipped where no Chromium is installed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.browser import Tab, executable, tab

KEY = "tür-key"
CHOSEN = "document.querySelector('.token.chosen')"


@pytest.fixture(scope="module")
def server(serve_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("jobs")
    flags = (
        "--metrics",
        "-np",
        "2",
        "-kvu",
        "-c",
        "2048",
        "--context-shift",
        "--api-key",
        KEY,
        "--data-dir",
        str(folder),
    )
    return serve_module(None, "--demo", *flags)


@pytest.fixture
async def page(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tab]:
    program = executable()
    if program is None:
        told = "no Chromium is installed (scripts/install --browser)"
        pytest.fail(told) if request.config.getoption("--require-browser") else pytest.skip(told)
    server = request.getfixturevalue("server")
    async with tab(program, tmp_path) as made:
        await made.open(server.url + "/")
        await made.run("globalThis.$ = id => document.getElementById(id); 0")
        await made.until("$('state').textContent.includes('wants an API key')")
        await made.point("#key", click=True)
        await made.write(KEY)
        await made.key("Enter", 13)
        await made.until("$('state').textContent === '' && $('samplers').querySelector('input').placeholder")
        made.said.clear()  # what was refused before
        yield made
        assert made.said == []


async def ask(page: Tab, mode: str, text: str, n: int = 16) -> None:
    await page.point(f"input[value={mode}]", click=True)
    await page.run(f"document.querySelector('[name=max_tokens]').value = {n}")
    await page.run("$('text').select()")
    await page.point("#text", click=True)
    await page.write(text)
    await page.key("Enter", 13, modifiers=2)


async def test_completion_with_probabilities(page: Tab) -> None:
    await ask(page, "text", "<b>First</b> Citizen:\n")
    await page.until("document.querySelectorAll('.token').length > 3 && $('stop').disabled")
    assert await page.run("document.querySelector('article.user').lastChild.data") == "<b>First</b> Citizen:\n"
    assert "tokens/s" in await page.run("$('speed').textContent")
    await page.run("document.querySelectorAll('.token')[2].id = 'third'")
    await page.point("#third")
    assert await page.run("[$('tip').hidden, $('tip').querySelectorAll('tr').length >= 5]") == [False, True]
    assert all(await page.run("[...$('tip').querySelectorAll('td:first-child')].map(td => td.innerText.trim())"))
    shares = await page.run("[...$('tip').querySelectorAll('meter')].map(m => m.value)")
    assert shares[:5] == sorted(shares[:5], reverse=True)
    assert 0 < sum(shares[:5]) <= 1.0001
    await page.run("document.querySelector('.answer').focus()")
    for _ in range(2):
        await page.key("ArrowRight", 39)
    assert await page.run(f"{CHOSEN} === document.querySelectorAll('.token')[1]")
    assert "%" in await page.run("$('tip-said').textContent")
    await page.key("Escape", 27)
    assert await page.run(f"[{CHOSEN}, $('tip').hidden]") == [None, True]


async def test_chat_that_is_stopped(page: Tab) -> None:
    await page.run("document.querySelector('[name=temperature]').value = 0")  # says the same again and again, for ever
    await ask(page, "chat", "Speak, Romeo.", n=-1)
    await page.until("document.querySelectorAll('.token').length > 3")
    await page.until("$('slots').querySelector('tr.running')")
    await page.point("#stop", click=True)
    await page.until(
        "$('stop').disabled && $('speed').textContent === 'Stopped.' && !$('slots').querySelector('tr.running')"
    )
    assert await page.run("document.querySelectorAll('article.model').length") == 1
    await page.until("/of 128 pages/.test($('kv-text').textContent)")
    await page.until("$('spark').querySelector('polyline')")
    await page.point("#clear", click=True)
    assert await page.run("$('log').childElementCount") == 0


async def test_refusals_are_told(page: Tab) -> None:
    await page.run("document.querySelector('[name=top_p]').value = 0.5; $('halt').value = 'x'")
    await ask(page, "text", "word " * 3000)
    await page.until("document.querySelector('article.error[role=alert]')")
    assert "context" in await page.run("document.querySelector('article.error').textContent")
    assert await page.run(
        "[$('stop').disabled, $('send').disabled, document.querySelectorAll('article.model').length]"
    ) == [
        True,
        False,
        0,
    ]
    page.said.clear()  # the browser's own line about the 400


async def test_key_stays_in_the_tab(page: Tab) -> None:
    stored = await page.run("[sessionStorage.length, localStorage.length, document.cookie, location.search]")
    assert stored == [1, 0, "", ""]


async def test_jobs_have_curves(page: Tab, server: Any) -> None:
    assert await page.run("$('jobs-section').hidden")
    rows = "".join(json.dumps({"text": f"Exit number {i}, pursued by a bear."}) + "\n" for i in range(8))
    async with aiohttp.ClientSession(headers={"X-Api-Key": KEY}) as http:
        form = aiohttp.FormData({"purpose": "fine-tune"})
        form.add_field("file", rows.encode(), filename="rows.jsonl")
        async with http.post(f"{server.url}/v1/files", data=form) as reply:
            file = await reply.json()
        async with http.get(f"{server.url}/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        job = {"model": model, "training_file": file["id"], "hyperparameters": {"n_epochs": 2, "batch_size": 2}}
        async with http.post(f"{server.url}/v1/fine_tuning/jobs", json=job) as reply:
            assert reply.status == 200, await reply.text()
    await page.until("document.querySelector('.job')?.textContent.includes('succeeded')", 60)
    points = await page.run("document.querySelector('.job polyline').getAttribute('points').split(' ').length")
    assert points >= 2
    assert "Loss from" in await page.run("document.querySelector('.job svg').getAttribute('aria-label')")
    await page.until("$('model').options.length > 1")  # what the job has made can be chosen


@pytest.mark.parametrize("width", [360, 1280])
async def test_nothing_overflows(page: Tab, width: int) -> None:
    await page.look(width, 740, "dark")
    await page.run("document.querySelector('details').open = true")
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    assert await page.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
