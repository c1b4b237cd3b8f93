"""MCP servers over standard streams and HTTP: calls, deaths, hangs and floods, each of which costs its own calls."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from logitless.extras.tools.config import McpSettings, mcp_servers
from logitless.extras.tools.mcp import server as mcp_server_module
from logitless.extras.tools.server_tool import Answer, ServerTool, plain
from logitless.extras.tools.settings import ToolSettings
from logitless.extras.tools.toolbox import AT_ONCE, Toolbox
from tests.extras.tools.test_shell import alive
from tests.helpers.bad_mcp_server import HERE as BAD_HERE
from tests.helpers.mcp_server import HERE

SUMS = McpSettings("sums", (sys.executable, str(HERE)), env={"TOKEN": "t"}, seconds=20.0)
BAD = McpSettings("bad", (sys.executable, "-S", str(BAD_HERE)), seconds=20.0)
HASTY = replace(BAD, name="hasty", seconds=0.3)


@asynccontextmanager
async def boxed(*servers: McpSettings) -> AsyncIterator[Toolbox]:
    """A toolbox whose servers all end with it."""
    toolbox = Toolbox(ToolSettings(servers=servers))
    living = toolbox.live(None, eager=False)  # type: ignore[arg-type]
    await anext(living)
    try:
        yield toolbox
    finally:
        await anext(living, None)
        assert alive() == []


async def call(toolbox: Toolbox, name: str, **arguments: Any) -> Any:
    tool = await toolbox.find(name)
    assert tool is not None, name
    answer = await toolbox.call(tool, arguments, "me")
    return answer.get("plain_text_response", answer)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of the server over HTTP."""
    with subprocess.Popen(
        [sys.executable, str(HERE), "http"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        process.kill()


async def test_calls_over_both_transports(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    async with boxed(SUMS, McpSettings("web", url=url)) as toolbox:
        tools = await toolbox.tools()
        assert {"sums_add", "web_add"} <= set(tools)
        add = tools["sums_add"]
        assert (add.kind, add.writes, add.description, add.server, add.bare) == (
            *("mcp", False, "Add two numbers.", "sums", "add"),
        )
        assert tools["sums_fail"].writes
        assert set(add.parameters["properties"]) == {"a", "b"}
        for name in ("sums", "web"):
            sums = [call(toolbox, f"{name}_add", a=i, b=1) for i in range(AT_ONCE)]
            assert await asyncio.gather(*sums) == [str(i + 1) for i in range(AT_ONCE)]
            wrong = await call(toolbox, f"{name}_add", a="x")
            assert "validation error" in wrong["error"]
            failed = await call(toolbox, f"{name}_fail")
            assert "fail" in failed["error"]
            long = await call(toolbox, f"{name}_long", n=200_000)
            assert long.endswith("[output truncated]")
            assert len(long) < mcp_server_module.MAX_RESULT + 40
        names = (await call(toolbox, "sums_environment")).split()
        assert "TOKEN" in names
        assert "LLAMA_API_KEY" not in names


async def test_more_calls_than_a_server_may_have_wait() -> None:
    async with boxed(replace(HASTY, seconds=1.0), BAD) as toolbox:
        hanging = [asyncio.create_task(call(toolbox, "hasty_hang")) for _ in range(AT_ONCE)]
        tool = await toolbox.find("hasty_add")
        while not toolbox._room["hasty"].locked():
            await asyncio.sleep(0)
        assert tool is not None
        later = asyncio.create_task(toolbox.call(tool, {"a": 1, "b": 2}, "me"))
        assert await call(toolbox, "bad_add", a=1, b=2) == "3"  # the others notice nothing
        assert not later.done()
        errors = [answer["error"] for answer in await asyncio.gather(*hanging)]
        assert "did not answer within 1 s" in errors[0]
        assert all("did not answer" in error or "is down: it answers no more" in error for error in errors)
        assert await later  # also where the server was started anew meanwhile


async def test_calls_beyond_eight_wait_in_their_order() -> None:
    begun, go = list[int](), asyncio.Event()

    async def work(arguments: Mapping[str, Any], client: str) -> Answer:
        begun.append(arguments["i"])
        await go.wait()
        return plain(str(arguments["i"]))

    tool = ServerTool("t", "t", "", {}, work)
    toolbox = Toolbox(ToolSettings())
    calls = [asyncio.create_task(toolbox.call(tool, {"i": i}, "me")) for i in range(AT_ONCE * 2)]
    while len(begun) < AT_ONCE:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun == list(range(AT_ONCE))
    calls[AT_ONCE].cancel()  # its client leaves
    go.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers.pop(AT_ONCE), asyncio.CancelledError)
    assert answers == [plain(str(i)) for i in range(AT_ONCE * 2) if i != AT_ONCE]
    assert begun == [i for i in range(AT_ONCE * 2) if i != AT_ONCE]


async def test_a_stop_ends_running_and_waiting_calls() -> None:
    async with boxed(BAD) as toolbox:
        hanging = [asyncio.create_task(call(toolbox, "bad_hang")) for _ in range(AT_ONCE + 2)]
        while not toolbox._room["bad"].locked():
            await asyncio.sleep(0)
        await asyncio.wait_for(toolbox.stop(), 10)
        assert await asyncio.gather(*hanging) == [{"error": "the server is shutting down"}] * (AT_ONCE + 2)


async def test_a_server_that_dies_is_started_again_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(mcp_server_module, "monotonic", lambda: now)
    async with boxed(BAD) as toolbox:
        assert "is down: it ended (the last words)" in (await call(toolbox, "bad_die"))["error"]
        assert await call(toolbox, "bad_add", a=1, b=2) == "3"  # at once, the first time
        for pause in (0, 1, 2, 4):
            assert "bad_add" in await toolbox.tools()
            await call(toolbox, "bad_die")
            if pause:
                with pytest.raises(mcp_server_module.ToolError, match=f"is started again in {pause} s"):
                    await toolbox.servers["bad"].tools()
            now += pause
        assert await call(toolbox, "bad_add", a=1, b=2) == "3"
        await call(toolbox, "bad_die")
        assert await call(toolbox, "bad_add", a=1, b=2) == "3"  # it did well in between


async def test_a_server_that_hangs_is_started_anew() -> None:
    async with boxed(HASTY) as toolbox:
        first = await call(toolbox, "hasty_pid")
        for _ in range(mcp_server_module.MAX_HANGS):
            assert "did not answer within 0.3 s" in (await call(toolbox, "hasty_hang"))["error"]
        assert (await call(toolbox, "hasty_pid")) != first


@pytest.mark.parametrize("kind", ["messages", "garbage", "line"])
async def test_a_server_that_floods_is_ended(kind: str) -> None:
    async with boxed(BAD) as toolbox:
        await call(toolbox, "bad_flood", kind=kind)
        server = toolbox.servers["bad"]
        link = server._link
        if link is not None:
            async with asyncio.timeout(10):
                await link._ending.wait()
            assert "it sent" in link.reason
        assert await call(toolbox, "bad_add", a=1, b=2) == "3"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (McpSettings("gone", ("no-such-command",)), "there is no 'no-such-command'"),
        (McpSettings("ends", ("sh", "-c", "echo wrong flag >&2; exit 2")), "wrong flag"),
        (McpSettings("far", url="http://127.0.0.1:1/mcp"), "connection"),
    ],
)
async def test_servers_that_cannot_be_had(settings: McpSettings, reason: str) -> None:
    assert reason in await _why_not(settings)


