"""Images and sounds on the web page: by button, paste and drop; thumbnails, players, and answers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.audio_files import AUDIO_SPECS, N_CTX, sound, wav, write_audio_projector, write_audio_text_model
from tests.helpers.browser import Browser, Tab
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import picture, png
from tests.server.ui.test_access import AXE, LOOK

STORIES = MODELS / "stories260K.gguf"
pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="no stories260K.gguf beside the checkout")


@pytest.fixture(scope="module")
def server(serve_here_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, spec = tmp_path_factory.mktemp("media"), AUDIO_SPECS["qwen2.5o audio"]
    model = write_audio_text_model(folder / "m.gguf", spec, STORIES)
    write_audio_projector(folder / "mmproj.gguf", spec)
    return serve_here_module(model, "-c", str(2 * N_CTX), "--metrics", "--data-dir", str(folder / "data"))


@pytest.fixture
async def page(browser: Browser, server: Any) -> AsyncIterator[Tab]:
    async with browser.tab() as made:
        await made.open_page(server.url)
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


async def choose(page: Tab, *files: Path) -> None:
    """The files of a dialog that the button opens."""
    await page.run("$('picker').addEventListener('click', e => (e.preventDefault(), globalThis.opened = true)); 0")
    await page.point("#attach", click=True)
    await page.until("globalThis.opened")
    root = (await page.call("DOM.getDocument"))["root"]["nodeId"]
    picker = (await page.call("DOM.querySelector", nodeId=root, selector="#picker"))["nodeId"]
    await page.call("DOM.setFileInputFiles", nodeId=picker, files=[str(file) for file in files])


async def drag(page: Tab, selector: str, file: Path, *kinds: str) -> None:
    """Drag a file over an element, as the browser has it from the desktop."""
    box = f"document.querySelector('{selector}').getBoundingClientRect()"
    x, y = await page.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
    data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
    for kind in kinds:
        await page.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
async def test_images_by_button_and_drop(page: Tab, tmp_path: Path, width: int, scheme: str) -> None:
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for seed, (file, size) in enumerate(zip(files, ((90, 60), (240, 40), (8, 8)), strict=True)):
        file.write_bytes(png(picture(*size, seed=seed)))
    await page.look(width, 800, scheme)
    await page.run(AXE + "; 0")
    await choose(page, *files[:2])
    await page.until("document.querySelectorAll('#attached img').length === 2")
    await drag(page, "#log", files[2], "dragEnter", "dragOver")
    await page.until("$('form').className === 'dropping' && $('text').placeholder === 'Drop files here'")
    await drag(page, "#log", files[2], "drop")
    await page.until("document.querySelectorAll('#attached img').length === 3 && !$('form').className")
    sizes = await page.run("[...document.querySelectorAll('#attached img')].map(i => [i.width, i.height])")
    assert sizes == [[72, 72]] * 3
    await page.run("document.getAnimations().forEach(a => a.finish())")
    assert await page.run(LOOK) == []
    await page.run("$('settings').click()")
    await page.fill("[name=max_tokens]", "8")
    await page.run("document.querySelector('.drawer .icon-button').click(); $('text').focus()")
    await page.write("What are these?")
    await page.key("Enter", 13)
    await page.until("!$('stop') && document.querySelector('.answer')?.textContent")
    await page.until("[...document.querySelectorAll('article.user img')].every(i => i.complete && i.naturalWidth)")
    shown = await page.run("[...document.querySelectorAll('article.user img')].map(i => [i.width, i.height])")
    assert shown == [[90, 60], [240, 40], [8, 8]]  # as they are: a thumbnail is not stretched
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    assert await page.run(LOOK) == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
async def test_sounds_are_played_and_sent(page: Tab, tmp_path: Path, width: int, scheme: str) -> None:
    assert await page.run("$('attach').title") == "Attach images, sounds, PDFs or text files"
    assert "audio/*" in await page.run("$('picker').accept")
    files = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for seed, file in enumerate(files):
        file.write_bytes(wav(sound(1, seed)))
    await page.look(width, 800, scheme)
    await page.run(AXE + "; 0")
    await choose(page, *files)
    await page.until("document.querySelectorAll('#attached audio').length === 2")
    await page.until("[...document.querySelectorAll('#attached audio')].every(a => a.duration === 1)")  # it plays
    await page.point("#attached span:nth-child(2) button", click=True)
    await page.until("document.querySelectorAll('#attached audio').length === 1")
    await page.run("document.getAnimations().forEach(a => a.finish())")
    assert await page.run(LOOK) == []
    await page.run("$('settings').click()")
    await page.fill("[name=max_tokens]", "4")
    await page.run("document.querySelector('.drawer .icon-button').click(); $('text').focus()")
    await page.run(
        "globalThis.old = fetch; fetch = (url, o) => (o?.body && (globalThis.sent = o.body), old(url, o)); 0"
    )
    await page.write("What is said?")
    await page.key("Enter", 13)
    await page.until("!$('stop') && document.querySelector('.answer')?.textContent")
    (part, text) = await page.run("JSON.parse(sent).messages[0].content")
    assert (part["type"], part["input_audio"]["format"], text["text"]) == ("input_audio", "wav", "What is said?")
    assert base64.b64decode(part["input_audio"]["data"]) == files[0].read_bytes()
    await page.until("document.querySelector('article.user audio')?.duration === 1")
    assert await page.run("document.querySelectorAll('#attached audio').length") == 0
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    assert await page.run(LOOK) == []


async def test_a_file_that_nothing_takes_is_refused(page: Tab, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(picture(8, 8)))
    await page.run("document.querySelectorAll('.views button')[1].click()")
    await page.until("document.querySelector('.compare')")
    seen = "(e => (globalThis.seen = [e.defaultPrevented, e.dataTransfer.dropEffect]))"
    await page.run(f"window.addEventListener('dragover', {seen}); 0")
    await drag(page, ".talks", file, "dragEnter", "dragOver")
    await page.until("String(globalThis.seen) === 'true,none'")  # else the browser would show the file instead


async def test_image_for_a_routers_model_that_is_not_loaded_loads_it(
    browser: Browser, serve: Any, tmp_path: Path
) -> None:
    spec = AUDIO_SPECS["qwen2.5o audio"]
    (tmp_path / "all" / "sees").mkdir(parents=True)
    model = write_audio_text_model(tmp_path / "all" / "sees" / "sees.gguf", spec, STORIES)
    write_audio_projector(model.parent / "mmproj-sees.gguf", spec)
    server = serve(None, "--models-dir", str(tmp_path / "all"), "-c", str(2 * N_CTX), "-t", "1")
    async with browser.tab() as page:
        await page.open_page(server.url)
        await page.until("$('absent')?.textContent.endsWith('is not loaded; a message to it loads it.')")
        await page.until("$('attach')?.title === 'Attach images, sounds, PDFs or text files'")
        await paste(page, 1)
        await page.until("document.querySelectorAll('#attached img').length === 1")
        await page.point("#settings", click=True)
        await page.fill("[name=max_tokens]", "4")
        await page.run("document.querySelector('.drawer .icon-button').click(); $('text').focus()")
        await page.write("What is this?")
        await page.key("Enter", 13)
        await page.until("!$('stop') && document.querySelector('.answer')?.textContent && !$('absent')")
        assert page.said == []
