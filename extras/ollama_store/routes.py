"""Rows of the routes by which clients create models; a router has their handlers."""

from __future__ import annotations

from functools import partial

from logitless.server.routes import OLLAMA, Route

_head, _post = partial(Route, "head"), partial(Route, "post")

ROUTES = (
    _post("/api/copy", "ollama.routes.only_in_router", OLLAMA, "Another name for a model (a router's)",
          body="ollama_bodies.CopyBody", empty=200),
    _post("/api/create", "ollama.routes.only_in_router", OLLAMA,
          "Make a model of uploaded files, or of another model (a router's)", body="ollama_bodies.CreateBody",
          answer="ollama.PullProgress", events="ollama.PullProgress"),
    _head("/api/blobs/{id}", "ollama.routes.only_in_router", OLLAMA, ""),
    _post("/api/blobs/{id}", "ollama.routes.only_in_router", OLLAMA,
          "Upload a file; the path has its digest, sha256:… (a router's)", raw=True, empty=201),
)  # fmt: skip
