"""Store of created models as a router has it, with the routes of creation."""

from __future__ import annotations

from aiohttp import web

from logitless.extras.ollama_store.create import Creation
from logitless.extras.ollama_store.handlers import CreationRoutes
from logitless.extras.ollama_store.model_store import CreatedModels
from logitless.router.ollama.store import CreatorAccess


class OllamaStore(CreatedModels):
    """The created models below a folder (logitless.router.ollama.store.ModelStore)."""

    def add_to(self, app: web.Application, prefix: str, creator: CreatorAccess) -> None:
        """Add the routes of creation."""
        creation = Creation(creator.fleet, self, creator.read_again, creator.ours)
        CreationRoutes(self.blobs, creation, creator.read_body, creator.silence).add_to(app, prefix)


MODEL_STORES = (OllamaStore,)
