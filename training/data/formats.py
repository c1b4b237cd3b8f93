"""Row formats, detected by their fields: OpenAI's, trl's, Alpaca's, ShareGPT's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from logitless.training.data.dataset_rows import MEDIUM, Answer, DatasetRow, Messages, RowMedium
from logitless.training.errors import TrainingError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_IMAGES = ("image_url", "input_image", "file", "image")  # types of parts
_SOUNDS = ("input_audio", "audio_url")
_SPEAKERS = {  # ShareGPT's `from` → a role
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_FIELDS = (
    "'text', 'prompt' with 'completion', 'messages', 'conversations' (ShareGPT), 'instruction' with 'output' "
    "(Alpaca), 'prompt' with 'chosen' and 'rejected', 'input' with 'preferred_output' and 'non_preferred_output'"
)
# prompt of Alpaca's authors, for models without a chat template
_ALPACA = (
    "Below is an instruction that describes a task{input}. Write a response that appropriately completes the request."
)


def parse_row(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    """A row from a JSON object; TrainingError begins with `where`."""
    given = {key for key, value in row.items() if value is not None}
    if given & {"preferred_output", "non_preferred_output"}:
        return _openai_pair(row, number, where)
    if given & {"chosen", "rejected"}:
        return _pair(row, number, where)
    if {"instruction", "output"} <= given:
        return _alpaca(row, number, where)
    if isinstance(row.get("messages"), list) and given & {"messages"} and _awaits(row["messages"]):
        given = {"messages"}  # other fields are the grader's
    kinds = [key for key in ("messages", "conversations", "instruction", "prompt", "text") if key in given]
    if len(kinds) != 1:
        raise TrainingError(f"{where}: must have one of {_FIELDS}")
    match kinds[0]:
        case "messages":
            messages = _messages(row["messages"], where, "messages")
            if messages[-1]["role"] == "assistant":
                messages = _messages(row["messages"], where, "messages", learns=True)
            tools = _tools(row.get("tools"), where)
            return DatasetRow(number, (), messages, tools, format="a conversation ('messages')", item=row)
        case "conversations":
            return _sharegpt(row, number, where)
        case "instruction":
            raise TrainingError(f"{where}: field 'output' must be a string")
        case "prompt" if not row.keys() & {"completion", "label"}:
            return _prompt(row, number, where)
        case "prompt":
            return _judged(row, number, where) if "label" in given else _completion(row, number, where)
        case _:
            text = _text(row, "text", where)
            if not text:
                raise TrainingError(f"{where}: field 'text' is empty")
            return DatasetRow(number, ((text, True),), format="a text ('text')")


def _awaits(messages: list[Any]) -> bool:
    """True if a conversation ends with somebody else's message than the assistant's."""
    return bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") != "assistant"


def of_one_format(rows: Iterable[DatasetRow], name: str) -> Iterator[DatasetRow]:
    """The rows. TrainingError: one has another format than the first."""
    first: DatasetRow | None = None
    for row in rows:
        first = first or row
        if row.format != first.format:
            raise TrainingError(
                f"{name}: line {row.line}: is {row.format}, and line {first.line} is {first.format}: "
                "all rows must have one format"
            )
        yield row


def _prompt(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    format = "a prompt ('prompt')"
    if isinstance(row["prompt"], list):
        messages = _given(_messages(row["prompt"], where, "prompt"))
        return DatasetRow(number, (), messages, _tools(row.get("tools"), where), format=format, item=row)
    return DatasetRow(number, ((_text(row, "prompt", where), False),), format=format, item=row)


def _completion(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    format = "a prompt with its completion ('prompt', 'completion')"
    if isinstance(row["prompt"], list):
        prompt = _messages(row["prompt"], where, "prompt")
        answer = _messages(row.get("completion"), where, "completion", learns=True)
        return DatasetRow(number, (), _given(prompt) + answer, _tools(row.get("tools"), where), format=format)
    parts = ((_text(row, "prompt", where), False), (_text(row, "completion", where), True))
    if not parts[1][0]:
        raise TrainingError(f"{where}: field 'completion' is empty")
    return DatasetRow(number, parts, format=format)


def _alpaca(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    instruction, output = _text(row, "instruction", where), _text(row, "output", where)
    more = _text(row, "input", where) if row.get("input") is not None else ""
    for name, text in (("instruction", instruction), ("output", output)):
        if not text:
            raise TrainingError(f"{where}: field '{name}' is empty")
    asked = {"role": "user", "content": f"{instruction}\n\n{more}" if more else instruction}
    head = _ALPACA.format(input=", paired with an input that provides further context" if more else "")
    paired = f"\n\n### Input:\n{more}" if more else ""
    plain = ((f"{head}\n\n### Instruction:\n{instruction}{paired}\n\n### Response:\n", False), (output, True))
    messages = (asked, {"role": "assistant", "content": output})
    return DatasetRow(number, plain, messages, format="an instruction with its output (Alpaca)")


def _sharegpt(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise TrainingError(f"{where}: field 'conversations' must be a non-empty array")
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": _text(row, "system", where)})
    for i, turn in enumerate(turns):
        at = f"{where}: conversations[{i}]"
        if not isinstance(turn, dict):
            raise TrainingError(f"{at} must be an object")
        if turn.get("from") not in _SPEAKERS:
            raise TrainingError(f"{at}: field 'from' must be one of {', '.join(_SPEAKERS)}")
        messages.append({"role": _SPEAKERS[turn["from"]], "content": _text(turn, "value", at)})
    if not any(m["role"] == "assistant" for m in messages):
        raise TrainingError(f"{where}: no message of the assistant is there to learn from")
    return DatasetRow(number, (), tuple(messages), _tools(row.get("tools"), where), format="a conversation (ShareGPT)")


# -- judged answers


def _openai_pair(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    asked = row.get("input")
    if not isinstance(asked, dict):
        raise TrainingError(f"{where}: field 'input' must be an object")
    prompt = _messages(asked.get("messages"), where, "input.messages")
    answers = [
        Answer("", _messages(row.get(name), where, name, learns=True), value)
        for name, value in (("preferred_output", 1.0), ("non_preferred_output", -1.0))
    ]
    format = "a pair of answers ('preferred_output', 'non_preferred_output')"
    return DatasetRow(number, (), prompt, _tools(asked.get("tools"), where), tuple(answers), format)


def _pair(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    format = "a pair of answers ('chosen', 'rejected')"
    prompt = row.get("prompt")
    if isinstance(row.get("chosen"), list):
        chosen = _messages(row["chosen"], where, "chosen", learns=True)
        rejected = _messages(row.get("rejected"), where, "rejected", learns=True)
        if isinstance(prompt, list):
            asked = _messages(prompt, where, "prompt")
        else:  # the prompt is the common beginning of the two conversations
            same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
            n = min(sum(1 for _ in same), len(chosen) - 1, len(rejected) - 1)
            asked, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
            if not asked:
                raise TrainingError(
                    f"{where}: field 'prompt' is missing, and 'chosen' and 'rejected' begin differently"
                )
        answers = (Answer("", chosen, 1.0), Answer("", rejected, -1.0))
        return DatasetRow(number, (), asked, _tools(row.get("tools"), where), answers, format)
    good, bad = (_text(row, name, where) for name in ("chosen", "rejected"))
    if prompt is None:
        same_text = takewhile(lambda pair: pair[0] == pair[1], zip(good, bad, strict=False))
        n = sum(1 for _ in same_text)
        n -= good[n - 1 : n] == " "  # the answers begin with it
        prompt, good, bad = good[:n], good[n:], bad[n:]
    else:
        prompt = _text(row, "prompt", where)
    for name, text in (("chosen", good), ("rejected", bad)):
        if not text:
            raise TrainingError(f"{where}: field '{name}' is empty")
    return DatasetRow(number, ((prompt, False),), answers=(Answer(good, (), 1.0), Answer(bad, (), -1.0)), format=format)


def _judged(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    format = "a judged answer ('prompt', 'completion', 'label')"
    label = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}.get(
        row["label"].strip().lower() if isinstance(row["label"], str) else _hashable(row["label"])
    )
    if label is None:
        raise TrainingError(f"{where}: field 'label' must be true or false")
    value = 1.0 if label else -1.0
    if isinstance(row["prompt"], list):
        answer = _messages(row.get("completion"), where, "completion", learns=True)
        prompt = _messages(row["prompt"], where, "prompt")
        return DatasetRow(number, (), prompt, _tools(row.get("tools"), where), (Answer("", answer, value),), format)
    text = _text(row, "completion", where)
    if not text:
        raise TrainingError(f"{where}: field 'completion' is empty")
    return DatasetRow(
        number, ((_text(row, "prompt", where), False),), answers=(Answer(text, (), value),), format=format
    )


def _hashable(value: Any) -> Any:
    return value if isinstance(value, bool | int) else None


# -- fields


def _given(messages: Messages) -> Messages:
    """The same messages, none of which is learned."""
    return tuple({**m, "weight": 0} if m["role"] == "assistant" else m for m in messages)


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


def _messages(value: Any, where: str, field: str, *, learns: bool = False) -> Messages:
    """Messages of a field; `learns`: one of the assistant must be among them."""
    if not isinstance(value, list) or not value:
        raise TrainingError(f"{where}: field '{field}' must be a non-empty array")
    messages = []
    for i, message in enumerate(value):
        at = f"{where}: {field}[{i}]"
        if not isinstance(message, dict):
            raise TrainingError(f"{at} must be an object")
        if message.get("role") not in ROLES:
            raise TrainingError(f"{at}: field 'role' must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise TrainingError(f"{at}: field 'content' must be a string")
        if isinstance(content, list):
            parts = [_part(part, f"{at}.content[{k}]", message["role"]) for k, part in enumerate(content)]
            message = {**message, "content": parts}
        messages.append(message)
        if message.get("weight") not in (None, 0, 1):
            raise TrainingError(f"{at}: field 'weight' must be 0 or 1")
    if learns and not any(m["role"] == "assistant" and m.get("weight") != 0 for m in value):
        told = "" if field == "messages" else f"field '{field}': "
        raise TrainingError(f"{where}: {told}no message of the assistant is there to learn from")
    return tuple(messages)


def _part(part: Any, at: str, role: str) -> dict[str, Any]:
    """A part of a message's content: a text as it is, or an image or a sound as a RowMedium."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in (*_IMAGES, *_SOUNDS):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise TrainingError(f"{at}: must be a part of type text, image_url or input_audio")
        return part
    if role == "assistant":
        medium = "a sound" if kind in _SOUNDS else "an image"
        raise TrainingError(f"{at}: is {medium} of the assistant, which learns to write text")
    field, value = kind, part.get(kind)
    usual = {"input_audio": "data"}.get(kind, "url")
    if isinstance(value, dict):
        keys = ("url", "file_id", "file_data", "data")
        key = next((key for key in keys if value.get(key) is not None), usual)
        field, value = f"{kind}.{key}", value.get(key)
    elif value is None:
        field = kind if kind in _SOUNDS else "image_url"
        if part.get("file_id") is not None:
            field = "file_id"
        value = part.get(field)
    if not isinstance(value, str) or not value:
        raise TrainingError(f"{at}: field '{field}' must be a non-empty string")
    if field == "input_audio.data" and not value.startswith("data:"):
        value = f"data:;base64,{value}"
    return {"type": MEDIUM, MEDIUM: RowMedium(value, field.endswith("file_id"), kind in _SOUNDS, f"{at}.{field}")}
