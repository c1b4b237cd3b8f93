"""HTTP server: the one package that imports aiohttp's server. `make_app` builds the application."""

from __future__ import annotations

from logitless.server.app import make_app, serve

__all__ = ["make_app", "serve"]
