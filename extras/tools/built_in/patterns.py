"""Patterns of the search tools: globs of paths, and regular expressions in linear time (RE2)."""

from __future__ import annotations

from typing import Any

import re2

from logitless.extras.tools.server_tool import ToolError


def glob(pattern: str) -> Any:
    """The regular expression of a glob pattern, for a whole path: it may begin in any folder, unless it
    begins with `/`."""
    rest, text = pattern, ""
    if pattern.startswith("/"):
        rest = pattern[1:]
    elif not pattern.startswith("**"):
        text = "(?:.*/)?"
    while rest:
        if rest.startswith("**/"):
            text, rest = text + "(?:.*/)?", rest[3:]
        elif rest.startswith("**"):
            text, rest = text + ".*", rest[2:]
        elif rest[0] == "[" and "]" in rest[2:]:
            end = rest.index("]", 2)
            inner = rest[1:end].replace("\\", "\\\\").replace("[", "\\[")
            inner = "^" + inner[1:] if inner[0] == "!" else "\\" + inner if inner[0] == "^" else inner
            text, rest = f"{text}[{inner}]", rest[end + 1 :]
        else:
            known = {"*": "[^/]*", "?": "[^/]"}.get(rest[0])
            text, rest = text + (known or re2.escape(rest[0])), rest[1:]
    return compiled(f"(?s){text}")


def compiled(pattern: str) -> Any:
    """The regular expression, in linear time. ToolError: it is none."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        raise ToolError(f"this is no pattern: {reason.decode() if isinstance(reason, bytes) else reason}") from None


def escaped(text: str) -> str:
    """The regular expression of a text."""
    return str(re2.escape(text))
