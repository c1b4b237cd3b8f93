"""The endpoint /tools through a real port: its list and calls, and everybody that may not use it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.flags.flags import CliError, parse
from logitless.cli.flags.options import SERVE
from logitless.extras.tools import handlers as tools_module
from logitless.extras.tools.config import BUILT_IN, McpSettings
from logitless.extras.tools.server_settings import tool_settings
from logitless.extras.tools.settings import ToolSettings
from tests.helpers.bad_mcp_server import HERE
from tests.helpers.http_fakes import Running, running

EVIL = {"Origin": "https://evil.example"}


@pytest.fixture
def settings(tmp_path: Path) -> ToolSettings:
    (tmp_path / "a.txt").write_text("hello")
    return ToolSettings(BUILT_IN, str(tmp_path), servers=(McpSettings("bad", (sys.executable, "-S", str(HERE))),))


async def test_list_and_calls(settings: ToolSettings) -> None:
    async with running(tools=settings) as server:
        _, listed = await server.get("/tools")
        by_name = {entry["tool"]: entry for entry in listed}
        assert list(by_name)[:7] == list(BUILT_IN)
        assert by_name["write_file"]["permissions"] == {"write": True}
        assert by_name["read_file"] == {
            "display_name": "Read file",
            "tool": "read_file",
            "type": "server",
            "permissions": {"write": False},
            "uses_cwd": True,
            "definition": by_name["read_file"]["definition"],
        }
        function = by_name["read_file"]["definition"]["function"]
        assert function["parameters"]["required"] == ["path"]
        assert function["parameters"]["properties"]["path"] == {"type": "string", "description": "path of the file"}
        assert by_name["bad_add"]["type"] == "mcp"

        async def call(tool: str, **params: Any) -> tuple[int, Any]:
            return await server.post("/tools", {"tool": tool, "params": params})

        assert await call("read_file", path="a.txt") == (200, {"plain_text_response": "hello\n"})
        assert await call("bad_add", a=1, b=2) == (200, {"plain_text_response": "3"})
        status, failed = await call("read_file", path="../x")
        assert (status, list(failed)) == (200, ["error"])
        assert (await call("nothing"))[0] == 404
        for body in ({}, {"tool": 1}, {"tool": "read_file", "params": 1}, {"tool": "read_file", "stream": 1}):
            assert (await server.post("/tools", body))[0] == 400
        for header in ("x-tool-cwd", "x-tool-runtime"):
            status, refused = await server.post("/tools", {"tool": "get_info"}, headers={header: "/"})
            assert (status, "--tools-" in refused["error"]["message"]) == (400, True)


async def streamed(server: Running, **body: Any) -> list[dict[str, Any]]:
    async with server.http.post(f"{server.url}/tools", json={**body, "stream": True}) as reply:
        assert (reply.status, reply.content_type) == (200, "text/event-stream")
        return [json.loads(line.removeprefix(b"data: ")) async for line in reply.content if line.strip()]


async def test_a_stream_has_chunks_and_says_that_it_is_done(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    async with running(tools=ToolSettings(built_in=BUILT_IN, folder=str(tmp_path))) as server:
        command = "printf 'one\\303'; sleep 0.2; printf '\\251two'"
        *chunks, done = await streamed(server, tool="exec_shell_command", params={"command": command})
        assert done == {"done": True}
        assert len(chunks) >= 3
        assert "".join(chunk["chunk"] for chunk in chunks) == "oneétwo\n[exit code: 0]"
        whole = await streamed(server, tool="read_file", params={"path": "a.txt"})
        assert whole == [{"chunk": "hello\n"}, {"done": True}]
        (failed,) = await streamed(server, tool="read_file", params={"path": "../b"})
        assert (failed["done"], "outside" in failed["error"]) == (True, True)
        (failed,) = await streamed(server, tool="exec_shell_command", params={"command": 1})
        assert "'command'" in failed["error"]


async def test_a_request_chooses_a_folder_below_the_servers(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("above")
    (tmp_path / "in" / "b.txt").write_text("inside")
    async with running(tools=ToolSettings(built_in=BUILT_IN, folder=str(tmp_path))) as server:

        async def call(cwd: str, tool: str, **params: Any) -> tuple[int, Any]:
            return await server.post("/tools", {"tool": tool, "params": params}, headers={"X-Tool-Cwd": cwd})

        for cwd in ("in", str(tmp_path / "in"), "in/deep/.."):
            assert (await call(cwd, "read_file", path="b.txt"))[1] == {"plain_text_response": "inside\n"}
            assert (await call(cwd, "read_file", path="../a.txt"))[1] == {"plain_text_response": "above\n"}
            told = (await call(cwd, "exec_shell_command", command="pwd"))[1]
            assert told["plain_text_response"].startswith(f"{tmp_path / 'in'}\n")
            assert (await call(cwd, "get_info"))[1]["cwd"] == str(tmp_path / "in")
        await call("in", "write_file", path="c.txt", content="x")
        assert (tmp_path / "in" / "c.txt").exists()
        for cwd in ("..", "/", "/etc", "in/b.txt", "nowhere", "x" * 5000):
            status, refused = await call(cwd, "get_info")
            assert (status, refused["error"]["message"][:18]) == (400, "field 'X-Tool-Cwd'")
        assert all(entry["uses_cwd"] for entry in (await server.get("/tools"))[1])


async def test_a_request_chooses_among_the_servers_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "podman"
    engine.write_text('#!/bin/sh\necho "$@"\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = ToolSettings(built_in=BUILT_IN, folder=str(tmp_path), runtimes=("podman:a", "podman-container:b"))
    async with running(tools=settings) as server:

        async def call(runtime: str) -> tuple[int, Any]:
            headers = {"X-Tool-Runtime": runtime} if runtime else {}
            return await server.post(
                "/tools", {"tool": "exec_shell_command", "params": {"command": "x"}}, headers=headers
            )

        for runtime, word in (("", " a sh "), ("podman:a", " a sh "), ("podman-container:b", "exec")):
            status, told = await call(runtime)
            assert (status, word in told["plain_text_response"]) == (200, True)
        for runtime in ("podman:other", "none", "docker:a"):
            status, refused = await call(runtime)
            assert (status, "none of --tools-runtime" in refused["error"]["message"]) == (400, True)


async def test_pages_of_others_run_no_tools(settings: ToolSettings) -> None:
    async with running(tools=settings) as server:
        for headers in (EVIL, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert (await server.get("/tools", headers=headers))[0] == 403
            assert (await server.post("/tools", {"tool": "get_info"}, headers=headers))[0] == 403
        form = {"data": b'{"tool": "get_info"}', "headers": {"Content-Type": "text/plain"}}
        assert (await server.post("/tools", None, **form))[0] == 415


async def test_keys(settings: ToolSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    key, admin = {"Authorization": "Bearer k"}, {"Authorization": "Bearer a"}
    body = {"tool": "get_info"}
    async with running(tools=settings, api_keys=("k",)) as server:
        assert (await server.get("/tools"))[0] == 401
        assert (await server.post("/tools", body))[0] == 401
        assert (await server.post("/tools", body, headers=key))[0] == 200
    async with running(tools=settings, api_keys=("k",), admin_api_key="a") as server:
        assert (await server.get("/tools", headers=key))[0] == 200
        assert (await server.post("/tools", body, headers=key))[0] == 403
        assert (await server.post("/tools", body, headers=admin))[0] == 200
    monkeypatch.setattr(tools_module, "is_local", lambda request: False)  # a connection from another machine
    async with running(tools=settings) as server:
        status, refused = await server.post("/tools", body)
        assert (status, "--api-key" in refused["error"]["message"]) == (403, True)


def read(*words: str) -> ToolSettings:
    flags = [flag for group in SERVE for flag in group.flags]
    return tool_settings(parse(flags, words, {}))


CONFIG = '{"mcpServers": {"a": {"command": "x"}}}'


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tools", "all", "--host", "0.0.0.0"), "not on 0.0.0.0: --api-key"),
        (("--mcp-servers-json", CONFIG, "--host", "127.0.0.1,10.0.0.1"), "not on 10.0.0.1: --api-key"),
        (("--tools", "get_info", "--host", "example.com"), "not on example.com: --api-key"),
        (("--tools", "get_info", "--cors-origins", "*"), "every web page run tools"),
        (("--tools", "get_info", "--cors-origins", "https://*"), "every web page run tools"),
        (("--tools", "get_info", "--allowed-hosts", "*"), "every web page run tools"),
        (("--tools", "reed_file"), "there is no tool 'reed_file'; there are read_file"),
        (("--tools-folder", "/tmp"), "--tools-folder is of --tools"),
        (("--tools", "read_file", "--tools-runtime", "podman:x"), "--tools-runtime is of exec_shell_command"),
        (("--tools", "all", "--tools-runtime", "ssh:host"), "--tools-runtime: must be one of docker:IMAGE"),
        (("--tools", "all", "--tools-folder", "{folder}/none"), "is not a folder"),
        (("--mcp-servers-config", "{folder}/none"), "No such file"),
        (("--mcp-servers-config", "{folder}/bad.json"), "bad.json: is not JSON"),
        (("--mcp-servers-config", "{folder}/good.json", "--mcp-servers-json", CONFIG), "two servers 'a'"),
        (("--mcp-servers-json", CONFIG, "--web-search", "b_search"), "--web-search b_search: must be SERVER_TOOL"),
    ],
)
def test_refusals_at_the_start(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "good.json").write_text(CONFIG)
    with pytest.raises((CliError, ValueError)) as caught:
        read(*(word.replace("{folder}", str(tmp_path)) for word in words))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tool_flags_are_read_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not read()
    assert read("--tools", "get_info,read_file").built_in == ("read_file", "get_info")
    assert read("--tools", "all").folder == str(tmp_path)
    assert read("--tools", "all", "--host", "0.0.0.0", "--api-key", "k").built_in == BUILT_IN
    (tmp_path / "bom.json").write_text(CONFIG, encoding="utf-8-sig")
    assert read("--mcp-servers-config", "bom.json").servers[0].command == ("x",)
    for host in ("localhost", "::1", "127.0.0.2", "/tmp/x.sock"):
        assert read("--mcp-servers-json", CONFIG, "--host", host).servers[0].command == ("x",)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CliError, match="would see all of"):
        read("--tools", "all")
    assert read("--tools", "all", "--tools-folder", ".").folder == str(tmp_path)
    monkeypatch.setattr("logitless.extras.tools.server_settings.find_spec", lambda name: None)
    with pytest.raises(CliError, match=r"MCP servers need the package mcp: pip install 'mcp>=2\.0' 'httpx2"):
        read("--mcp-servers-json", CONFIG)
