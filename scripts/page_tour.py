"""Tour of the page: pictures for docs/page.md, and the time from the server's start to a finetune that answers."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import tempfile
import time
from pathlib import Path

from tests.helpers.browser import Browser, Tab, executable
from tests.integration.conftest import servers

ROOT = Path(__file__).resolve().parent.parent
WIDE, PHONE = (1280, 800), (390, 844)
QUALITY = 80  # of WebP
SAID = """## Tokens per second

The median of $n$ gaps $g_1 \\dots g_n$ gives $r = 1 / \\tilde g$:

```python
from statistics import median

def rate(times: list[float]) -> float:
    gaps = [b - a for a, b in zip(times, times[1:])]
    return 1 / median(gaps)  # tokens per second
```

| streams | tokens/s |
|---:|---:|
| 1 | 201 |
| 16 | 1,546 |
"""
GIVE = """((id, name, text) => {
    const all = new DataTransfer(), box = document.getElementById(id);
    all.items.add(new File([text], name));
    box.files = all.files;
    box.dispatchEvent(new Event('change', {bubbles: true})); })"""


class Tour:
    """A tab, and the folder of its pictures."""

    def __init__(self, tab: Tab, folder: Path) -> None:
        self.tab, self._folder = tab, folder

    async def picture(self, name: str, *, cover: bool = False) -> None:
        """A picture of the window, when nothing moves any more. `cover`: as the README's, too."""
        await self.tab.run("document.getAnimations().forEach(a => a.finish())")
        await self.tab.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(0))))")
        shot = await self.tab.call("Page.captureScreenshot", format="webp", quality=QUALITY)
        (self._folder / f"{name}.webp").write_bytes(base64.b64decode(shot["data"]))
        if cover:
            shot = await self.tab.call("Page.captureScreenshot", format="png")
            (self._folder.parent / "page.png").write_bytes(base64.b64decode(shot["data"]))

    async def press(self, text: str) -> None:
        """Click the first button of this label."""
        found = f"all('button').find(b => (b.ariaLabel || b.textContent.trim()) === {json.dumps(text)})"
        await self.tab.until(found)
        await self.tab.run(f"{found}.click()")

    async def view(self, number: int) -> None:
        await self.tab.run(f"all('.views button')[{number}].click()")

    async def ask(self, text: str) -> None:
        await self.tab.run("$('text').focus()")
        await self.tab.write(text)
        await self.tab.key("Enter", 13)

    async def give(self, id: str, name: str, text: str) -> None:
        await self.tab.run(f"{GIVE}({json.dumps(id)}, {json.dumps(name)}, {json.dumps(text)})")


def conversation() -> str:
    """A conversation as the page exports it."""
    nodes = {
        "m1": {"id": "m1", "parent": None, "role": "user", "content": "How do I measure tokens per second?", "at": 0},
        "m2": {
            "id": "m2",
            "parent": "m1",
            "role": "assistant",
            "content": SAID,
            "status": "done",
            "at": 0,
            "thought": "The user wants a measure that one slow token does not spoil: the median of the gaps.",
        },
    }
    one = {"id": "tour", "title": "", "at": int(time.time() * 1000), "mode": "chat", "settings": {}, "nodes": nodes}
    return json.dumps({"format": "logitless-conversations", "version": 1, "conversations": [{**one, "leaf": "m2"}]})


async def finetune(tour: Tour) -> float:
    """Fine-tune in the page on its example, and try the result; the seconds that it takes."""
    tab = tour.tab
    begun = time.monotonic()
    await tour.view(2)
    await tab.until("$('data-file')")
    await tab.run("$('example').click()")
    await tab.until("document.querySelector('.checks .good') && $('start') && !$('start').disabled")
    await tab.fill("[name=learning_rate_multiplier]", "2")
    await tab.fill("#suffix", "bears")
    await tab.run("$('start').click()")
    await tab.until("document.querySelector('.job polyline')?.getAttribute('points').split(' ').length > 8", 120)
    await tour.picture("tune")
    await tab.until("document.querySelector('.badge.succeeded')", 240)
    await tour.press("Try it")
    await tab.until("$('model').value.startsWith('ft:') && $('mode')")
    await tab.fill("#mode", "chat")
    await tour.ask("Who comes here?")
    await tab.until("document.querySelector('.answer')?.textContent.startsWith('A bear, my lord')")
    seconds = time.monotonic() - begun
    await tab.key("Escape", 27)
    await tab.until("!$('stop')")
    return seconds


async def main(url: str, browser: Browser, folder: Path) -> None:
    """Take all pictures, and print the seconds of the steps."""
    async with browser.tab() as tab:
        tour = Tour(tab, folder)
        await tab.look(*WIDE)
        await tab.open_page(url)
        await tab.until("$('mode') && $('model').value")
        begun = time.monotonic()
        await tab.run("$('settings').click()")
        await tab.fill("[name=max_tokens]", "60")
        await tab.run("$('settings').click()")
        await tab.run("document.querySelector('button.chip').click()")
        await tab.fill("#mode", "text")
        await tour.ask("ROMEO:\nO, she doth teach the torches")
        await tab.until("document.querySelector('.answer .token')")
        first = time.monotonic() - begun
        await tab.until("!$('stop')")
        await tab.run("all('.answer .token.doubt, .answer .token.rare')[2].id = 'doubt'")
        await tab.point("#doubt")
        await tour.picture("tokens", cover=True)
        await tab.run("document.querySelector('.answer .tokens').focus()")
        await tab.key("Escape", 27)
        print(f"first answer {first:.1f} s, finetune and its first answer {await finetune(tour):.1f} s")
        await tour.view(1)
        await tab.until("document.querySelector('.compare')")
        await tour.ask("Who comes here?")
        await tab.until(
            "all('.talk .answer').length === 2 && all('.talk .answer').every(a => a.textContent.length > 9)"
        )
        await tab.until("!$('stop')", 60)
        await tour.picture("compare")
        await tab.run("$('settings').click()")
        await tab.until("$('import')")
        await tour.give("import", "tour.json", conversation())
        await tab.until(
            "$('imported').textContent.includes('1 conversations') || $('imported').textContent.includes('1 ')"
        )
        await tab.run("all('.list .title').find(b => b.textContent.includes('measure')).click()")
        await tab.until("document.querySelector('.katex-mathml') && document.querySelector('.hljs-keyword')")
        await tab.run("$('structured').click()")
        await tour.press("Add a field")
        await tab.until("document.querySelector('[aria-label^=\"Name of field 1\"]')")
        await tab.run("all('.drawer details').forEach(d => (d.open = d.querySelector('#structured') !== null))")
        await tab.run("$('log').scrollTop = 0; document.activeElement.blur(); 0")
        await tour.picture("chat")
        await tab.run("$('settings').click()")
        await tab.look(*PHONE, "dark")
        await tab.run("$('log').scrollTop = 0; 0")
        await tour.picture("phone")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "tour", help="of the pictures")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    program = executable()
    if program is None:
        parser.error("there is no Chromium: scripts/install --browser")
    made = Browser(program)
    try:
        with tempfile.TemporaryDirectory() as data, servers() as start:
            server = start(None, "--demo", "--metrics", "--data-dir", data, "-t", "2")
            asyncio.run(main(server.url, made, given.folder))
    finally:
        made.stop()
