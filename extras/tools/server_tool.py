"""Tool: a function of the server that a model may call, its declaration, and the form of its result."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_TEXT = 16 << 10  # characters of a result, as llama-server's
CUT = "\n[output truncated]"

Answer = dict[str, Any]
"""A result: {plain_text_response} or other members; `error` where the call failed."""


Say = Callable[[str], None]
"""Receiver of a running call's output, piece by piece."""


class ToolError(Exception):
    """A call that failed; the text is one line, for the model that called."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:MAX_TEXT])


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool by its declaration. `call` gets the arguments and the client's name, and raises ToolError."""

    name: str
    title: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema
    call: Callable[[Mapping[str, Any], str], Awaitable[Answer]]
    kind: Literal["server", "mcp"] = "server"
    writes: bool = False  # it may change something, or do anything at all
    server: str = ""  # the MCP server that has it
    bare: str = ""  # its name there
    hints: Mapping[str, Any] | None = None  # an MCP tool's annotations
    live: Callable[[Mapping[str, Any], Say], Awaitable[Answer]] | None = None  # the same, result_text as it runs, too


def plain(text: str) -> Answer:
    """The result of a tool that answers with a text."""
    return {"plain_text_response": text}


def cut(text: str, most: int = MAX_TEXT) -> str:
    """The text, bounded."""
    return text if len(text) <= most else text[:most] + CUT


def result_text(answer: Answer) -> str:
    """The text of a result, as a model reads it."""
    text = answer.get("plain_text_response")
    return text if isinstance(text, str) else json.dumps(answer, ensure_ascii=False)
