"""Tools that the server runs, by its command line: an MCP server, a router, and the end of all of it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.bad_mcp_server import HERE as BAD
from tests.helpers.paths import MODELS
from tests.integration.conftest import ServerFactory

NEAR = {"mcpServers": {"near": {"command": sys.executable, "args": ["-S", str(BAD)]}}}


def call(server: Any, tool: str, **params: Any) -> Any:
    return server.post("/tools", {"tool": tool, "params": params})


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_flags_of_a_server(serve_here: ServerFactory, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "servers.json").write_text(json.dumps(NEAR))
    flags = ("--tools", "read_file,get_info", "--tools-folder", str(tmp_path))
    server = serve_here(None, "--demo", *flags, "--mcp-servers-config", str(tmp_path / "servers.json"))
    assert server.get("/props")["endpoint_tools"] is True
    names = [entry["tool"] for entry in server.get("/tools")]
    assert names[:2] == ["read_file", "get_info"]
    assert "near_add" in names
    assert call(server, "read_file", path="a.txt") == {"plain_text_response": "hello\n"}
    assert call(server, "near_add", a=1, b=2) == {"plain_text_response": "3"}
    pid = int(call(server, "near_pid")["plain_text_response"])
    assert is_alive(pid)
    server.stop()
    assert not is_alive(pid)


def test_a_stop_ends_running_calls(serve: ServerFactory, tmp_path: Path) -> None:
    server = serve(None, "--demo", "--tools", "exec_shell_command", "--tools-folder", str(tmp_path))
    script = "trap '' TERM HUP; echo $$ > begun; mv begun pid; sleep 300; sleep 300"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call, server, "exec_shell_command", command=script, timeout=60)
        while not (tmp_path / "pid").exists():
            assert not answer.done()
            time.sleep(0.01)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 20  # 3 s where the machine is idle, not the 60 s of the command
        assert answer.result() == {"error": "the server is shutting down"}
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_router_runs_them_and_so_do_responses_of_its_models(
    serve: ServerFactory, tmp_path: Path, connect: Any
) -> None:
    """The router does without a model; the model's server for clients that may: with an admin key, its holder."""
    shutil.copy(MODELS / "stories260K-conv-Q8_0.gguf", tmp_path / "m.gguf")
    flags = ("--models-dir", str(tmp_path), "--mcp-servers-json", json.dumps(NEAR), "-c", "2048")
    server = serve(None, *flags, "--api-key", "user", "--admin-api-key", "chief")
    client: openai.OpenAI = connect(f"{server.url}/v1", "chief")
    plain = client.with_options(base_url=server.url)
    assert plain.get("/props", cast_to=dict[str, Any])["endpoint_tools"] is True
    assert "near_add" in [entry["tool"] for entry in plain.get("/tools", cast_to=list[Any])]
    assert server.post("/tools", {"tool": "near_add", "params": {"a": 1, "b": 2}}, "chief") == {
        "plain_text_response": "3"
    }
    assert {model["status"]["value"] for model in plain.get("/models", cast_to=dict[str, Any])["data"]} == {"unloaded"}
    near = {"type": "mcp", "server_label": "near", "allowed_tools": ["pid"]}
    asked: Any = {
        "model": "m",
        "input": "Go on.",
        "tool_choice": {"type": "mcp", "server_label": "near", "name": "pid"},
        "max_output_tokens": 64,
        "temperature": 0,
    }
    never: Any = {**asked, "tools": [{**near, "require_approval": "never"}]}
    with pytest.raises(openai.PermissionDeniedError, match="need the admin key"):
        connect(f"{server.url}/v1", "user").responses.create(**never)
    whole = client.responses.create(**never)
    assert [item.type for item in whole.output[:2]] == ["mcp_list_tools", "mcp_call"]
    assert is_alive(int(whole.output[1].output))  # type: ignore[union-attr, arg-type]
    events = list(client.responses.create(**never, stream=True))
    assert {"response.mcp_list_tools.completed", "response.mcp_call.completed"} <= {event.type for event in events}
    assert [item.type for item in events[-1].response.output] == [item.type for item in whole.output]
    first = client.responses.create(**asked, tools=[near])  # which asks
    (request,) = [item for item in first.output if item.type == "mcp_approval_request"]
    answer: Any = [{"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}]
    second = {**asked, "input": answer, "tools": [near], "tool_choice": "none", "previous_response_id": first.id}
    called = client.responses.create(**second).output[0]
    assert (called.type, called.output) == ("mcp_call", whole.output[1].output)  # type: ignore[union-attr]
