"""Tools of the type mcp in a Responses request: the tools of a configured server, and their need of approval."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from logitless.extras.tools.server_tool import ServerTool
from logitless.frontend.dialects.responses import full_name
from logitless.frontend.fields import as_text, bad_request

WEB_SEARCH = "web_search"  # the model's name of the search
_KNOWN = ("type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval")


@dataclass(frozen=True, slots=True)
class Filter:
    """Tools by name, or by their promise to read only; None: any."""

    names: frozenset[str] | None = None
    read_only: bool | None = None

    def takes(self, tool: ServerTool) -> bool:
        """True for a tool that matches."""
        named = self.names is None or tool.bare in self.names
        return named and (self.read_only is None or self.read_only == (not tool.writes))


@dataclass(frozen=True, slots=True)
class McpChoice:
    """One entry of a request's `tools`."""

    label: str
    allowed: Filter
    always: Filter | None  # the tools that need approval
    never: Filter | None  # the tools that do not
    searches: bool = False  # it is OpenAI's web_search

    def asks(self, tool: ServerTool) -> bool:
        """True where a call needs approval: OpenAI's default."""
        if self.never is not None and self.never.takes(tool):
            return False
        return self.always is None or self.always.takes(tool) or self.never is not None

    def as_namespace(self, tools: Iterable[ServerTool]) -> dict[str, Any]:
        """The entry as functions of a namespace, which the model can call."""
        functions = [
            {
                "type": "function",
                "name": safe(tool.bare),
                "description": tool.description,
                "parameters": tool.parameters,
            }
            for tool in tools
        ]
        return {"type": "namespace", "name": self.label, "tools": functions}


def safe(name: str) -> str:
    """A tool's name with the letters that functions may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def model_name(label: str, name: str) -> str:
    """The name by which the model calls a server's tool."""
    return full_name(label, safe(name))


SEARCH = McpChoice("", Filter(), None, Filter(), searches=True)
_SEARCHES = frozenset({"web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11"})
_HINTS = ("type", "search_context_size")  # of a search


def is_search(tool: object) -> bool:
    """True for an entry that is OpenAI's search."""
    return isinstance(tool, dict) and tool.get("type") in _SEARCHES


def search_function(place: str, fields: Mapping[str, Any], tool: ServerTool) -> dict[str, Any]:
    """OpenAI's search as a function, which the model can call."""
    for name, value in fields.items():
        if name not in _HINTS and value is not None:
            bad_request(f"{place}.{name}", "is not there: the search takes a query")
    query = {"type": "string", "description": "what to search for"}
    parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
    return {"type": "function", "name": WEB_SEARCH, "description": tool.description, "parameters": parameters}


def is_mcp(tool: object) -> bool:
    """True for an entry of this type."""
    return isinstance(tool, dict) and tool.get("type") == "mcp"


def mcp_choice(place: str, fields: Mapping[str, Any], urls: Mapping[str, str]) -> McpChoice:
    """The entry at a place of the request; `urls`: addresses of the configured servers by name, "" for commands."""
    for name, value in fields.items():
        if name not in _KNOWN and value is not None:
            bad_request(f"{place}.{name}", "is not there: MCP servers are those of --mcp-servers-config")
    label = as_text(f"{place}.server_label", fields.get("server_label"))
    if label not in urls:
        bad_request(f"{place}.server_label", f"there is no server {label[:64]!r}; there are {', '.join(urls)}")
    url = fields.get("server_url")
    if url is not None and url != urls[label]:
        bad_request(f"{place}.server_url", "is not the configured address of this server, and no other may be called")
    allowed = fields.get("allowed_tools")
    where = f"{place}.require_approval"
    body = fields.get("require_approval")
    if body is None or body == "always":
        always, never = Filter(), None
    elif body == "never":
        always, never = None, Filter()
    elif isinstance(body, dict) and set(body) <= {"always", "never"}:
        always, never = (
            None if body.get(key) is None else _filter(f"{where}.{key}", body[key]) for key in ("always", "never")
        )
    else:
        bad_request(where, "must be always, never, or an object of these")
    return McpChoice(label, Filter() if allowed is None else _filter(f"{place}.allowed_tools", allowed), always, never)


def _filter(where: str, value: object) -> Filter:
    value = {"tool_names": value} if isinstance(value, list) else value
    if not isinstance(value, dict) or not set(value) <= {"tool_names", "read_only"}:
        bad_request(where, "must be an array of names, or an object of tool_names and read_only")
    names, read_only = value.get("tool_names"), value.get("read_only")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        bad_request(where, "tool_names must be an array of texts")
    if read_only is not None and not isinstance(read_only, bool):
        bad_request(where, "read_only must be a boolean")
    return Filter(None if names is None else frozenset(names), read_only)
