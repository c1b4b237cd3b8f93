"""Conversations on the web page in a real browser, with scripted answers."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import pytest

from tests.helpers.chat_fakes import says

ANSWER = "# Title\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | $x^2$ |\n\n<img src=x onerror=alert(1)> ![p](https://evil.example/p.png)"
SAVED = """(async (store, key) => {
    const done = r => new Promise(resolve => { r.onsuccess = () => resolve(r.result); });
    const database = await done(indexedDB.open('logitless'));
    const value = await done(database.transaction(store).objectStore(store).get(key));
    database.close();
    return value; })"""
GIVE = """(text => {
    const all = new DataTransfer(), box = one('#import');
    all.items.add(new File([text], 'a.json'));
    box.files = all.files;
    box.dispatchEvent(new Event('change', {bubbles: true})); })"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("code", "colored"),
    [("x" * 1001, False), ("y = 1\n" * 9000, False), ("x" * 990 + " = 1", True), ("y = 1\n" * 3000, True)],
)
async def test_code_that_takes_long_to_color_stays_plain(page: Any, code: str, colored: bool) -> None:
    """8,000 letters without a blank took the highlighter of Java two seconds, for each piece of the answer."""
    from_page = "(await import(new URL('markdown.js', all('script[src]').at(-1).src).href))"
    text = json.dumps(f"```python\n{code}\n```")
    await page.run(
        f"(async () => {{ globalThis.box = document.createElement('div'); {from_page}.show(box, {text}); }})()"
    )
    assert await page.run("box.querySelector('code').textContent.trim()") == code.strip()
    if colored:
        await page.until("box.querySelector('code span')")
    else:
        await page.run("new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)))")
        assert not await page.run("box.querySelector('code span')")


async def test_markdown_code_and_formulas(page: Any) -> None:
    await page.ask("Show all", ANSWER)
    await page.until(
        "one('.katex-mathml') && one('.hljs-number') && getComputedStyle(one('.katex')).fontFamily.includes('KaTeX')"
    )
    assert await page.run(
        "[one('.markdown h3').textContent, one('.markdown td').textContent, all('.markdown img').length]"
    ) == ["Title", "1", 0]
    assert "onerror" in (await page.texts(".markdown"))[0]
    assert await page.run("one('.markdown a').href") == "https://evil.example/p.png"
    await page.run(
        "globalThis.taken = ''; document.execCommand = () => (globalThis.taken = one('textarea.unseen').value, true); 0"
    )
    await page.run("Object.defineProperty(navigator, 'clipboard', {value: undefined}); 0")
    await page.press("Copy code")
    await page.until("globalThis.taken === 'x = 1'")
    await page.press("Copy message")
    await page.until(f"globalThis.taken === {json.dumps(ANSWER)}")


async def test_conversations_and_settings_survive_a_reload(page: Any) -> None:
    await page.ask("First <b>question</b>", "one")
    await page.press("New conversation")
    await page.click("#settings")
    await page.fill("#system", "Be brief.")
    await page.fill("[name=temperature]", "0.5")
    await page.ask("Second", "two")
    assert page.bodies()[-1] == "[system]Be brief.[user]Second[assistant]"
    assert page.server.scheduler.requests[-1].sampling.temperature == 0.5
    await page.fill("#theme", "dark")
    while await page.run(f"{SAVED}('preferences', 'theme')") != "dark":
        pass
    await page.open()
    await page.until("all('.list .title').length === 2")
    assert await page.texts(".list .title") == ["Second", "First <b>question</b>"]
    assert await page.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
    await page.run("all('.list .title')[0].click()")
    await page.until("all('article').length === 2")
    assert await page.texts(".said, .answer") == ["Second", "two"]
    await page.click("#settings")
    await page.until("one('#system')?.value === 'Be brief.'")
    await page.fill("#search", "question")
    await page.until("all('.list .title').length === 1")
    assert (await page.texts(".list .title"))[0].startswith("First <b>question</b>")


