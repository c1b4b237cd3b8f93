"""Tools that the server runs, by its command line: an MCP server, a router, and the end of all of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.helpers.bad_mcp_server import HERE as BAD
from tests.integration.conftest import ServerFactory

NEAR = {"mcpServers": {"near": {"command": sys.executable, "args": ["-S", str(BAD)]}}}


def call(server: Any, tool: str, **params: Any) -> Any:
    return server.post("/tools", {"tool": tool, "params": params})


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_flags_of_a_server(serve: ServerFactory, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "servers.json").write_text(json.dumps(NEAR))
    flags = ("--tools", "read_file,get_info", "--tools-folder", str(tmp_path))
    server = serve(None, "--demo", *flags, "--mcp-servers-config", str(tmp_path / "servers.json"))
    assert server.get("/props")["endpoint_tools"] is True
    names = [entry["tool"] for entry in server.get("/tools")]
    assert names[:2] == ["read_file", "get_info"]
    assert "near_add" in names
    assert call(server, "read_file", path="a.txt") == {"plain_text_response": "hello\n"}
    assert call(server, "near_add", a=1, b=2) == {"plain_text_response": "3"}
    pid = int(call(server, "near_pid")["plain_text_response"])
    assert is_alive(pid)
    assert server.stop() == 0
    assert not is_alive(pid)


def test_a_router_runs_them_without_a_model(serve: ServerFactory, tmp_path: Path) -> None:
    server = serve(None, "--models-dir", str(tmp_path), "--mcp-servers-json", json.dumps(NEAR))
    assert server.get("/props")["endpoint_tools"] is True
    assert "near_add" in [entry["tool"] for entry in server.get("/tools")]
    assert call(server, "near_add", a=1, b=2) == {"plain_text_response": "3"}
