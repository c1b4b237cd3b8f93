"""The web page at `/` in a real browser with a real model: probabilities, gauges, keys, jobs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.helpers.browser import Browser, Tab
from tests.server.ui.test_access import AXE, LOOK

KEY = "tür-key"


@pytest.fixture(scope="module")
def server(serve_here_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("jobs")
    flags = ("--metrics", "-np", "2", "-kvu", "-c", "2048", "--context-shift", "--data-dir", str(folder))
    return serve_here_module(None, "--demo", *flags, "--api-key", KEY)


@pytest.fixture
async def page(browser: Browser, server: Any) -> AsyncIterator[Tab]:
    async with browser.tab() as made:
        await made.look(1280, 800)
        await made.open_page(server.url)
        await made.until("$('state')?.textContent.includes('wants an API key')")
        await made.point("#key", click=True)
        await made.write(KEY)
        await made.key("Enter", 13)
        await made.until("!$('state') && $('mode')")
        made.said.clear()  # what was refused before
        yield made
        assert made.said == []


async def nothing_is_violated(page: Tab) -> None:
    """By axe-core's rules, on a phone in the dark and on a desk in the light; nothing is wider than the window."""
    for width, scheme in ((390, "dark"), (1280, "light")):
        await page.look(width, 800, scheme)
        await page.run("document.getAnimations().forEach(a => a.finish())")
        assert await page.run(LOOK) == []
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")


async def ask(page: Tab, mode: str, text: str, n: int = 16) -> None:
    await page.fill("#mode", mode)
    await page.run("if (!document.querySelector('[name=max_tokens]')) $('settings').click(); 0")
    await page.fill("[name=max_tokens]", str(n))
    await page.run("$('text').focus()")
    await page.write(text)
    await page.key("Enter", 13)


async def test_completion_with_probabilities_and_another_token(page: Tab) -> None:
    await page.run("document.querySelector('button.chip').click()")
    await ask(page, "text", "<b>First</b> Citizen:")
    await page.until("all('.answer .token').length > 3 && !$('stop')")
    assert await page.run("document.querySelector('.said').textContent") == "<b>First</b> Citizen:"
    assert "tokens/s" in await page.run("document.querySelector('.speed').textContent")
    whole = await page.run("document.querySelector('.answer').textContent")
    await page.run("all('.answer .token')[2].id = 'third'")
    await page.point("#third")
    await page.until("!$('tip').hidden && $('tip').querySelectorAll('li').length >= 5")
    assert all(await page.run("[...$('tip').querySelectorAll('.piece')].map(td => td.innerText.trim())"))
    shares = await page.run("[...$('tip').querySelectorAll('meter')].map(m => m.value)")
    assert shares[:5] == sorted(shares[:5], reverse=True)
    assert 0 < sum(shares[:5]) <= 1.0001
    kept = await page.run("all('.answer .token').slice(0, 2).map(t => t.textContent).join('')")
    other = "$('tip').querySelector('button:not(:disabled)')"
    piece = (await page.run(f"{other}.querySelector('.piece').textContent")).replace("␣", " ").replace("\\n", "\n")
    await page.run(f"{other}.click()")
    await page.until("document.querySelector('.branches') && !$('stop')")
    text = await page.run("document.querySelector('.answer').textContent")
    assert text.startswith(kept + piece)
    assert text != whole


async def test_an_answer_that_is_stopped_and_the_server_now(page: Tab) -> None:
    await page.run("$('settings').click()")
    await page.fill("[name=temperature]", "0")  # says the same again and again, for ever
    await ask(page, "chat", "Speak, Romeo.", n=-1)
    await page.run("$('live').click()")
    await page.until("document.querySelector('#slots tr.running')")
    await page.until("/of 128 pages/.test($('kv-text').textContent)")
    await page.point("#stop", click=True)
    await page.until("document.querySelector('.cut')?.textContent.includes('Stopped.')")
    await page.until("!document.querySelector('#slots tr.running')")
    await page.until("document.querySelector('.drawer polyline').getAttribute('points')")


DATA = """(text => {
    const all = new DataTransfer(), box = document.querySelector('#data-file');
    all.items.add(new File([text], 'bears.jsonl'));
    box.files = all.files;
    box.dispatchEvent(new Event('change', {bubbles: true})); })"""


