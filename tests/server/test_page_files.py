"""The page at `/` as files: where they are, what they may do, what they refer to. test_page.py uses them."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest

from logitless.server.ui.page import _FILES
from tests.helpers.http_fakes import running
from tests.helpers.paths import ROOT

HTTP = ROOT / "server" / "ui"
FILES = sorted(path.name for path in HTTP.glob("page*.*") if path.suffix in (".html", ".css", ".js"))
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class Page(HTMLParser):
    """The elements of the page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed((HTTP / "page.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))


async def test_files_and_headers() -> None:
    async with running(api_keys=("k",), api_prefix="/deep") as server:
        for path, (name, kind) in _FILES.items():
            async with server.http.get(server.url + "/deep" + path) as reply:
                assert (reply.status, reply.content_type, reply.charset) == (200, kind, "utf-8")
                assert await reply.read() == (HTTP / name).read_bytes()
                policy = dict(
                    part.strip().split(" ", 1) for part in reply.headers["Content-Security-Policy"].split(";")
                )
                assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
                assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
                assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert (await server.get("/deep/page.py"))[0] == 401  # no file of the page, so a key is wanted first
    assert {name for name, _ in _FILES.values()} == set(FILES)
    assert all(kind == TYPES[Path(name).suffix] for name, kind in _FILES.values())


async def test_no_ui() -> None:
    async with running(ui=False) as server:
        for path in _FILES:
            assert (await server.get(path))[0] == 404


def test_every_file_is_packaged() -> None:
    project = tomllib.loads((HTTP.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["logitless.server.ui"]
    for name in FILES:
        assert any(fnmatch(name, pattern) for pattern in patterns), name


@pytest.mark.parametrize("name", FILES)
def test_nothing_from_elsewhere_and_no_markup_from_text(name: str) -> None:
    text = (HTTP / name).read_text()
    found = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", text))
    assert found <= {"http://www.w3.org"}  # the name of SVG, which nobody fetches
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|@import|url\(", text
    )
    assert len(text.splitlines()) <= 500


def test_page_refers_to_what_is_there() -> None:
    elements = Page().elements
    for tag, attributes in elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        assert tag != "style"
        for name in ("src", "href"):
            target = attributes.get(name, "")
            if target and not target.startswith(("#", "data:")):
                assert target == "manifest.webmanifest" or (HTTP / target).is_file(), target
    assert all(attributes.get("src") for tag, attributes in elements if tag == "script")
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in elements:
        for name in ("for", "aria-labelledby"):
            assert attributes.get(name, ids[0]) in ids, (tag, attributes)
    for name in FILES:
        if name.endswith(".js"):
            text = (HTTP / name).read_text()
            assert set(re.findall(r'\$\("([\w-]+)"\)', text)) <= set(ids), name
            assert all((HTTP / target).is_file() for target in re.findall(r'from "\./([\w.]+)"', text)), name


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of two colours written as #rgb or #rrggbb."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    text = (HTTP / "page.css").read_text()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w+);", part)) for part in re.findall(r":root \{(.*?)\n *\}", text, re.S)
    ]
    assert len(schemes) == 2
    for colours in schemes:
        grounds = [colours[name] for name in ("paper", "panel", "mine", "doubt", "rare")]
        assert min(contrast(colours["ink"], ground) for ground in grounds) >= 4.5
        for name in ("soft", "accent", "bad"):
            assert min(contrast(colours[name], colours[ground]) for ground in ("paper", "panel")) >= 4.5, name
        assert contrast(colours["soft"], colours["mine"]) >= 4.5
        assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
        assert contrast(colours["line"], colours["paper"]) >= 3  # borders of what can be used
