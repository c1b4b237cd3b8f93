"""HTTP: the only place that knows aiohttp. `make_app` builds the application, `serve` runs it until
a signal.
"""

from __future__ import annotations

from logitless.server.app import make_app, serve

__all__ = ["make_app", "serve"]
