"""Adapters on the web page: sliders of two adapters change answers, and two scales are compared side by side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from logitless.models.adapters.lora import write_adapter
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from tests.helpers.browser import Browser, Tab
from tests.helpers.paths import MODELS
from tests.models.adapters.test_lora import random_adapter
from tests.server.ui.test_access import AXE, LOOK

MODEL = MODELS / "stories260K.gguf"
PROMPT = "Once upon a time there was a little"
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K.gguf beside the checkout")


@pytest.fixture(scope="module")
def server(serve_here_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two adapters: pirate, off unless asked for, and poet at half."""
    folder = tmp_path_factory.mktemp("lora")
    paths = [folder / "pirate.gguf", folder / "poet.gguf"]
    with GGUFFile.open(MODEL) as base:
        for seed, path in enumerate(paths):
            write_adapter(path, random_adapter(base, seed), base, hparams_of(base))
    scales = [f"{path}:{scale}" for path, scale in zip(paths, ("0", "0.5"), strict=True)]
    return serve_here_module(MODEL, "-c", "512", "--lora-scaled", scales[0], "--lora-scaled", scales[1])


@pytest.fixture
async def page(browser: Browser, server: Any) -> AsyncIterator[Tab]:
    async with browser.tab() as made:
        await made.look(1280, 800)
        await made.open_page(server.url)
        await made.until("$('mode') && $('model').value")
        await made.fill("#mode", "text")
        await made.run("$('settings').click()")
        await made.fill("[name=max_tokens]", "12")
        await made.fill("[name=temperature]", "0")
        await made.until("all('.slider input').length === 2")
        yield made
        assert made.said == []


def words(text: str) -> str:
    """A text without its white space, of which Markdown keeps little."""
    return "".join(text.split())


def direct(server: Any, **lora: float) -> str:
    """Words of the server's own answer; `lora`: scales by id, as a0=2."""
    scales = [{"id": int(name[1:]), "scale": scale} for name, scale in lora.items()]
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, **({"lora": scales} if lora else {})}
    return words(server.post("/completion", body)["content"])


async def ask(page: Tab) -> tuple[Any, str]:
    """(`lora` of the request that the page sends, words of its answer) in a new conversation."""
    await page.run("globalThis.sent = null; $('new').click()")
    await page.until("!all('article').length")
    await page.run("$('text').focus()")
    await page.write(PROMPT)
    await page.key("Enter", 13)
    await page.until("all('.answer').length === 1 && !$('stop')")
    sent, text = await page.run("[JSON.parse(sent).lora ?? null, all('.answer')[0].textContent]")
    return sent, words(text)


async def slide(page: Tab, selector: str, share: float) -> None:
    """Press the pointer at a share of a slider's width."""
    box = f"document.querySelector('{selector}').getBoundingClientRect()"
    x, y = await page.run(f"(b => [b.x + b.width * {share}, b.y + b.height / 2])({box})")
    for kind in ("mousePressed", "mouseReleased"):
        await page.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, x=x, y=y)


async def test_sliders_set_the_scales_of_requests(page: Tab, server: Any) -> None:
    await page.run(
        "globalThis.old = fetch; fetch = (url, o) => (o?.body && (globalThis.sent = o.body), old(url, o)); 0"
    )
    names = await page.run("all('.slider span').map(s => s.firstChild.textContent)")
    assert names == ["pirate.gguf", "poet.gguf"]
    assert await page.run("all('.slider output').map(o => o.textContent)") == ["0.00", "0.50"]
    plain = await ask(page)
    assert plain == (None, direct(server))
    await slide(page, ".slider:nth-of-type(1) input", 0.5)
    await page.until("all('.slider output')[0].textContent === '1.00'")
    await page.run("all('.slider input')[1].focus()")
    await page.key("Home", 36)
    await page.until("all('.slider output')[1].textContent === '0.00'")
    pirate = await ask(page)
    assert pirate == ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0}], direct(server, a0=1.0))
    await page.run("all('.slider input')[1].focus()")
    await page.key("End", 35)
    await page.until("all('.slider output')[1].textContent === '2.00'")
    both = await ask(page)
    assert both == ([{"id": 0, "scale": 1}, {"id": 1, "scale": 2}], direct(server, a0=1.0, a1=2.0))
    assert len({plain[1], pirate[1], both[1]}) == 3
    await page.run("all('button').find(b => b.textContent === 'As the server has them').click()")
    await page.until("all('.slider output').map(o => o.textContent).join() === '0.00,0.50'")
    assert await ask(page) == plain


async def test_two_adapters_side_by_side(page: Tab, server: Any) -> None:
    await page.run("$('settings').click(); all('.views button')[1].click()")
    await page.until("all('.side-choice select').length === 4")
    await page.run("all('.side-choice select')[1].id = 'left'; all('.side-choice select')[3].id = 'right'; 0")
    await page.fill("#left", "none")
    await page.fill("#right", "1")
    await page.until("document.querySelector('.scale input')")
    await slide(page, ".scale input", 0.99)
    await page.until("document.querySelector('.scale').textContent.endsWith('2.00')")
    await page.run("$('text').focus()")
    await page.write(PROMPT)
    await page.key("Enter", 13)
    await page.until(
        "all('.talk .actions').length === 2 && all('.talk .answer').every(a => a.textContent) && !$('stop')"
    )
    left, right = await page.run("all('.talk .answer').map(a => a.textContent)")
    assert left != right


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
async def test_nothing_is_violated(page: Tab, width: int, scheme: str) -> None:
    await page.look(width, 800, scheme)
    await page.run(AXE + "; 0")
    for view in ("document.querySelector('.slider')", "document.querySelector('.side-choice')"):
        await page.until(view)
        assert await page.run(LOOK) == []
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        await page.run("$('settings').click(); all('.views button')[1].click()")
