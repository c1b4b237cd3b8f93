"""Settings of the server's tools from command-line options, and the refusal of tools for strangers."""

from __future__ import annotations

import ipaddress
import logging
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, UsageError

if TYPE_CHECKING:
    from logitless.extras.tools.config import McpSettings
    from logitless.extras.tools.settings import ToolSettings


log = logging.getLogger("logitless.tools")
_MCP = ("mcp", "mcp_types", "httpx2", "anyio")  # packages; mcp of version 1 has not all of them


def tool_settings(options: SimpleNamespace) -> ToolSettings:
    """The tools of --tools and --mcp-servers-…. CliError: they cannot be had, or strangers could call them."""
    from logitless.extras.tools import config
    from logitless.extras.tools.settings import ToolSettings

    try:
        built_in = config.built_in(options.tools)
    except ValueError as error:
        raise UsageError(f"--tools: {error}") from None
    servers = _servers(options)
    if not built_in:
        for flag in ("tools_folder", "tools_runtime"):
            if getattr(options, flag):
                raise UsageError(f"--{flag.replace('_', '-')} is of --tools, which is not given")
    search: str = options.web_search
    if search and not any(search.startswith(f"{server.name}_") for server in servers):
        raise UsageError(f"--web-search {search}: must be SERVER_TOOL of a server of --mcp-servers-config")
    if options.ui_mcp_proxy and not options.agent and not any(server.url for server in servers):
        log.warning("--ui-mcp-proxy: no server of --mcp-servers-config has a url, so /cors-proxy reaches none")
    if built_in or servers:
        _check_strangers(options)
    return ToolSettings(
        built_in=built_in,
        folder=_folder(options) if built_in else ".",
        runtimes=_runtimes(options, built_in),
        servers=servers,
        proxy=options.ui_mcp_proxy,
        web_search=search,
    )


SERVER_SETTINGS = (("tools", tool_settings),)


def _servers(options: SimpleNamespace) -> tuple[McpSettings, ...]:
    from logitless.extras.tools.config import mcp_servers

    result: dict[str, McpSettings] = {}
    for flag, source in (
        ("--mcp-servers-config", options.mcp_servers_config),
        ("--mcp-servers-json", options.mcp_servers_json),
    ):
        if not source:
            continue
        where = f"{flag} {source}" if flag.endswith("config") else flag
        try:
            listed = mcp_servers(Path(source).read_text("utf-8-sig") if flag.endswith("config") else source)
        except UnicodeDecodeError:
            raise CliError(f"{where}: is not UTF-8") from None
        except OSError as error:
            raise CliError(f"{where}: {error.strerror}") from None
        except ValueError as error:
            raise CliError(f"{where}: {error}") from None
        for server in listed:
            if server.name in result:
                raise CliError(f"{where}: there are two servers {server.name!r}")
            result[server.name] = server
    if result and (missing := [name for name in _MCP if find_spec(name) is None]):
        raise CliError(f"MCP servers need the package {missing[0]}: pip install 'mcp>=2.0' 'httpx2>=2.0'")
    return tuple(result.values())


def _check_strangers(options: SimpleNamespace) -> None:
    """CliError: without a key, other machines or web pages could run tools."""
    if options.api_key or options.api_key_file:
        return
    for host in (name.strip() for name in options.host.split(",")):
        if not _is_here(host):
            raise CliError(f"tools without a key run on this machine's own addresses only, not on {host}: --api-key")
    from logitless.server.origins import lets_any_page_in

    if lets_any_page_in(options.cors_origins):
        raise CliError(f"--cors-origins '{options.cors_origins}' would let every web page run tools: --api-key")
    if "*" in [name.strip() for name in options.allowed_hosts]:
        raise CliError("--allowed-hosts '*' would let every web page run tools: --api-key")


def _is_here(host: str) -> bool:
    if host == "localhost" or host.endswith(".sock"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _folder(options: SimpleNamespace) -> str:
    if options.tools_folder:
        if not Path(options.tools_folder).is_dir():
            raise CliError(f"--tools-folder: {options.tools_folder} is not a folder")
        return str(Path(options.tools_folder).resolve())
    folder = Path.cwd()
    if folder in (Path("/"), Path.home()):
        raise CliError(f"--tools would see all of {folder}: name a folder with --tools-folder")
    return str(folder)


def _runtimes(options: SimpleNamespace, built_in: tuple[str, ...]) -> tuple[str, ...]:
    runtimes = tuple(options.tools_runtime)
    if not runtimes:
        return ()
    from logitless.extras.tools.built_in.shell import Runtime

    if "exec_shell_command" not in built_in:
        raise UsageError("--tools-runtime is of exec_shell_command, which --tools does not name")
    try:
        for runtime in runtimes:
            Runtime.parse(runtime)
    except ValueError as error:
        raise CliError(f"--tools-runtime: {error}") from None
    return runtimes
