"""Rows of JSONL training files: `text`, `prompt` with `completion`, or chat `messages`, checked
line by line."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from logitless.training.errors import TrainingError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_LINE = 16 << 20  # bytes


@dataclass(frozen=True)
class DatasetRow:
    """One row: texts with a flag each for those that are learned, or a conversation for the chat
    template."""

    line: int
    parts: tuple[tuple[str, bool], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def read_rows(file: BinaryIO, name: str) -> Iterator[DatasetRow]:
    """Rows of a JSONL file, read line by line. TrainingError names the file, the line and the
    field at fault."""
    number = n_rows = 0
    while line := file.readline(MAX_LINE + len(BOM_UTF8) + 2):  # more than the longest line has with what is around it
        number += 1
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if len(line.removesuffix(b"\n")) > MAX_LINE:
            raise TrainingError(f"{name}: line {number}: is longer than {MAX_LINE} bytes")
        if line.strip():
            n_rows += 1
            yield _row(line, number, f"{name}: line {number}")
    if not n_rows:
        raise TrainingError(f"{name}: has no rows")


def _row(line: bytes, number: int, where: str) -> DatasetRow:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
        json.dumps(row, ensure_ascii=False).encode("utf-8")  # a lone surrogate has no UTF-8
    except UnicodeDecodeError as error:
        raise TrainingError(f"{where}: byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise TrainingError(f"{where}: a surrogate escape without its partner") from None
    except _KeyTwice as error:
        raise TrainingError(f"{where}: key {str(error)[:100]!r} stands twice") from None
    except RecursionError:
        raise TrainingError(f"{where}: is nested too deeply") from None
    except json.JSONDecodeError as error:  # its own line is always 1, or 2 for the line's end
        raise TrainingError(f"{where}: is not valid JSON: {error.msg}: column {error.pos + 1}") from None
    except ValueError as error:
        raise TrainingError(f"{where}: is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise TrainingError(f"{where}: must be a JSON object")
    return parse_row(row, number, where)


def parse_row(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    """A row from a JSON object; TrainingError begins with `where`."""
    kinds = [key for key in ("messages", "prompt", "text") if row.get(key) is not None]
    if len(kinds) != 1:
        raise TrainingError(f"{where}: must have one of 'text', 'prompt' with 'completion', and 'messages'")
    if kinds == ["messages"]:
        return DatasetRow(number, (), _messages(row["messages"], where), _tools(row.get("tools"), where))
    if kinds == ["prompt"]:
        parts = ((_text(row, "prompt", where), False), (_text(row, "completion", where), True))
        if not parts[1][0]:
            raise TrainingError(f"{where}: field 'completion' is empty")
        return DatasetRow(number, parts)
    text = _text(row, "text", where)
    if not text:
        raise TrainingError(f"{where}: field 'text' is empty")
    return DatasetRow(number, ((text, True),))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _KeyTwice(ValueError):
    """Duplicate key of a JSON object."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwice(next(name for name in names if names.count(name) > 1))
    return row


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise TrainingError(f"{where}: field '{key}' must be a string")
    return value


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or any(not isinstance(tool, dict) for tool in value):
        raise TrainingError(f"{where}: field 'tools' must be an array of objects")
    return tuple(value)


def _messages(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise TrainingError(f"{where}: field 'messages' must be a non-empty array")
    for i, message in enumerate(value):
        at = f"{where}: messages[{i}]"
        if not isinstance(message, dict):
            raise TrainingError(f"{at} must be an object")
        if message.get("role") not in ROLES:
            raise TrainingError(f"{at}: field 'role' must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise TrainingError(f"{at}: field 'content' must be a string")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if any(not isinstance(text, str) for text in texts):
                raise TrainingError(f"{at}: field 'content' may have parts of type text only")
        if message.get("weight") not in (None, 0, 1):
            raise TrainingError(f"{at}: field 'weight' must be 0 or 1")
    if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in value):
        raise TrainingError(f"{where}: no message of the assistant is there to learn from")
    return tuple(value)