async def test_edit_and_regenerate_make_branches(page: Any) -> None:
    await page.ask("A", "one")
    says(page.server, "two")
    await page.press("Regenerate")
    await page.until("one('.answer').textContent === 'two' && !one('#stop')")
    assert await page.texts(".branches span") == ["2 / 2"]
    await page.press("Previous branch")
    await page.until("one('.answer').textContent === 'one'")
    says(page.server, "three")
    await page.press("Edit")
    await page.until("one('.editing textarea')")
    await page.fill(".editing textarea", "B")
    await page.run("one('.editing textarea').focus()")
    await page.key("Enter", 13)
    await page.until("one('.answer').textContent === 'three' && !one('#stop')")
    assert page.bodies()[-1] == "[user]B[assistant]"
    assert await page.texts(".branches span") == ["2 / 2"]
    await page.press("Previous branch")
    await page.until("one('.said').textContent === 'A' && one('.answer').textContent === 'two'")
    await page.press("Delete from here on")
    await page.until("one('.answer').textContent === 'one'")


async def test_stop_and_continue(page: Any) -> None:
    page.server.scheduler.gate = threading.Semaphore(6)
    await page.ask("Count", "one two three", wait=False)
    await page.until("one('.answer').textContent.startsWith('one t')")
    await page.key("Escape", 27)
    await page.until("one('.cut')?.textContent.startsWith('Stopped.')")
    page.server.scheduler.gate.release(1000)
    begun = (await page.texts(".answer"))[0]
    says(page.server, "!")
    await page.press("Continue")
    await page.until("one('.answer').textContent.endsWith('!') && !one('#stop')")
    assert (await page.texts(".answer"))[0] == begun + "!"
    assert page.bodies()[-1] == f"[user]Count[assistant]{begun}"
    await page.click("#settings")
    await page.fill("[name=max_tokens]", "3")
    await page.ask("More", "four")
    assert (await page.texts(".answer"))[-1] == "fou"
    assert "Cut at the limit" in (await page.texts(".cut"))[-1]


async def test_another_token_instead(page: Any) -> None:
    page.server.scheduler._top = lambda id, n: _prob(id, ord("X"))
    await page.click("button.chip")
    await page.ask("Say", "abc")
    assert await page.texts(".answer .token") == ["a", "b", "c"]
    await page.run("one('.answer .tokens').focus()")
    await page.key("ArrowRight", 39)
    await page.key("ArrowRight", 39)
    assert await page.run("[one('.token.chosen').textContent, one('#tip').hidden]") == ["b", False]
    assert "%" in await page.run("one('#said').textContent")
    says(page.server, "yz")
    await page.key("Enter", 13)
    assert await page.run("document.activeElement.textContent.startsWith('X')")
    await page.run("document.activeElement.click()")
    await page.until("one('.answer').textContent === 'aXyz' && !one('#stop')")
    assert page.bodies()[-1] == "[user]Say[assistant]aX"
    assert await page.texts(".branches span") == ["2 / 2"]
    assert await page.texts(".token.swapped") == ["X"]
    await page.press("Show text")
    await page.until("one('.answer p')?.textContent === 'aXyz'")


def _prob(id: int, other: int) -> Any:
    from logitless.engine.requests import TokenProb

    return TokenProb(id, -0.5, ((id, -0.5), (other, -1.5), (0xC3, -3.0)))


async def test_reasoning_is_folded(page: Any) -> None:
    await page.fill("#thinking", "on")
    await page.click("#settings")
    await page.fill("#effort", "low")
    await page.ask("Think", "<think>\nI should **add**.\n</think>\n\nSum")
    assert await page.texts(".answer") == ["Sum"]
    assert await page.run("[one('.thought').open, one('.thought strong').textContent]") == [False, "add"]


async def test_tool_calls_are_answered(page: Any) -> None:
    await page.click("#settings")
    await page.press("Add a tool")
    await page.until("one('[aria-label=\"Name of tool 1\"]')")
    await page.fill('[aria-label="Name of tool 1"]', "add")
    await page.press("Add a field")
    await page.until("one('[aria-label^=\"Name of field 1\"]')")
    await page.fill('[aria-label^="Name of field 1"]', "a")
    await page.ask("Add", CALL)
    assert '"name": "add"' in page.bodies()[-1]
    assert '"properties": {"a": {"type": "string"}}' in page.bodies()[-1]
    assert await page.texts(".call h3 code, .call pre") == ["add", '{\n  "a": 1\n}']
    says(page.server, "It is 3.")
    await page.fill(".call textarea", "3")
    await page.press("Answer the call")
    await page.until("all('.answer').at(-1).textContent === 'It is 3.' && !one('#stop')")
    assert page.bodies()[-1].endswith("[tool]3[assistant]")
    assert not await page.run("one('.call form')")


