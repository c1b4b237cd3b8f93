"""Declaration of a built-in tool: a struct of its arguments, and its JSON schema by the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.json import schema_components

from logitless.engine.errors import InvalidRequest
from logitless.engine.sampling.params import params_of
from logitless.extras.tools.server_tool import Answer, ServerTool, ToolError
from logitless.frontend.fields import read
from logitless.frontend.workers import compute

S = TypeVar("S", bound=Struct)


def parsed(kind: type[S], arguments: Mapping[str, Any]) -> S:
    """The arguments of a call. ToolError names the wrong one, or one that is not known."""
    known = params_of(kind)
    for name in arguments:
        if name not in known:
            raise ToolError(f"field {name[:64]!r}: is not known; there are {', '.join(known)}")
    try:
        return read(kind, arguments)
    except InvalidRequest as error:
        raise ToolError(error.message) from None


def schema(kind: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, with their meanings."""
    _, components = schema_components((kind,), ref_template="#/$defs/{name}")
    own = components.pop(kind.__name__)
    properties = {}
    for name, (_, param) in params_of(kind).items():
        field = {key: value for key, value in own["properties"][name].items() if key != "default"}
        properties[name] = {**field, "description": param.doc} | ({"enum": [*param.choices]} if param.choices else {})
    built: dict[str, Any] = {"type": "object", "properties": properties, "required": own["required"]}
    return built | ({"$defs": components} if components else {})


def tool(name: str, title: str, kind: type[S], work: Callable[[S], Answer], *, writes: bool = False) -> ServerTool:
    """A tool whose work is done beside the event loop. Its description is the struct's."""

    async def call(arguments: Mapping[str, Any], client: str) -> Answer:
        body = parsed(kind, arguments)
        return await compute(lambda: work(body), client)

    return ServerTool(name, title, described(kind), schema(kind), call, writes=writes)


def described(kind: type[Struct]) -> str:
    """The struct's docstring on one line."""
    return " ".join((kind.__doc__ or "").split())
