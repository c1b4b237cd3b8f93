"""Functions in namespaces: the Responses API's groups of tools, in which Codex has those of MCP servers.

A chat has no groups, so a model knows such a function by a name of both, and calls come back as the two they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from logitless.server.protocol.fields import article, as_text, refuse

_NONE = ("", "functions")  # the latter is Codex's own for functions without one


def full_name(namespace: object, name: str) -> str:
    """What a model calls a function; `namespace`: None where it is in none."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace not in _NONE else name


def expanded(tools: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The tools with their places in the request, those of namespaces one by one and by their full names."""
    for i, tool in enumerate(tools):
        place = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            yield place, tool
            continue
        namespace, inner = as_text(f"{place}.name", tool.get("name")), tool.get("tools")
        if not isinstance(inner, list):
            refuse(f"{place}.tools", f"expected an array, got {article(inner)}")
        for j, each in enumerate(inner):
            named = isinstance(each, dict) and isinstance(each.get("name"), str)
            yield f"{place}.tools[{j}]", each | {"name": full_name(namespace, each["name"])} if named else each


def homes(tools: Sequence[Any]) -> dict[str, tuple[str, str]]:
    """By the full names of a request's functions in namespaces: namespace and name."""
    found = {}
    for tool in tools:
        if tool.get("type") == "namespace":
            for each in tool["tools"]:
                name = each.get("name")
                if isinstance(name, str) and full_name(tool["name"], name) != name:
                    found[full_name(tool["name"], name)] = tool["name"], name
    own = {tool.get("name") for tool in tools}
    return {full: home for full, home in found.items() if full not in own}


def called(name: str, homes: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """What an item says of the function that a model called."""
    namespace, bare = homes.get(name, ("", name))
    return {"name": bare} | ({"namespace": namespace} if namespace else {})