async def test_structured_output_is_asked_for(page: Any) -> None:
    await page.click("#settings")
    await page.click("#structured")
    await page.press("Add a field")
    await page.until("one('[aria-label=\"Type of field1\"]')")
    await page.fill('[aria-label="Type of field1"]', "boolean")
    await page.run(
        "globalThis.old = fetch; fetch = (url, o) => (o?.body && (globalThis.sent = o.body), old(url, o)); 0"
    )
    await page.ask("Yes?", "{}")
    schema = {
        "type": "object",
        "properties": {"field1": {"type": "boolean"}},
        "required": ["field1"],
        "additionalProperties": False,
    }
    assert await page.run("JSON.parse(sent).response_format.json_schema.schema") == schema


async def test_files_are_part_of_the_message(page: Any) -> None:
    await page.run(
        """(() => { const all = new DataTransfer(); all.items.add(new File(["1,2"], "a.csv", {type: "text/csv"}));
        all.items.add(new File([new Uint8Array([255, 254, 0])], "b.bin"));
        one('#form').dispatchEvent(new DragEvent('drop', {dataTransfer: all, bubbles: true, cancelable: true})); })()"""
    )
    await page.until("one('.attached.file')")
    assert "b.bin is neither text, an image nor a sound" in await page.run("one('#attached').textContent")
    await page.ask("Sum", "3")
    assert page.bodies()[-1] == "[user]File a.csv:\n```\n1,2\n```\n\nSum[assistant]"


