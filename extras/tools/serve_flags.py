"""Flags of tools that the server runs, by llama-server's names."""

from __future__ import annotations

from logitless.cli.flags.flags import Flag, Group
from logitless.engine.loading.values import file_name, folder_name, text, words

SERVE_FLAGS = (
    Group("Tools that the server runs (off by default; see docs/tools.md before)", (
        Flag("--tools", "built-in tools, separated by commas, or all: read_file, file_glob_search, grep_search, "
             "exec_shell_command, write_file, edit_file, get_info", words, None, "NAMES", env="LLAMA_ARG_TOOLS",
             many=True),
        Flag("--tools-folder", "the folder that they see; by default the one that the server is started in",
             folder_name, "", "FOLDER", env="LOGITLESS_TOOLS_FOLDER"),
        Flag("--tools-runtime", "container of exec_shell_command: docker:IMAGE or podman:IMAGE (a new one for each "
             "command), docker-container:ID or podman-container:ID; of several, separated by commas, a request may "
             "choose", words, None, "RUNTIME", env="LLAMA_ARG_TOOLS_RUNTIME", many=True),
        Flag("--mcp-servers-config",
             'file of MCP servers: {"mcpServers": {NAME: {"command", "args", "env", "cwd"} or {"url", "headers"}}}',
             file_name, None, "FILE", env="LLAMA_ARG_MCP_SERVERS_CONFIG"),
        Flag("--ui-mcp-proxy --webui-mcp-proxy", "let pages reach the MCP servers that have an address, and nothing "
             "else, through /cors-proxy", default=False, env="LLAMA_ARG_UI_MCP_PROXY",
             off="--no-ui-mcp-proxy --no-webui-mcp-proxy"),
        Flag("--web-search", "the MCP tool, SERVER_TOOL, that /v1/responses has as web_search; it takes a query", text,
             "", "TOOL", env="LOGITLESS_WEB_SEARCH"),
        Flag("-ag --agent", "the same as --tools all --ui-mcp-proxy", default=False, env="LLAMA_ARG_AGENT",
             off="-no-ag --no-agent", means="--tools all --ui-mcp-proxy"),
        Flag("--mcp-servers-json", "the same as JSON", text, "", "JSON", env="LLAMA_ARG_MCP_SERVERS_JSON"),
    )),
)  # fmt: skip
