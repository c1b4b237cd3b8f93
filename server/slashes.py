"""Path normalisation: slashes too many and Azure's prefixes lead to the route without them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from aiohttp import web

_MANY = re.compile("/{2,}")
_AZURES = re.compile(r"(?:/openai(?:/v1)?(?:/deployments/[^/]+)?|/v1/deployments/[^/]+)(?=/)")


def canonical(raw: str) -> str:
    """The escaped path with single slashes, none at its end, and /v1 where Azure's client names a deployment."""
    path = _MANY.sub("/", raw).rstrip("/") or "/"
    azures = _AZURES.match(path)
    return f"/v1{path[azures.end() :]}" if azures else path


class Slashes(web.AbstractResource):
    """Resource without routes of its own: finds those of the canonical path."""

    def __init__(self, router: web.UrlDispatcher) -> None:
        super().__init__()
        self._router = router

    @property
    def canonical(self) -> str:
        return "/"

    async def resolve(self, request: web.Request) -> tuple[web.UrlMappingMatchInfo | None, set[str]]:
        url = request.rel_url
        path = canonical(url.raw_path)
        if path == url.raw_path:
            return None, set()
        result = await self._router.resolve(request.clone(rel_url=url.with_path(path, encoded=True)))
        if result.http_exception is None:
            return result, set()
        return None, set(getattr(result.http_exception, "allowed_methods", ()))

    def url_for(self, **_: str) -> NoReturn:
        raise RuntimeError("it stands for other paths")

    def add_prefix(self, prefix: str) -> None:
        """No-op: paths are changed, not matched."""

    def get_info(self) -> Any:
        return {}

    def raw_match(self, path: str) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[web.AbstractRoute]:
        return iter(())
