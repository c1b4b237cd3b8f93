"""Tools that a provider defines: those that its service runs, and Anthropic's that the client runs.

Nobody here runs the first kind (web_search, code_interpreter, image_generation, …): they are
skipped. The second kind (bash, text_editor, memory, computer) becomes functions with the parameters
that Anthropic publishes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

OWN = ("function", "custom")
_MCP = "mcp"
_DEFINITIONS = ("function", "custom", "parameters", "input_schema")  # members that define a function
_VERSION = re.compile(r"_(\d{8})$")
_FIRST_OF_CLAUDE_4 = "20250429"  # the text editor without undo_edit, whose text to insert has a name of its own

Schema = dict[str, Any]


def is_hosted(tool: object) -> bool:
    """True for an entry of `tools` that names a tool by its type and defines no function. Of the type mcp,
    which names a server to call, none is skipped: the configured servers have tools."""
    if not isinstance(tool, Mapping):
        return False
    kind = tool.get("type")
    return isinstance(kind, str) and kind not in ("", _MCP, *OWN) and not any(name in tool for name in _DEFINITIONS)


def client_tool(tool: Mapping[str, Any]) -> Schema | None:
    """The name, description and parameters of a tool of Anthropic's that the client runs; None: it is another."""
    kind = tool["type"]
    version = _VERSION.search(kind)
    make = _CLIENT_TOOLS.get(kind[: version.start()] if version else kind)
    if make is None:
        return None
    description, properties, required = make(version[1] if version else "99999999", tool)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": tool.get("name"), "description": description, "parameters": parameters}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _numbers(description: str, n: int = 2) -> Schema:
    return {"type": "array", "items": {"type": "integer"}, "minItems": n, "maxItems": n, "description": description}


def _choice(description: str, *values: str) -> Schema:
    return {"type": "string", "enum": list(values), "description": description}


def _bash(_version: str, _tool: Mapping[str, Any]) -> tuple[str, Schema, list[str]]:
    properties = {
        "command": _text("the command to run"),
        "restart": {"type": "boolean", "description": "true: start the shell again, without a command"},
    }
    return "Run commands in a shell that stays open between calls.", properties, []


def _files(places: str) -> Schema:
    """Parameters of the commands that the text editor and the memory share."""
    return {
        "path": _text(f"the path of {places}"),
        "view_range": _numbers("of view: first and last line, counted from 1; -1: the end"),
        "file_text": _text("of create: the content of the file"),
        "old_str": _text("of str_replace: the text to replace, which stands in the file once"),
        "new_str": _text("of str_replace: the text in its place"),
        "insert_line": {"type": "integer", "description": "of insert: the line to insert after; 0: the beginning"},
    }


def _text_editor(version: str, _tool: Mapping[str, Any]) -> tuple[str, Schema, list[str]]:
    commands, files = ["view", "create", "str_replace", "insert"], _files("the file or folder")
    if version < _FIRST_OF_CLAUDE_4:
        commands.append("undo_edit")
        files["new_str"] = _text("of str_replace: the text in its place; of insert: the text to insert")
    else:
        files["insert_text"] = _text("of insert: the text to insert")
    properties = {"command": _choice("what to do", *commands)} | files
    return "View, create and edit text files.", properties, ["command", "path"]


def _memory(_version: str, _tool: Mapping[str, Any]) -> tuple[str, Schema, list[str]]:
    commands = ("view", "create", "str_replace", "insert", "delete", "rename")
    properties = {"command": _choice("what to do", *commands)} | _files("the file or folder below /memories")
    properties |= {
        "insert_text": _text("of insert: the text to insert"),
        "old_path": _text("of rename: the path as it is"),
        "new_path": _text("of rename: the path as it is to be"),
    }
    return (
        "Read and write files below /memories, which stay from one conversation to the next.",
        properties,
        ["command"],
    )


_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_LATER_ACTIONS = ("triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait")  # since 20250124


def _computer(version: str, tool: Mapping[str, Any]) -> tuple[str, Schema, list[str]]:
    actions = [*_ACTIONS]
    properties = {
        "coordinate": _numbers("x and y in pixels from the top left: where the mouse goes"),
        "text": _text("of type: the text; of key and hold_key: the key, such as ctrl+s; of clicks: a key to hold"),
    }
    if version > "20241022":
        actions += _LATER_ACTIONS
        properties |= {
            "start_coordinate": _numbers("of left_click_drag: where it begins"),
            "scroll_direction": _choice("of scroll", "up", "down", "left", "right"),
            "scroll_amount": {"type": "integer", "minimum": 0, "description": "of scroll: steps of the wheel"},
            "duration": {"type": "number", "minimum": 0, "description": "of hold_key and wait: seconds"},
        }
    if tool.get("enable_zoom") is True:
        actions.append("zoom")
        properties["region"] = _numbers("of zoom: left, top, right and bottom", 4)
    size = " by ".join(str(tool[name]) for name in ("display_width_px", "display_height_px") if name in tool)
    screen = f" of {size} pixels" if size else ""
    description = f"Use the mouse and the keyboard of a computer, and see its screen{screen}."
    return description, {"action": _choice("what to do", *actions)} | properties, ["action"]


_CLIENT_TOOLS: dict[str, Callable[[str, Mapping[str, Any]], tuple[str, Schema, list[str]]]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}
