"""The web page at `/`: static files without external resources; it talks to this server only.

The page's scripts, style sheets and fonts lie under `/ui/VERSION/`, where VERSION changes with any
of them: a browser keeps them and asks again for the page alone, by its ETag."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from aiohttp import web

from logitless.frontend.config import BUILD_INFO
from logitless.server.api.context import json_response
from logitless.server.config import ServerConfig
from logitless.server.middleware import OPEN_TO_ALL
from logitless.server.observing.record import FileAnswer
from logitless.server.routes import Handler

_SCRIPT = "text/javascript"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": _SCRIPT, ".woff2": "font/woff2", ".txt": "text/plain"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_INDEX = "index.html"
_JSDOC = re.compile(rb"/\*\*.*?\*/ ?", re.DOTALL)  # types of our modules, which browsers do not need
_AGAIN = "no-cache"  # a newer server has a newer page
_IMMUTABLE = "public, max-age=31536000, immutable"


@cache
def assets() -> dict[str, bytes]:
    """The page's files by name, as `vendor/marked.js`."""

    def walk(folder: Traversable, within: str) -> Iterator[tuple[str, bytes]]:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                yield from walk(entry, f"{within}{entry.name}/")
            elif Path(entry.name).suffix in _TYPES:
                body = entry.read_bytes()
                yield within + entry.name, body if within else _JSDOC.sub(b"", body)

    return dict(walk(files("logitless.server.ui").joinpath("web"), ""))


@cache
def version() -> str:
    """A digest of all files."""
    digest = hashlib.sha256()
    for name, body in assets().items():
        digest.update(f"{name} {len(body)}\n".encode() + body)
    return digest.hexdigest()[:16]


@cache
def _body(name: str) -> bytes:
    """A file as it is served: the page refers to the other files by their version."""
    body = assets()[name]
    return body.replace(b'"ui/', f'"ui/{version()}/'.encode()) if name == _INDEX else body


@cache
def _compressed(name: str) -> bytes:
    return gzip.compress(_body(name), 9, mtime=0)


def _file(request: web.Request, name: str, caching: str) -> web.Response:
    """200 with the file, or 304 for a client that has this version of it."""
    etag = f'"{version()}"'
    headers = {**_HEADERS, "Cache-Control": caching, "ETag": etag, "Vary": "Accept-Encoding"}
    if any(etag in (tag.strip(), tag.strip()[2:]) for tag in request.headers.get("If-None-Match", "").split(",")):
        return web.Response(status=304, headers=headers)
    kind = _TYPES[Path(name).suffix]
    charset = "utf-8" if kind.startswith("text/") else None
    body = _body(name)
    if charset and "gzip" in request.headers.get("Accept-Encoding", ""):
        body, headers["Content-Encoding"] = _compressed(name), "gzip"
    return web.Response(body=body, content_type=kind, charset=charset, headers=headers)


async def _index(request: web.Request) -> web.Response:
    return _file(request, _INDEX, _AGAIN)


async def _asset(request: web.Request) -> web.Response:
    """A file by name; one of another version is asked for again."""
    name = request.match_info["name"]
    if name not in assets():
        raise web.HTTPNotFound
    return _file(request, name, _IMMUTABLE if request.match_info["version"] == version() else _AGAIN)


async def _service_worker(request: web.Request) -> web.Response:
    """Takes over from the one that another server at this address may have left; caches nothing."""
    return web.Response(text="self.addEventListener('install', () => self.skipWaiting());", content_type=_SCRIPT)


async def _manifest(request: web.Request) -> web.Response:
    """The page's name."""
    lines = {"name": "logitless", "start_url": "./", "display": "standalone"}
    return web.json_response(lines, content_type="application/manifest+json")


async def _version(request: web.Request) -> web.Response:
    """Changes when the page may have."""
    return json_response({"version": BUILD_INFO})


def add_pages(app: web.Application, config: ServerConfig) -> None:
    """The page, or the files of a folder in its place, of which links lead nowhere else."""
    prefix = config.api_prefix.rstrip("/")
    if config.static:
        root = Path(config.static).resolve()

        async def file(request: web.Request) -> web.StreamResponse:
            path = _inside(root, request.match_info["file"] or _INDEX)
            if path is None:
                raise web.HTTPNotFound
            return FileAnswer(path)

        app.router.add_get(f"{prefix}/{{file:.*}}", file, name=OPEN_TO_ALL)
    elif config.ui:
        for path, handler in PAGE.items():
            app.router.add_get(prefix + path, handler)
        app.router.add_get(prefix + "/ui/{version}/{name:.+}", _asset, name=OPEN_TO_ALL)


def _inside(root: Path, name: str) -> Path | None:
    """The file of this name, if it lies in the folder, with links resolved."""
    try:
        path = (root / name).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except (OSError, ValueError):  # too long, a NUL, a loop of links
        return None


PAGE: dict[str, Handler] = {
    "/": _index,
    "/index.html": _index,
    "/sw.js": _service_worker,
    "/manifest.webmanifest": _manifest,
    "/_app/version.json": _version,
}
