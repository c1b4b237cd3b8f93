"""The page for people at `/`: plain files that need nothing from elsewhere, and may talk to this
server only.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from logitless.server.api.context import json_response
from logitless.server.config import BUILD_INFO, ServerConfig
from logitless.server.middleware import OPEN_TO_ALL, Handler

_SCRIPT = "text/javascript"
_FILES = {
    "/": ("page.html", "text/html"),
    "/index.html": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{
        f"/{name}.js": (f"{name}.js", _SCRIPT)
        for name in (
            "page",
            "page_api",
            "page_draw",
            "page_images",
            "page_jobs",
            "page_live",
            "page_models",
            "page_tip",
        )
    },
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a newer server has a newer page
}


@cache
def _bytes(name: str) -> bytes:
    return files("logitless.server.ui").joinpath(name).read_bytes()


def _file(name: str, content_type: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=_bytes(name), content_type=content_type, charset="utf-8", headers=_HEADERS)

    return handle


async def _service_worker(request: web.Request) -> web.Response:
    """Takes over from the one that another server at this address may have left; caches nothing."""
    return web.Response(text="self.addEventListener('install', () => self.skipWaiting());", content_type=_SCRIPT)


async def _manifest(request: web.Request) -> web.Response:
    """The page's name."""
    return web.json_response({"name": "logitless", "start_url": "./"}, content_type="application/manifest+json")


async def _version(request: web.Request) -> web.Response:
    """Changes when the page may have."""
    return json_response({"version": BUILD_INFO})


def add_pages(app: web.Application, config: ServerConfig) -> None:
    """The page, or the files of a folder in its place, of which links lead nowhere else."""
    prefix = config.api_prefix.rstrip("/")
    if config.static:
        root = Path(config.static).resolve()

        async def file(request: web.Request) -> web.StreamResponse:
            path = _inside(root, request.match_info["file"] or "index.html")
            if path is None:
                raise web.HTTPNotFound
            return web.FileResponse(path)

        app.router.add_get(f"{prefix}/{{file:.*}}", file, name=OPEN_TO_ALL)
    elif config.ui:
        for path, handler in PAGE.items():
            app.router.add_get(prefix + path, handler)


def _inside(root: Path, name: str) -> Path | None:
    """The file of this name, if it lies in the folder, whatever links say."""
    try:
        path = (root / name).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except (OSError, ValueError):  # too long, a NUL, a loop of links
        return None


PAGE: dict[str, Handler] = {
    **{path: _file(*named) for path, named in _FILES.items()},
    "/sw.js": _service_worker,
    "/manifest.webmanifest": _manifest,
    "/_app/version.json": _version,
}
