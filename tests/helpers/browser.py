"""A headless Chromium, driven through the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--renderer-process-limit=1",  # for all tabs, one after the other: an own one costs 0.3 s of processor time
    "--remote-debugging-port=0",
)


def executable() -> str | None:
    """Path of the browser, None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """One page. `said` collects its console output and errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.said: list[str] = []
        self.is_fresh = False  # storage is cleared when it opens its first page

    async def listen(self) -> None:
        """Receive messages of the browser until it exits."""
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._replies.pop(data["id"]).set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.said.append(json.dumps(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded":
                self.said.append(data["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol; returns its result."""
        number = next(self._numbers)
        self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        reply = await asyncio.wait_for(self._replies[number], 60)
        assert "error" not in reply, reply
        return reply["result"]

    async def run(self, script: str) -> Any:
        """Value of an expression in the page; promises are awaited."""
        reply = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def until(self, condition: str, seconds: float = 60) -> None:
        """Wait, frame by frame, until an expression in the page is true."""
        loop = f"new Promise(r => {{ const f = () => ({condition}) ? r(true) : setTimeout(f, 20); f(); }})"
        try:
            async with asyncio.timeout(seconds):
                await self.run(loop)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {condition}; console: {self.said}; page: {text}") from None

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        if self.is_fresh:  # earlier tabs may have had the same address, port included
            await self.call("Storage.clearDataForOrigin", origin="/".join(url.split("/")[:3]), storageTypes="all")
            self.is_fresh = False
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def key(self, name: str, code: int, modifiers: int = 0) -> None:
        """Press and release a key."""
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        if name == "Enter":
            common["text"] = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown" if "text" in common else "rawKeyDown", **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def write(self, text: str) -> None:
        """Type into the focused element."""
        await self.call("Input.insertText", text=text)

    async def open_page(self, url: str) -> None:
        """Open the page of the server at `url`, and define `$` (by id) and `all` (by selector)."""
        await self.open(url + "/")
        await self.run("globalThis.$ = id => document.getElementById(id); 0")
        await self.run("globalThis.all = s => [...document.querySelectorAll(s)]; 0")

    async def fill(self, selector: str, text: str) -> None:
        """Put a text into a field, as typing or choosing does."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.until(found)
        events = "for (const kind of ['input', 'change']) box.dispatchEvent(new Event(kind, {bubbles: true}))"
        await self.run(f"(box => {{ box.value = {json.dumps(text)}; {events}; }})({found})")

    async def point(self, selector: str, *, click: bool = False) -> None:
        """Move the pointer onto an element; click it if asked."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.run(f"{found}.scrollIntoView({{block: 'nearest'}})")
        box = await self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getClientRects()[0])"
        )
        at = {"x": box[0], "y": box[1]}
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                await self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window, and the preferred colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> None:
        """Screenshot as a PNG file."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


class Browser:
    """A running browser. Its tabs share a profile, of which each new one clears the storage of its page's origin."""

    def __init__(self, program: str) -> None:
        self._own = tempfile.TemporaryDirectory()  # a short path, because it holds a socket
        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={self._own.name}/profile", "about:blank"],
            env=os.environ | {"TMPDIR": self._own.name},  # the browser leaves folders there when it is killed
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(rb"DevTools listening on (ws://127.0.0.1:\d+/\S+)", line):
                self._address = found.group(1).decode()
                break
        else:
            raise RuntimeError("the browser did not start")
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()

    def stop(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait()
        self._drain.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._own.cleanup()

    @contextlib.asynccontextmanager
    async def tab(self, beside: Tab | None = None) -> AsyncIterator[Tab]:
        """A new empty page without stored data; with `beside`, with the data of another one."""
        async with aiohttp.ClientSession() as session, _connected(session, self._address) as whole:
            target = (await whole.call("Target.createTarget", url="about:blank"))["targetId"]
            address = re.sub(r"/devtools/.*", f"/devtools/page/{target}", self._address)
            async with _connected(session, address) as page:
                page.is_fresh = not beside
                yield page
            await whole.call("Target.closeTarget", targetId=target)


@contextlib.asynccontextmanager
async def _connected(session: aiohttp.ClientSession, address: str) -> AsyncIterator[Tab]:
    async with session.ws_connect(address, max_msg_size=0) as socket:
        made = Tab(socket)
        listening = asyncio.create_task(made.listen())
        try:
            yield made
        finally:
            listening.cancel()