async def test_a_finetune_from_its_data_to_its_answers(page: Tab) -> None:
    await page.run("all('.views button')[2].click()")
    await page.until("document.querySelector('#data-file')")
    await page.run("$('example').click()")
    await page.until("document.querySelector('.checks .good') && $('checks').textContent.includes('24 chats.')")
    await page.run(f"{DATA}('[1]')")
    await page.until("all('.checks .bad').length === 1 && document.querySelector('#start').disabled")
    rows = "".join(json.dumps({"text": f"Exit number {i}, pursued by a bear."}) + "\n" for i in range(8))
    await page.run(f"{DATA}({json.dumps(rows)})")
    await page.until("document.querySelector('.checks .good') && $('start') && !$('start').disabled")
    await page.until("document.querySelector('[name=n_epochs]').placeholder === '12'")  # 100 examples are seen
    await page.fill("[name=n_epochs]", "2")
    await page.fill("[name=batch_size]", "2")
    await page.fill("#suffix", "bears")
    await page.run("$('start').click()")
    await page.until("document.querySelector('.badge.succeeded')")
    await page.until("document.querySelector('.job h4').textContent.startsWith('ft:shakespeare:bears:')")
    await page.until("document.querySelector('.job polyline').getAttribute('points').split(' ').length >= 2")
    assert "Loss" in await page.run("document.querySelector('.job svg').getAttribute('aria-label')")
    await page.run("document.querySelector('.samples form').requestSubmit()")
    await page.until("all('.sample p').length >= 2 && all('.sample p').every(p => p.textContent.length > 5)")
    await page.run(AXE + "; all('details').forEach(d => (d.open = true)); 0")
    await nothing_is_violated(page)
    button = "all('.job button').find(b => b.textContent === '{}').click()"
    await page.run(button.format("Compare with its base"))
    await page.until("document.querySelector('.compare') && $('text')")
    await page.run("$('text').focus()")
    await page.write("Exit")
    await page.key("Enter", 13)
    await page.until("all('.talk .answer').length === 2 && all('.talk .answer').every(a => a.textContent)")
    await page.key("Escape", 27)
    await page.until("all('.talk .cut').length === 2 && !$('stop')")
    assert await page.run("all('.side-choice select')[1].value.startsWith('ft:')")
    await nothing_is_violated(page)
    await page.run("all('.views button')[2].click()")
    await page.until("document.querySelector('.job')")
    await page.run(button.format("Try it"))
    await page.until("$('model').value.startsWith('ft:shakespeare:bears:') && $('mode')")


async def test_preferences_and_rewards(page: Tab) -> None:
    await page.run("all('.views button')[2].click()")
    await page.until("document.querySelector('#data-file')")
    pair = {"prompt": "ROMEO:", "chosen": " I love a bear.", "rejected": " I do not."}
    await page.run(f"{DATA}({json.dumps((json.dumps(pair) + chr(10)) * 4)})")
    await page.until("$('method').value === 'dpo' && document.querySelector('[name=beta]')?.placeholder === '0.1'")
    await page.fill("[name=n_epochs]", "2")
    await page.until("!$('start').disabled")
    await page.run("$('start').click()")
    await page.until("all('.job .note').some(p => p.textContent.includes('of the pairs apart'))")
    await page.until("document.querySelector('.job .badge').textContent === 'dpo'")
    asks = json.dumps({"prompt": "Who wants?", "answer": "bear"}) + "\n"
    await page.run(f"{DATA}({json.dumps(asks * 2)})")
    await page.until("all('.checks .bad').length === 2")
    await page.fill("#method", "reinforcement")
    await page.until("document.querySelector('.checks .good') && $('grader')")
    await page.until("document.querySelector('[name=n_samples]').placeholder === '8'")
    for answer, reward in (("A Bear!", "Reward 1"), ("Nobody.", "Reward 0")):
        await page.fill("[aria-label='Answer to judge']", answer)
        await page.run("$('judge').click()")
        await page.until(f"$('reward')?.textContent === '{reward}'")
    await page.run(AXE + "; all('details').forEach(d => (d.open = true)); 0")
    await nothing_is_violated(page)
    await page.fill("#grader", "{")
    await page.until("$('start').disabled && $('judge').disabled")


async def test_refusals_are_told(page: Tab) -> None:
    await ask(page, "text", "word " * 3000)
    await page.until("document.querySelector('.cut.bad[role=alert]')")
    assert "context" in await page.run("document.querySelector('.cut.bad').textContent")
    page.said.clear()  # the browser's own line about the 400


async def test_key_stays_in_the_tab(page: Tab) -> None:
    stored = await page.run("[sessionStorage.length, localStorage.length, document.cookie, location.search]")
    assert stored == [1, 0, "", ""]
