"""Tools of the server on the web page: chosen, asked for before each call, run by themselves within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_fakes import says
from tests.server.ui.test_access import AXE, violations

ASKS = ".call .asks"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
async def page(tool_page: Any, tmp_path: Path) -> Any:
    (tmp_path / "a.txt").write_text("the word")
    await tool_page.click("#settings")
    for name in ("read_file", "write_file"):
        await tool_page.click(f"[name=tool-{name}]")
    await tool_page.click("#settings")
    return tool_page


async def test_each_call_is_asked_for(page: Any, tmp_path: Path) -> None:
    await page.ask("Read", call("read_file", path="a.txt"))
    assert '"name": "read_file"' in page.bodies()[-1]
    assert '"name": "exec_shell_command"' not in page.bodies()[-1]
    await page.until(f"one('{ASKS}')?.textContent.includes('It only reads.')")
    assert not await page.run("one('.call textarea')")
    n_before = len(page.bodies())
    says(page.server, call("write_file", path="b.txt", content="new"))
    await page.press("Allow once")
    await page.until(f"one('{ASKS}')?.textContent.includes('It may change something.')")
    assert page.bodies()[n_before].endswith("[tool]the word\n[assistant]")
    assert "the word" in (await page.texts(".said"))[-1]
    assert not (tmp_path / "b.txt").exists()
    says(page.server, "Then not.")
    await page.press("Refuse")
    await page.until("all('.answer').at(-1).textContent === 'Then not.' && !one('#stop')")
    assert page.bodies()[-1].endswith("[tool]The user did not allow this call.[assistant]")
    assert not (tmp_path / "b.txt").exists()


async def test_an_allowed_tool_runs_by_itself_within_a_bound(page: Any) -> None:
    await page.ask("Read on", call("read_file", path="a.txt"))
    await page.press("Always allow read_file here")  # the model calls it again and again
    await page.until(f"one('{ASKS}')?.textContent.includes('10 calls ran by themselves.')")
    assert len(page.bodies()) == 11
    says(page.server, call("read_file", path="../x"))
    await page.press("Allow once")
    await page.until(f"one('{ASKS}') && all('.call pre').at(-1).textContent.includes('../x')")
    await page.press("Allow once")
    await page.until("all('.said').at(-1).textContent.includes('outside the working folder')")
    await page.until(f"one('{ASKS}') && !one('#stop')")
    await page.click("#settings")
    await page.press("Ask again")
    await page.until(f"!one('{ASKS}').textContent.includes('by themselves')")
    assert len(page.bodies()) == 13


async def test_other_tools_still_need_their_own_permission(page: Any, tmp_path: Path) -> None:
    await page.ask("Read", call("read_file", path="a.txt"))
    says(page.server, call("write_file", path="b.txt", content="new"))
    await page.press("Always allow read_file here")
    await page.until(f"one('{ASKS}')?.textContent.includes('write_file')")
    says(page.server, "Done.")
    await page.press("Allow once")
    await page.until("all('.answer').at(-1).textContent === 'Done.' && !one('#stop')")
    assert (tmp_path / "b.txt").read_text() == "new"
    await page.ask("And a call of no tool", call("elsewhere", path="a.txt"))
    await page.until("one('.call textarea') || all('.answer').at(-1).textContent.includes('elsewhere')")


@pytest.mark.parametrize("width", [1280, 390])
async def test_nothing_is_violated(page: Any, width: int) -> None:
    """By axe-core's rules; on a phone no button leaves the screen."""
    await page.tab.look(width, 800, "dark")
    await page.run(AXE + "; 0")
    await page.ask("Read", call("read_file", path="a.txt"))
    await page.until(f"one('{ASKS}')")
    assert await violations(page) == []
    assert await page.run(f"all('{ASKS} button').every(b => b.getBoundingClientRect().right < innerWidth)")
    await page.click("#settings")
    await page.until("one('[name=tool-read_file]')")
    assert await violations(page) == []