async def test_a_server_that_does_not_greet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server_module, "START_SECONDS", 0.3)
    assert "did not greet within 0.3 seconds" in await _why_not(McpSettings("mute", ("sleep", "99")))


async def _why_not(settings: McpSettings) -> str:
    async with boxed(settings) as toolbox:
        with pytest.raises(mcp_server_module.ToolError) as caught:
            await toolbox.servers[settings.name].tools()
    return str(caught.value).lower()


async def test_the_cause_is_told_though_the_end_was_noticed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport closes its stream and fails; the order in which both are noticed is a matter of load."""
    from logitless.extras.tools.mcp.link import McpLink

    @asynccontextmanager
    async def failing(_: McpLink) -> AsyncIterator[Any]:
        (closed, reading), (writing, taken) = (anyio.create_memory_object_stream[Any](1) for _ in range(2))
        closed.close()
        with reading, writing, taken:
            try:
                yield reading, writing
            finally:
                raise ConnectionError("no connection")

    monkeypatch.setattr(McpLink, "_http", failing)
    async with boxed(McpSettings("far", url="http://127.0.0.1:1/mcp")) as toolbox:
        with pytest.raises(mcp_server_module.ToolError, match="no connection"):
            await toolbox.servers["far"].tools()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("x", "is not JSON"),
        ("[]", "mcpServers"),
        ('{"mcpServers": []}', "mcpServers"),
        ({"a b": {"command": "x"}}, "a name has"),
        ({"a": 1}, "mcpServers.a must be an object"),
        ({"a": {}}, "must have a 'command'"),
        ({"a": {"command": 1}}, "must have a 'command'"),
        ({"a": {"command": "x", "args": [1]}}, "mcpServers.a.args"),
        ({"a": {"command": "x", "env": {"A": 1}}}, "mcpServers.a.env"),
        ({"a": {"command": "x", "cwd": 1}}, "mcpServers.a.cwd"),
        ({"a": {"command": "x", "shell": True}}, "mcpServers.a.shell is not known"),
        ({"a": {"command": "x", "timeout_ms": 0}}, "mcpServers.a.timeout_ms"),
        ({"a": {"type": "sse", "url": "http://x"}}, "mcpServers.a.type"),
        ({"a": {"url": "file:///etc/passwd"}}, "mcpServers.a.url"),
        ({"a": {"url": "http://x", "headers": []}}, "mcpServers.a.headers"),
        ({str(i): {"command": "x"} for i in range(33)}, "more than 32"),
    ],
)
def test_configurations_that_are_wrong(given: Any, reason: str) -> None:
    text = given if isinstance(given, str) else json.dumps({"mcpServers": given})
    with pytest.raises(ValueError, match=reason):
        mcp_servers(text)


def test_configurations() -> None:
    one, two = mcp_servers(
        json.dumps(
            {
                "mcpServers": {
                    "one": {"command": "x", "args": ["y"], "env": {"A": "b"}, "cwd": "/", "timeout_ms": 1500},
                    "two": {"type": "http", "url": "https://host/mcp", "headers": {"Authorization": "Bearer x"}},
                    "off": {"command": "x", "disabled": True},
                }
            }
        )
    )
    assert (one.command, one.env, one.cwd, one.seconds) == (("x", "y"), {"A": "b"}, "/", 1.5)
    assert (two.url, two.headers) == ("https://host/mcp", {"Authorization": "Bearer x"})
