"""Accessibility of the web page: axe-core in all views, both colour schemes, both widths."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_fakes import says

AXE = gzip.decompress((Path(__file__).parent / "axe.min.js.gz").read_bytes()).decode()
ANSWER = "<think>\nwell\n</think>\n\n# Title\n\n```python\nx = 1  # y\n```\n\n| a |\n|---|\n| $x^2$ |\n\n- [x] done"
LOOK = """axe.run(document).then(found =>
    found.violations.map(v => [v.id, v.nodes.map(n => n.html + ' ' + n.failureSummary).slice(0, 3)]))"""

TRAINS = """(jobs => { const old = fetch; globalThis.fetch = (url, options) => {
    const path = String(url).replace(/[?].*/, ''), data = jobs[path];
    return data ? Promise.resolve(new Response(JSON.stringify({data}))) : old(url, options); }; })(%s)"""
JOBS = {
    "v1/fine_tuning/jobs": [
        {"id": "ftjob-1", "model": "fake", "fine_tuned_model": "ft:fake", "status": "succeeded", "created_at": 1,
         "method": {"type": "supervised"}, "error": None, "trained_tokens": 9}
    ],
    "v1/fine_tuning/jobs/ftjob-1/events": [
        {"id": f"e{i}", "created_at": i, "level": "info", "message": f"Step {i}", "type": "metrics",
         "data": {"step": i, "total_steps": 2, "train_loss": 2 / i}}
        for i in (1, 2)
    ] + [{"id": "e", "created_at": 3, "level": "info", "message": "The job is done", "type": "message", "data": None}],
    "v1/fine_tuning/jobs/ftjob-1/checkpoints": [
        {"id": "c", "step_number": 2, "fine_tuned_model_checkpoint": "ft:fake@2"}
    ],
}  # fmt: skip


async def violations(page: Any) -> Any:
    await page.run("document.getAnimations().forEach(a => a.finish())")
    return await page.run(LOOK)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
async def test_nothing_is_violated(page: Any, width: int, scheme: str) -> None:
    await page.tab.look(width, 800, scheme)
    await page.run(AXE + "; 0")
    await page.click("button.chip")
    await page.ask("Count", "abc")
    await page.run("one('.answer .tokens').focus()")
    await page.key("ArrowRight", 39)
    assert await violations(page) == []
    await page.key("Escape", 27)
    await page.click("button.chip")
    await page.ask("Show all", ANSWER)
    await page.until("one('.katex-mathml') && one('.hljs-number')")
    await page.run("all('details').forEach(d => (d.open = true))")
    assert await violations(page) == []
    await page.click("#settings")
    await page.press("Add a tool")
    await page.run("all('details').forEach(d => (d.open = true))")
    says(page.server, '<tool_call>\n{"name": "tool1", "arguments": {}}\n</tool_call>')
    await page.press("Regenerate")
    await page.until("one('.call form')")
    assert await violations(page) == []
    await page.click("#live")
    await page.until("one('#slots')")
    assert await violations(page) == []
    await page.press("Close")
    await page.run("all('.views button')[1].click()")
    await page.until("one('.compare')")
    assert await violations(page) == []
    await page.run("all('.views button')[2].click()")
    await page.until("one('.view [role=alert]')")
    assert await violations(page) == []
    await page.run(TRAINS % json.dumps(JOBS) + "; 0")
    await page.run("all('.views button')[0].click()")
    await page.run("all('.views button')[2].click()")
    await page.click("#example")
    await page.until("one('.job .curve') && one('#checks .good')")
    await page.run("all('details').forEach(d => (d.open = true))")
    assert await violations(page) == []
    if width == 390:
        await page.press("Conversations")
        await page.until("one('.side.open')")
        assert await violations(page) == []
        await page.press("Close the list")
    await page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: '?'}))")
    await page.until("one('dialog[open]')")
    assert await violations(page) == []
    page.tab.said.clear()  # a server that does not train says 501