def pdf(*pages: str) -> bytes:
    """A PDF with these lines of text, one a page."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        font = "/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R {font} /MediaBox [0 0 612 792] /Contents {len(objects)} 0 R >>")
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    whole, offsets = "%PDF-1.4\n", []
    for i, text in enumerate(objects, 1):
        offsets.append(len(whole))
        whole += f"{i} 0 obj\n{text}\nendobj\n"
    table = "".join(f"{at:010} 00000 n \n" for at in offsets)
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(whole)}\n%%EOF"
    return f"{whole}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()


DROP = """((name, data) => { const all = new DataTransfer();
    all.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], name));
    one('#form').dispatchEvent(new DragEvent('drop', {dataTransfer: all, bubbles: true, cancelable: true})); })"""


async def test_pdf_is_attached_as_its_text(page: Any) -> None:
    for name, body, told in (
        ("scan.pdf", pdf(""), "scan.pdf has no text: its pages may be pictures."),
        ("bad.PDF", b"%PDF-1.4 nothing", "bad.PDF cannot be read as a PDF: "),
    ):
        await page.run(f"{DROP}({json.dumps(name)}, {json.dumps(base64.b64encode(body).decode())})")
        await page.until(f"one('#attached')?.textContent.includes({json.dumps(told)})")
    body = base64.b64encode(pdf("First page", "Second page")).decode()
    await page.run(f"{DROP}('a.pdf', {json.dumps(body)})")
    await page.until("one('.attached.file')")
    await page.ask("Sum", "3")
    assert page.bodies()[-1] == "[user]File a.pdf:\n```\nFirst page\n\nSecond page\n```\n\nSum[assistant]"


async def test_presets_export_and_import(page: Any) -> None:
    await page.click("#settings")
    await page.fill("#system", "Rhyme.")
    await page.fill("#preset-name", "Poet")
    await page.press("Save")
    await page.fill("#system", "")
    await page.fill("#preset", "Poet")
    await page.until("one('#system').value === 'Rhyme.'")
    await page.ask("Hello", "hi")
    await page.run("URL.createObjectURL = blob => (globalThis.kept = blob, 'blob:x'); 0")
    await page.run("HTMLAnchorElement.prototype.click = () => {}; 0")
    await page.click("#export")
    text = await page.run("kept.text()")
    await page.run("globalThis.confirm = () => true; 0")
    await page.press("Delete “Hello”")
    await page.until("!all('.list .title').length")
    await page.run(f"{GIVE}('{{}}')")
    await page.until("one('#imported').textContent.includes('format')")
    await page.run(f"{GIVE}({json.dumps(text)})")
    await page.until("all('.list .title').length === 1")
    assert await page.texts(".list .title") == ["Hello"]


async def test_refusals_are_told(page: Any) -> None:
    await page.ask("word " * 200, "x")
    assert "context" in (await page.texts(".cut.bad[role=alert]"))[0]
    page.tab.said.clear()  # the browser's own line about the 400


TABLE = "| architecture | tokens | what it is good for |\n|---|---|---|\n" + 3 * (
    "| Qwen3NextForCausalLM | 1048576.25 | long conversations about incomprehensibilities and other matters |\n"
)
BROKEN = """all('.markdown td, .markdown th').flatMap(cell => {
    const text = cell.firstChild, range = document.createRange();
    const isBroken = ({index, 0: word}) => { range.setStart(text, index); range.setEnd(text, index + word.length);
        return range.getClientRects().length > 1; };
    return [...text.data.matchAll(/[^ ]+/g)].filter(isBroken).map(found => found[0]); })"""


@pytest.mark.parametrize("width", [320, 390, 1280])
async def test_tables_break_no_word_or_number(page: Any, width: int) -> None:
    await page.tab.look(width, 740)
    await page.ask("Compare", TABLE + "\n" + "y" * 400)
    assert await page.run(BROKEN) == []
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")  # the table scrolls in its own box


async def test_code_is_downloaded_with_its_languages_ending(page: Any) -> None:
    await page.ask("Code", "```python\nx = 1\n```\n\n```../../x\ny\n```")
    await page.run("URL.createObjectURL = blob => (globalThis.kept = blob, 'blob:x'); 0")
    await page.run("HTMLAnchorElement.prototype.click = function () { globalThis.name_ = this.download; }; 0")
    for at, text, name in ((0, "x = 1", "code.py"), (1, "y", "code.txt")):
        await page.press("Download code", at)
        assert await page.run("Promise.all([name_, kept.text()])") == [name, text]


async def test_new_conversation_says_what_it_inherits(page: Any) -> None:
    assert not await page.run("one('#inherited')")
    await page.click("#settings")
    await page.fill("#system", "Rhyme.")
    await page.press("Add a tool")
    await page.click("#structured")
    await page.until("one('#inherited')?.textContent.includes('a system prompt; the tool tool1; a JSON schema')")
    await page.ask("Hello", "hi")
    await page.press("New conversation")
    await page.press("Begin without them")
    await page.until("!one('#inherited') && one('#system').value === ''")
    await page.run("all('.list .title')[0].click()")
    await page.until("one('#system').value === 'Rhyme.'")  # the old one has its own


async def test_answer_is_made_again_by_another_model(page: Any) -> None:
    await page.ask("A", "one")
    assert not await page.run("one('[aria-label^=\"Regenerate with\"]')")  # there is one model
    await page.run(
        """(() => { const old = fetch; globalThis.fetch = async (url, options) => {
        if (options?.body) globalThis.sent = JSON.parse(options.body);
        const reply = await old(url, options);
        if (!String(url).startsWith('v1/models')) return reply;
        const list = await reply.json(); list.data.push({...list.data[0], id: 'other'});
        return new Response(JSON.stringify(list)); }; })()"""
    )
    await page.run("one('#model').dispatchEvent(new Event('change', {bubbles: true}))")
    says(page.server, "two")
    await page.fill('[aria-label^="Regenerate with"]', "other")
    await page.until("one('.answer').textContent === 'two' && !one('#stop')")
    assert await page.run("[sent.model, one('.assistant .who').textContent]") == ["other", "other"]
    assert await page.texts(".branches span") == ["2 / 2"]


@pytest.mark.parametrize("width", [360, 1280])
async def test_nothing_overflows(page: Any, width: int) -> None:
    await page.tab.look(width, 740, "dark")
    await page.ask("Show all", ANSWER + "\n\n" + "x" * 300)
    for drawer in ("#settings", "#live"):
        await page.click(drawer)
        await page.until("one('.drawer')")
        await page.run("all('details').forEach(d => (d.open = true))")
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        assert await page.run("one('.drawer').scrollWidth <= one('.drawer').clientWidth")
