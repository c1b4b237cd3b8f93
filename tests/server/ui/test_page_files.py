"""Files of the web page: locations, permissions, references."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest

from logitless.server.ui.page import assets, version
from tests.helpers.http_fakes import running
from tests.helpers.paths import ROOT

WEB = ROOT / "server" / "ui" / "web"
FILES = sorted(str(path.relative_to(WEB)) for path in WEB.rglob("*") if path.is_file() and path.suffix != ".ts")
OWN = [name for name in FILES if not name.startswith("vendor/")]
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".woff2": "font/woff2"}
FIRST_VISIT = 400_000  # bytes, compressed


class Page(HTMLParser):
    """The elements of the page with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed((WEB / "index.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))


async def test_files_and_headers() -> None:
    async with running(api_keys=("k",), api_prefix="/deep") as server:
        for name, body in assets().items():
            path = "/deep/" if name == "index.html" else f"/deep/ui/{version()}/{name}"
            async with server.http.get(server.url + path) as reply:
                assert reply.status == 200
                assert reply.content_type == TYPES.get(Path(name).suffix, "text/plain")
                if name != "index.html":
                    assert await reply.read() == body
                    assert reply.headers["Cache-Control"] == "public, max-age=31536000, immutable"
                policy = dict(
                    part.strip().split(" ", 1) for part in reply.headers["Content-Security-Policy"].split(";")
                )
                assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
                assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "font")} == {"'self'"}
                assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
                assert policy["img-src"] == policy["media-src"] == "data:"
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                assert reply.headers.getall("Vary") == ["Accept-Encoding, Origin"]
            again = {"If-None-Match": reply.headers["ETag"]}
            async with server.http.get(server.url + path, headers=again) as reply:
                assert (reply.status, reply.headers.getall("Vary")) == (304, ["Accept-Encoding, Origin"])
        for path in ("page.py", f"ui/{version()}/none.js", f"ui/{version()}/../page.py", "ui/x/vendor/manifest.json"):
            assert (await server.get(f"/deep/{path}"))[0] in (401, 404), path


async def test_the_page_names_its_version_and_is_asked_for_by_its_etag() -> None:
    async with running() as server:
        async with server.http.get(server.url + "/") as reply:
            text, etag = await reply.text(), reply.headers["ETag"]
            assert reply.headers["Cache-Control"] == "no-cache"
        assert text.lower().startswith("<!doctype html>")
        assert set(re.findall(r'"ui/(\w+)/', text)) == {version()}
        for sent, status in ((etag, 304), (f"W/{etag}", 304), (f'"other", {etag}', 304), ('"other"', 200)):
            async with server.http.get(server.url + "/", headers={"If-None-Match": sent}) as reply:
                assert reply.status == status, sent
        async with server.http.get(f"{server.url}/ui/0123/app.js") as reply:  # of an older page
            assert (reply.status, reply.headers["Cache-Control"]) == (200, "no-cache")


async def test_no_ui() -> None:
    async with running(ui=False) as server:
        for path in ("/", "/index.html", f"/ui/{version()}/app.js"):
            assert (await server.get(path))[0] == 404


def test_every_file_is_packaged_and_served() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["logitless.server.ui"]
    for name in FILES:
        assert any(fnmatch(f"web/{name}", pattern) for pattern in patterns), name
    assert set(assets()) == set(FILES) - {"vendor/manifest.json"}


def test_vendored_files_are_those_of_the_manifest() -> None:
    manifest = json.loads((WEB / "vendor" / "manifest.json").read_text())
    found = {
        name.removeprefix("vendor/"): hashlib.sha256((WEB / name).read_bytes()).hexdigest()
        for name in FILES
        if name.startswith("vendor/") and name != "vendor/manifest.json"
    }
    assert manifest["sha256"] == found, "run scripts/vendor-page"
    pins = json.loads((ROOT / "server" / "ui" / "src" / "package.json").read_text())["devDependencies"]
    licences = (WEB / "vendor" / "LICENSES.txt").read_text()
    for name, library in manifest["libraries"].items():
        assert pins[name] == library["version"]
        assert f"==== {name} {library['version']}\n" in licences
        assert library["licence"] in {"MIT", "Apache-2.0", "BSD-3-Clause"}


def test_a_first_visit_is_small() -> None:
    later = {"vendor/highlight.js", "vendor/katex.js", "vendor/katex.css", "vendor/pdf.js"}
    first = [
        body for name, body in assets().items() if Path(name).suffix in (".js", ".css", ".html") and name not in later
    ]
    assert sum(len(gzip.compress(body)) for body in first) < FIRST_VISIT / 4
    assert len(gzip.compress(assets()["vendor/pdf.js"])) < 1.5 * FIRST_VISIT
    assert sum(len(gzip.compress(body)) for body in assets().values()) < 3.5 * FIRST_VISIT


@pytest.mark.parametrize("name", OWN)
def test_nothing_from_elsewhere_and_no_markup_from_text(name: str) -> None:
    text = assets()[name].decode()
    found = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", text))
    assert found <= {"http://www.w3.org"}  # the name of SVG, which nobody fetches
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|DOMParser|\beval\(|new Function"
    assert not re.search(rf"{markup}|@import|url\(|\.cssText|localStorage", text)
    assert len(text.splitlines()) <= 500
    if name.endswith(".js"):
        for target in re.findall(r'from "\./([\w./]+)"|import\("\./([\w./]+)"\)', text):
            assert (WEB / "".join(target)).is_file(), target


def test_page_refers_to_what_is_there() -> None:
    elements = Page().elements
    for tag, attributes in elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        assert tag != "style"
        for name in ("src", "href"):
            target = attributes.get(name, "")
            if target and not target.startswith(("#", "data:")):
                assert target == "manifest.webmanifest" or (WEB / target.removeprefix("ui/")).is_file(), target
    assert all(attributes.get("src") for tag, attributes in elements if tag == "script")


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of two colours written as #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", (WEB / "style.css").read_text())
    code = re.findall(r"color: light-dark\((#\w{6}), (#\w{6})\)", (WEB / "answer.css").read_text())
    assert len(pairs) > 12
    assert len(code) > 5
    for scheme in (0, 1):
        colours = {name: values[scheme] for name, *values in pairs}
        grounds = [colours[name] for name in ("paper", "panel", "raised", "mine", "doubt", "rare", "edge")]
        assert min(contrast(colours["ink"], ground) for ground in grounds) >= 4.5
        for name in ("soft", "accent", "bad"):
            assert min(contrast(colours[name], colours[ground]) for ground in ("paper", "panel", "raised")) >= 4.5, name
        assert contrast(colours["soft"], colours["edge"]) >= 4.5
        assert contrast(colours["accent"], colours["mine"]) >= 4.5
        assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
        assert min(contrast(colours["line"], colours[ground]) for ground in ("paper", "raised")) >= 3
        assert min(contrast(values[scheme], colours["panel"]) for values in code) >= 4.5
