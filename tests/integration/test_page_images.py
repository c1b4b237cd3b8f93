"""Images on the web page: pasted, shown as thumbnails, removed, sent, and kept in the conversation."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.helpers.browser import Browser, Tab
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import SPECS, picture, png, write_projector

MODEL = MODELS / "stories260K.gguf"
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K.gguf beside the checkout")


@pytest.fixture(scope="module")
def server(serve_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    projector = write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", SPECS["mlp"])
    return serve_module(
        MODEL, "--mmproj", str(projector), "-c", "1024", "--metrics", "--data-dir", str(projector.parent)
    )


@pytest.fixture
async def page(browser: Browser, server: Any) -> AsyncIterator[Tab]:
    async with browser.tab() as made:
        await made.open(server.url + "/")
        await made.run("globalThis.$ = id => document.getElementById(id); 0")
        await made.until("$('attach')?.title.startsWith('Attach images')")
        yield made
        assert made.said == []


async def paste(page: Tab, seed: int) -> None:
    data = base64.b64encode(png(picture(60, 40, seed=seed))).decode()
    await page.run(
        f"""(() => {{
        const bytes = Uint8Array.from(atob("{data}"), c => c.charCodeAt(0)), all = new DataTransfer();
        all.items.add(new File([bytes], "a.png", {{type: "image/png"}}));
        $("text").dispatchEvent(new ClipboardEvent("paste", {{clipboardData: all, bubbles: true, cancelable: true}}));
        return 0; }})()"""
    )


async def test_images_are_pasted_sent_and_kept(page: Tab) -> None:
    for seed in (1, 2, 3):
        await paste(page, seed)
        await page.until(f"document.querySelectorAll('#attached img').length === {seed}")
    await page.point("#attached span:nth-child(2) button", click=True)
    await page.until("document.querySelectorAll('#attached img').length === 2")
    await page.look(390, 844)
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    await page.point("#settings", click=True)
    await page.fill("[name=max_tokens]", "8")
    await page.run("document.querySelector('.drawer .icon-button').click(); $('text').focus()")
    await page.write("What is this?")
    await page.key("Enter", 13)
    await page.until("!$('stop') && document.querySelector('.answer')?.textContent")
    assert await page.run("document.querySelectorAll('article.user img').length") == 2
    assert await page.run("document.querySelectorAll('#attached img').length") == 0
    await page.run(
        "globalThis.old = fetch; fetch = (url, o) => (o?.body && (globalThis.sent = o.body), old(url, o)); 0"
    )
    await page.run("$('text').focus()")
    await page.write("And now?")
    await page.key("Enter", 13)
    await page.until("document.querySelectorAll('.answer').length === 2 && !$('stop')")
    kinds = await page.run("JSON.parse(sent).messages[0].content.map(part => part.type)")
    assert kinds == ["image_url", "image_url", "text"]  # the first message still has its images
