"""Tool settings: built-in tools, their folder and container, and MCP servers, read and checked at the start."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

BUILT_IN = (
    *("read_file", "file_glob_search", "grep_search", "exec_shell_command", "write_file", "edit_file", "get_info"),
)
MAX_SERVERS = 32
CALL_SECONDS = 30.0  # of a call of an MCP tool, where `timeout_ms` says nothing
MAX_CALL_SECONDS = 600.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_STDIO, _HTTP = ("command", "args", "env", "cwd"), ("url", "headers")
_COMMON = ("type", "timeout_ms", "disabled", "description")
_KINDS = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url"}


@dataclass(frozen=True, slots=True)
class McpSettings:
    """One MCP server: a command that talks over its standard streams, or an address."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = CALL_SECONDS  # of a call


@dataclass(frozen=True, slots=True)
class ToolConfig:
    """Configuration of the tools that a server runs."""

    built_in: tuple[str, ...] = ()
    folder: str = "."  # of file tools and commands
    runtimes: tuple[str, ...] = ()  # containers of commands, the first unless a request names another; (): none
    servers: tuple[McpSettings, ...] = ()
    proxy: bool = False  # whether pages may reach the servers' addresses through /cors-proxy
    web_search: str = ""  # the MCP tool that OpenAI's web_search is; "": none

    def __bool__(self) -> bool:
        return bool(self.built_in or self.servers)


def built_in(names: list[str]) -> tuple[str, ...]:
    """The names of --tools; `all` is all of them. ValueError: there is no such tool."""
    for name in names:
        if name not in (*BUILT_IN, "all"):
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(BUILT_IN)}")
    return BUILT_IN if "all" in names else tuple(name for name in BUILT_IN if name in names)


def mcp_servers(text: str) -> tuple[McpSettings, ...]:
    """The servers of a JSON text in the form of Cursor and Claude Desktop: {"mcpServers": {name: {…}}}.

    ValueError has one line that names the member."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    value = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(value, dict):
        raise ValueError("must be an object with the object 'mcpServers'")
    if len(value) > MAX_SERVERS:
        raise ValueError(f"has {len(value)} servers, more than {MAX_SERVERS}")
    return tuple(
        _server(name, server) for name, server in value.items() if not (isinstance(server, dict) and _is_off(server))
    )


def _is_off(server: Mapping[str, Any]) -> bool:
    return server.get("disabled") is True


def _server(name: str, value: object) -> McpSettings:
    where = f"mcpServers.{name}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where[:80]}: a name has 1 to 32 letters, digits, '-' and '_'")
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    kind = value.get("type")
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"{where}.type must be stdio or http (streamable HTTP), not {str(kind)[:32]!r}")
    main = _KINDS[kind] if kind is not None else "url" if "url" in value else "command"
    allowed = (*_COMMON, *(_STDIO if main == "command" else _HTTP))
    for key in value:
        if key not in allowed:
            raise ValueError(f"{where}.{str(key)[:32]} is not known; there are {', '.join(allowed)}")
    if not _is_text(value.get(main)) or not value[main]:
        raise ValueError(f"{where} must have a {main!r}, a text")
    milliseconds = value.get("timeout_ms", CALL_SECONDS * 1000)
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or not milliseconds > 0:
        raise ValueError(f"{where}.timeout_ms must be a number above 0")
    seconds = min(milliseconds / 1000, MAX_CALL_SECONDS)
    if main == "url":
        return McpSettings(
            name, url=_url(where, value["url"]), headers=_texts(where, "headers", value), seconds=seconds
        )
    args = value.get("args", [])
    if not isinstance(args, list) or not all(map(_is_text, args)):
        raise ValueError(f"{where}.args must be an array of texts")
    cwd = value.get("cwd", "")
    if not _is_text(cwd):
        raise ValueError(f"{where}.cwd must be a text")
    return McpSettings(name, (value["command"], *args), _texts(where, "env", value), cwd, seconds=seconds)


def _url(where: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{where}.url must be an http:// or https:// address")
    return url


def _texts(where: str, key: str, fields: Mapping[str, Any]) -> dict[str, str]:
    value = fields.get(key, {})
    if not isinstance(value, dict) or not all(map(_is_text, value.values())):
        raise ValueError(f"{where}.{key} must be an object of texts")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
