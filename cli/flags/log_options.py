"""Flags of the log, by llama-server's names."""

from __future__ import annotations

from logitless.cli.flags.flags import Flag
from logitless.engine.loading.values import choice, file_name, folder_name, whole

VERBOSE = Flag("-v --verbose --log-verbose", "log more detail", env="LLAMA_ARG_LOG_VERBOSE", common=True)
LOG = (
    VERBOSE,
    Flag("--log-file", "append the log to this file, too", file_name, None, "FILE",
         env="LLAMA_ARG_LOG_FILE LLAMA_LOG_FILE", common=True),
    Flag("--log-format", "form of the log: text, or json, a line each", choice("text", "json"), "text", "FORMAT"),
    Flag("--log-jsonl", "log lines of JSON to the standard output", default=False, env="LLAMA_ARG_LOG_JSONL",
         off="--no-log-jsonl"),
    Flag("-lv --verbosity --log-verbosity", "most detailed lines of the log: 0: none, 1: errors, 2: warnings, 3: "
         "information, 4 and more: all (-v)", whole(0), 3, env="LLAMA_ARG_LOG_VERBOSITY LLAMA_LOG_VERBOSITY"),
    Flag("--log-timestamps", "begin lines of the log with the time", default=True,
         env="LLAMA_ARG_LOG_TIMESTAMPS LLAMA_LOG_TIMESTAMPS", off="--no-log-timestamps"),
    Flag("--log-prefix", "say level and source in lines of the log", default=True,
         env="LLAMA_ARG_LOG_PREFIX LLAMA_LOG_PREFIX", off="--no-log-prefix"),
    Flag("--log-colors", "colour the level in lines of the log; auto: on a terminal", choice("on", "off", "auto"),
         "auto", "WHEN", env="LLAMA_ARG_LOG_COLORS LLAMA_LOG_COLORS", optional=("on", "off", "auto")),
    Flag("--log-prompts-dir", "write each request's prompts to a file in this folder, which is made; they are logged "
         "nowhere else", folder_name, "", "FOLDER"),
    Flag("--log-disable", "log nothing"),
)  # fmt: skip
