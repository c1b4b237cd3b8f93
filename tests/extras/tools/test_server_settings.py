"""Settings of the server's tools from the command line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import SERVE
from logitless.extras.tools.config import BUILT_IN
from logitless.extras.tools.server_settings import tool_settings


def options(*words: str) -> SimpleNamespace:
    return parse([flag for group in SERVE for flag in group.flags], words, {})


def test_an_agent_has_all_tools_and_the_proxy() -> None:
    settings = tool_settings(options("--agent", "--tools-folder", "/tmp"))
    assert (settings.built_in, settings.proxy) == (BUILT_IN, True)
    fewer = tool_settings(options("-ag", "--tools", "get_info", "--no-ui-mcp-proxy", "--tools-folder", "/tmp"))
    assert (fewer.built_in, fewer.proxy) == (("get_info",), False)
    assert not tool_settings(options("-no-ag"))


def test_a_proxy_without_servers_starts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert tool_settings(options("--ui-mcp-proxy")).proxy
    assert "no server of --mcp-servers-config has a url" in caplog.text
