"""Interface of the store of models that clients of Ollama's API create, which an extra has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from logitless.frontend.answers.ollama import ShownModel

Fields = dict[str, Any]
Pass = Callable[[str], Awaitable[web.StreamResponse]]  # pass the request to the model of this name
Read = Callable[[web.Request, Callable[[Fields, Pass], Awaitable[web.StreamResponse]]], Awaitable[web.StreamResponse]]


class CreatedModel(Protocol):
    """Settings of a created model. `created`: Unix time; `base`: the model that it was made from."""

    @property
    def name(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def base(self) -> str: ...
    @property
    def template(self) -> str: ...

    def words(self, folder: Path) -> tuple[str, ...]:
        """The arguments of the model's server."""

    def shown_in(self, answer: ShownModel) -> ShownModel:
        """The answer of /api/show with these settings."""


@dataclass(frozen=True)
class CreatorAccess:
    """Access to a router for the routes of creation. `silence`: maximum seconds for 128 KiB of an upload; `read_again`
    updates the fleet from the catalog; `ours` maps a client's name of a model to ours."""

    fleet: Any
    silence: float
    read_again: Callable[[], Awaitable[None]]
    ours: Callable[[str], str]
    read_body: Read


class ModelStore(Protocol):
    """Created models below the folder of a router's models."""

    def owns(self, folder: Path) -> bool:
        """True for the folder of a created model."""

    def models(self) -> Mapping[str, tuple[Path, CreatedModel]]:
        """(first GGUF file, settings) by name."""

    async def remove(self, model: Any) -> None:
        """Delete a created model."""

    def add_to(self, app: web.Application, prefix: str, creator: CreatorAccess) -> None:
        """Add the routes of creation."""
