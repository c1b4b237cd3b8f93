"""Fixtures: the web page in a browser, with a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.helpers.browser import Browser, Tab
from tests.helpers.chat_fakes import HERMES_LIKE, chatting, says
from tests.helpers.http_fakes import Running


class Page:
    """A tab that shows the page of a server."""

    def __init__(self, tab: Tab, server: Running) -> None:
        self.tab, self.server = tab, server
        self.run, self.until, self.point, self.key = tab.run, tab.until, tab.point, tab.key
        self.write, self.fill = tab.write, tab.fill

    async def open(self) -> None:
        """Load the page, or load it again."""
        await self.tab.open(self.server.url + "/")
        await self.until("document.querySelector('#model')?.value && document.querySelector('#mode, article')")
        await self.name_selectors()

    async def name_selectors(self) -> None:
        """Define `one` and `all` in the page."""
        await self.run("globalThis.all = name => [...document.querySelectorAll(name)]; 0")
        await self.run("globalThis.one = name => document.querySelector(name); 0")

    async def ask(self, text: str, answer: str, *, wait: bool = True) -> None:
        """Type a message; the model says `answer`, token by token."""
        says(self.server, answer)
        before = await self.run("all('article').length")
        await self.run("one('#text').focus()")
        await self.write(text)
        await self.key("Enter", 13)
        await self.until(f"all('article').length >= {before + 2}")
        if wait:
            await self.ended()

    async def ended(self) -> None:
        await self.until("!one('#stop')")

    async def click(self, selector: str) -> None:
        await self.until(f"document.querySelector({json.dumps(selector)})")
        await self.run(f"one({json.dumps(selector)}).click()")

    async def press(self, label: str, at: int = -1) -> None:
        """Click the last button, or another one, of this label."""
        found = f"all('button').filter(b => (b.ariaLabel || b.textContent.trim()) === {json.dumps(label)}).at({at})"
        await self.until(found)
        await self.run(f"{found}.click()")

    async def texts(self, selector: str) -> list[str]:
        return list(await self.run(f"all({json.dumps(selector)}).map(e => e.textContent)"))

    def bodies(self) -> list[str]:
        """Prompts of the requests so far."""
        scheduler = self.server.scheduler
        texts = [scheduler.tokenizer.pieces(request.prompt).decode() for request in scheduler.requests]
        return [text.removeprefix("<s>") for text in texts]


@pytest.fixture
async def tool_page(browser: Browser, tmp_path: Path) -> AsyncIterator[Page]:
    """The same of a server that runs its built-in tools in a folder."""
    tools, config = (pytest.importorskip(f"logitless.extras.tools.{name}") for name in ("settings", "config"))
    settings = tools.ToolSettings(config.BUILT_IN, str(tmp_path))
    async with chatting(HERMES_LIKE, n_ctx=4096, tools=settings) as server, browser.tab() as tab:
        made = Page(tab, server)
        await made.open()
        yield made
        assert tab.said == []


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """The page of a model with Hermes' tools and reasoning; it must not complain on the console."""
    async with chatting(HERMES_LIKE) as server, browser.tab() as tab:
        made = Page(tab, server)
        await made.open()
        yield made
        assert tab.said == []
