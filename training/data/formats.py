"""Row formats, detected by their fields: OpenAI's, trl's, Alpaca's, ShareGPT's, LLaMA-Factory's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from logitless.training.data.dataset_rows import MEDIUM, DatasetRow, Messages, RowAnswer, RowMedium
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
    "function_call": "assistant",  # LLaMA-Factory's: the value is the JSON of calls
}
_OF_TEMPLATE = ("tools", "functions", "system", "chat_template_kwargs", "parallel_tool_calls")
_RESERVED = ("messages", "tools", "add_generation_prompt", "tools_required", "parallel_tool_calls")
# fields of a row that are read, by the field that tells its format
_READ = {
    "preferred_output": ("input", "preferred_output", "non_preferred_output"),
    "chosen": ("prompt", "chosen", "rejected", "instruction", "input", "history", "conversations", *_OF_TEMPLATE),
    "output": ("instruction", "input", "output", "history", "text", *_OF_TEMPLATE),  # "text": all of it again
    "messages": ("messages", *_OF_TEMPLATE),
    "conversations": ("conversations", *_OF_TEMPLATE),
    "prompt": ("prompt", "completion", "label", *_OF_TEMPLATE),
    "text": ("text",),
}
_READ_OF_MESSAGE = (
    *("role", "content", "weight", "name", "from", "value"),
    *("tool_calls", "tool_call_id", "function_call", "reasoning_content"),
)
# names and numbers of rows, which no text is made of
_LABELS = ("id", "idx", "index", "uuid", "row_id", "url", "source", "split", "license", "metadata")
_FIELDS = (
    "'text', 'prompt' with 'completion', 'messages', 'conversations' (ShareGPT), 'instruction' with 'output' "
    "(Alpaca), 'prompt' with 'chosen' and 'rejected', 'input' with 'preferred_output' and 'non_preferred_output'"
)
# prompt of Alpaca's authors, for models without a chat template
_ALPACA = (
    "Below is an instruction that describes a task{input}. Write a response that appropriately completes the request."
)


def parse_row(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    """A row from a JSON object, with the names of the fields that nothing is made of; TrainingError
    begins with `where`."""
    kind = _kind(row, where)
    record = _parsed(row, kind, number, where)
    if record.is_prompt:
        return record  # other fields are the grader's
    read = {*_READ[kind], *_LABELS}
    if not record.messages:
        read -= {*_OF_TEMPLATE}
    elif isinstance(row.get("chosen"), list):
        read.add("messages")  # UltraFeedback's: the conversation again
    unused = [name for name, value in row.items() if value is not None and name not in read]
    if kind == "preferred_output":
        unused += [f"input.{name}" for name in row["input"] if name not in ("messages", *_OF_TEMPLATE)]
    answers = (message for answer in record.answers for message in answer.messages)
    names = {key for m in (*record.messages, *answers) for key, value in m.items() if value is not None}
    unused += [f"messages[].{key}" for key in sorted(names - {*_READ_OF_MESSAGE, *_LABELS})]
    return replace(record, unused=tuple(unused)) if unused else record


def _kind(row: Mapping[str, Any], where: str) -> str:
    """The field that tells a row's format, one of _READ."""
    fields = {key for key, value in row.items() if value is not None}
    if fields & {"preferred_output", "non_preferred_output"}:
        return "preferred_output"
    if fields & {"chosen", "rejected"}:
        return "chosen"
    if {"instruction", "output"} <= fields:
        return "output"
    if "messages" in fields and isinstance(row["messages"], list) and _awaits(row["messages"]):
        return "messages"  # other fields are the grader's
    kinds = [key for key in ("messages", "conversations", "instruction", "prompt", "text") if key in fields]
    if len(kinds) != 1:
        raise TrainingError(f"{where}: must have one of {_FIELDS}")
    if kinds[0] == "instruction":
        raise TrainingError(f"{where}: field 'output' must be a string")
    return kinds[0]


def _parsed(row: Mapping[str, Any], kind: str, number: int, where: str) -> DatasetRow:
    match kind:
        case "preferred_output":
            return _openai_pair(row, number, where)
        case "chosen":
            return _pair(row, number, where)
        case "output":
            return _alpaca(row, number, where)
        case "messages":
            messages = _messages(row["messages"], where, "messages")
            if messages[-1]["role"] == "assistant":
                messages = _messages(row["messages"], where, "messages", learns=True)
            return _conversation(row, number, where, messages, "a conversation ('messages')", item=row)
        case "conversations":
            return _sharegpt(row, number, where)
        case "prompt" if not row.keys() & {"completion", "label"}:
            return _prompt(row, number, where)
        case "prompt":
            return _judged(row, number, where) if row.get("label") is not None else _completion(row, number, where)
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
        messages = _as_prompt(_messages(row["prompt"], where, "prompt"))
        return _conversation(row, number, where, messages, format, item=row)
    return DatasetRow(number, ((_text(row, "prompt", where), False),), format=format, item=row)


def _completion(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    format = "a prompt with its completion ('prompt', 'completion')"
    if isinstance(row["prompt"], list):
        prompt = _messages(row["prompt"], where, "prompt")
        answer = _messages(row.get("completion"), where, "completion", learns=True)
        return _conversation(row, number, where, _as_prompt(prompt) + answer, format)
    parts = ((_text(row, "prompt", where), False), (_text(row, "completion", where), True))
    if not parts[1][0]:
        raise TrainingError(f"{where}: field 'completion' is empty")
    return DatasetRow(number, parts, format=format)


def _alpaca(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    format = "an instruction with its output (Alpaca)"
    messages, plain = _instruction(row, where)
    output = _filled(row, "output", where)
    answered = (*messages, {"role": "assistant", "content": output})
    return _conversation(row, number, where, answered, format, parts=(*plain, (output, True)))


def _instruction(row: Mapping[str, Any], where: str) -> tuple[Messages, tuple[tuple[str, bool], ...]]:
    """(the turns of `history` and the instruction, the same as text in parts for models without a
    chat template). As in LLaMA-Factory the answers of `history` are learned, too."""
    turns = row.get("history")
    turns = [] if turns is None else turns
    if not isinstance(turns, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) and text for text in turn)
        for turn in turns
    ):
        raise TrainingError(f"{where}: field 'history' must be an array of pairs of an instruction and its answer")
    instruction = _filled(row, "instruction", where)
    more = _text(row, "input", where) if row.get("input") is not None else ""
    head = _ALPACA.format(input=", paired with an input that provides further context" if more else "")
    if row.get("system") is not None:
        head = _text(row, "system", where) or head
    messages: list[dict[str, Any]] = []
    parts: list[tuple[str, bool]] = []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        parts += [(f"{head}\n\n### Instruction:\n{question}\n\n### Response:\n", False), (answer, True)]
        head = ""
    paired = f"\n\n### Input:\n{more}" if more else ""
    messages.append({"role": "user", "content": f"{instruction}\n\n{more}" if more else instruction})
    parts.append((f"{head}\n\n### Instruction:\n{instruction}{paired}\n\n### Response:\n", False))
    return tuple(messages), tuple(parts)


def _sharegpt(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    messages = _turns(row["conversations"], where)
    if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in messages):
        raise TrainingError(f"{where}: no message of the assistant is there to learn from")
    return _conversation(row, number, where, messages, "a conversation (ShareGPT)")


def _turns(turns: Any, where: str) -> Messages:
    """The messages of `conversations`, whose turns have `from` and `value`, or `role` and `content`."""
    if not isinstance(turns, list) or not turns:
        raise TrainingError(f"{where}: field 'conversations' must be a non-empty array")
    return _messages(
        [_turn(turn, f"{where}: conversations[{i}]") for i, turn in enumerate(turns)], where, "conversations"
    )


def _turn(turn: Any, at: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise TrainingError(f"{at} must be an object")
    name, of_text = ("role", "content") if "from" not in turn and "role" in turn else ("from", "value")
    speaker = turn.get(name)
    if name == "from" and speaker not in _SPEAKERS:
        raise TrainingError(f"{at}: field 'from' must be one of {', '.join(_SPEAKERS)}")
    rest = {key: value for key, value in turn.items() if key not in (name, of_text)}
    role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if name == "role":
        return {**rest, "role": role, "content": turn.get("content")}
    text = _text(turn, "value", at)
    if speaker != "function_call":
        return {**rest, "role": role, "content": text}
    calls = _json_of(text, f"{at}: field 'value'")
    calls = calls if isinstance(calls, list) else [calls]
    return {**rest, "role": role, "content": "", "tool_calls": [_call(call, f"{at}: field 'value'") for call in calls]}


# -- judged answers


def _openai_pair(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    question = row.get("input")
    if not isinstance(question, dict):
        raise TrainingError(f"{where}: field 'input' must be an object")
    prompt = _messages(question.get("messages"), where, "input.messages")
    answers = [
        RowAnswer("", _messages(row.get(name), where, name, learns=True), value)
        for name, value in (("preferred_output", 1.0), ("non_preferred_output", -1.0))
    ]
    format = "a pair of answers ('preferred_output', 'non_preferred_output')"
    record = _conversation(question, number, where, prompt, format)
    return replace(record, answers=tuple(answers))


def _pair(row: Mapping[str, Any], number: int, where: str) -> DatasetRow:
    format = "a pair of answers ('chosen', 'rejected')"
    prompt = row.get("prompt")
    if row.get("instruction") is not None or row.get("conversations") is not None:
        return _factory_pair(row, number, where, format)
    if isinstance(row.get("chosen"), list):
        chosen = _messages(row["chosen"], where, "chosen", learns=True)
        rejected = _messages(row.get("rejected"), where, "rejected", learns=True)
        if isinstance(prompt, list):
            question = _messages(prompt, where, "prompt")
        else:  # the prompt is the common beginning of the two conversations
            same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
            n = min(sum(1 for _ in same), len(chosen) - 1, len(rejected) - 1)
            question, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
            if not question:
                raise TrainingError(
                    f"{where}: field 'prompt' is missing, and 'chosen' and 'rejected' begin differently"
                )
        answers = (RowAnswer("", chosen, 1.0), RowAnswer("", rejected, -1.0))
        return replace(_conversation(row, number, where, question, format), answers=answers)
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
    return DatasetRow(
        number, ((prompt, False),), answers=(RowAnswer(good, (), 1.0), RowAnswer(bad, (), -1.0)), format=format
    )


def _factory_pair(row: Mapping[str, Any], number: int, where: str, format: str) -> DatasetRow:
    """LLaMA-Factory's pairs: the prompt is an instruction or a conversation, an answer a text or a turn."""
    plain: tuple[tuple[str, bool], ...] = ()
    if row.get("instruction") is not None:
        messages, plain = _instruction(row, where)
        plain = tuple((text, False) for text, _ in plain)
    else:
        messages = _turns(row["conversations"], where)
    answers = []
    for name, value in (("chosen", 1.0), ("rejected", -1.0)):
        fields = row.get(name)
        turn = _turn(fields, f"{where}: field '{name}'") if isinstance(fields, dict) else None
        if turn is None:
            turn = {"role": "assistant", "content": _filled(row, name, where)}
        (answer,) = _messages([turn], where, name, learns=True)
        text = answer["content"] if isinstance(answer["content"], str) else ""
        answers.append(RowAnswer(text if plain else "", () if plain else (answer,), value))
    return replace(_conversation(row, number, where, messages, format, parts=plain), answers=tuple(answers))


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
        record = _conversation(row, number, where, prompt, format)
        return replace(record, answers=(RowAnswer("", answer, value),))
    text = _text(row, "completion", where)
    if not text:
        raise TrainingError(f"{where}: field 'completion' is empty")
    return DatasetRow(
        number, ((_text(row, "prompt", where), False),), answers=(RowAnswer(text, (), value),), format=format
    )


def _hashable(value: Any) -> Any:
    return value if isinstance(value, bool | int) else None


# -- fields


def _as_prompt(messages: Messages) -> Messages:
    """The same messages, none of which is learned."""
    return tuple({**m, "weight": 0} if m["role"] == "assistant" else m for m in messages)


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise TrainingError(f"{where}: field '{key}' must be a string")
    return value


def _filled(row: Mapping[str, Any], key: str, where: str) -> str:
    text = _text(row, key, where)
    if not text:
        raise TrainingError(f"{where}: field '{key}' is empty")
    return text


def _conversation(
    row: Mapping[str, Any],
    number: int,
    where: str,
    messages: Messages,
    format: str,
    *,
    parts: tuple[tuple[str, bool], ...] = (),
    item: Mapping[str, Any] | None = None,
) -> DatasetRow:
    """A conversation with its row's fields for the chat template."""
    is_prompt = item is not None and messages[-1]["role"] != "assistant"  # then `system` is the grader's
    if row.get("system") and not is_prompt:
        system = {"role": "system", "content": _text(row, "system", where)}
        if messages[0]["role"] not in ("system", "developer"):
            messages = (system, *messages)
        elif messages[0]["content"] != system["content"]:
            raise TrainingError(f"{where}: field 'system': the conversation has another system message")
    variables = row.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise TrainingError(f"{where}: field 'chat_template_kwargs' must be an object")
    variables = {name: value for name, value in (variables or {}).items() if value is not None}
    if name := next((name for name in _RESERVED if name in variables), ""):
        raise TrainingError(f"{where}: field 'chat_template_kwargs' must not contain '{name}'")
    for name, value in (
        ("chat_template_kwargs.enable_thinking", variables.get("enable_thinking")),
        ("parallel_tool_calls", row.get("parallel_tool_calls")),
    ):
        if not isinstance(value, bool | None):
            raise TrainingError(f"{where}: field '{name}' must be true or false")
    if row.get("parallel_tool_calls") is not None:
        variables["parallel_tool_calls"] = row["parallel_tool_calls"]
    return DatasetRow(number, parts, messages, _tools(row, where), variables=variables, format=format, item=item or {})


def _tools(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """The tools of a row: `tools`, also as their JSON, or OpenAI's older `functions`. Of both an element may be
    the function itself, as LLaMA-Factory and OpenAI's Responses have them."""
    name = "functions" if row.get("functions") is not None else "tools"
    value = row.get(name)
    if value is None:
        return ()
    if name == "functions" and row.get("tools") is not None:
        raise TrainingError(f"{where}: field 'functions': there are 'tools', too")
    if isinstance(value, str):
        value = _json_of(value, f"{where}: field '{name}'") if value.strip() else []
    if not isinstance(value, list) or any(not isinstance(tool, dict) for tool in value):
        raise TrainingError(f"{where}: field '{name}' must be an array of objects")
    tools = [
        tool if "function" in tool else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in value
    ]
    for i, tool in enumerate(tools):
        function = tool["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise TrainingError(f"{where}: field '{name}[{i}]' must be a function with a name")
    return tuple(tools)


def _json_of(text: str, at: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TrainingError(f"{at}: is not valid JSON: {error}") from None


def _call(function: Any, at: str) -> dict[str, Any]:
    """A tool call of OpenAI's older form, whose function's name stands for its id."""
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TrainingError(f"{at} must be an object with the name of a function and its arguments")
    if not isinstance(arguments, str | dict | None):
        raise TrainingError(f"{at}.arguments must be an object or its JSON")
    called = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": function["name"], "type": "function", "function": called}


def _with_tool_calls(message: dict[str, Any], at: str) -> dict[str, Any]:
    """A message whose `function_call` or role `function`, OpenAI's older forms, are a tool's."""
    if message.get("role") == "function":
        message = {**message, "role": "tool", "tool_call_id": message.get("tool_call_id") or message.get("name")}
    if "function_call" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "function_call"}
    if not message["function_call"]:
        return rest
    if message.get("tool_calls"):
        raise TrainingError(f"{at}: field 'function_call': there are 'tool_calls', too")
    return {**rest, "tool_calls": [_call(message["function_call"], f"{at}: field 'function_call'")]}


def _with_weight(message: dict[str, Any], at: str) -> dict[str, Any]:
    """A message whose `train` (axolotl's) or `loss` (ms-swift's) is its `weight`."""
    if message.get("weight") not in (None, 0, 1):
        raise TrainingError(f"{at}: field 'weight' must be 0 or 1")
    source = "weight"
    for name in ("train", "loss"):
        learned = message.get(name)
        if learned is None:
            continue
        if learned not in (False, True):
            raise TrainingError(f"{at}: field '{name}' must be true or false")
        if message["role"] != "assistant" and learned:
            raise TrainingError(f"{at}: field '{name}': only the assistant's messages are learned")
        if message.get("weight") not in (None, learned):
            raise TrainingError(f"{at}: fields '{source}' and '{name}' contradict each other")
        source = name
        message = {key: value for key, value in message.items() if key != name}
        if message["role"] == "assistant":
            message["weight"] = int(learned)
    return message


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
        message = _with_weight(_with_tool_calls(message, at), at)
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise TrainingError(f"{at}: field 'content' must be a string")
        if isinstance(content, list):
            parts = [_part(part, f"{at}.content[{k}]", message["role"]) for k, part in enumerate(content)]
            message = {**message, "content": parts}
        messages.append(message)
    if learns and not any(m["role"] == "assistant" and m.get("weight") != 0 for m in messages):
        place = "" if field == "messages" else f"field '{field}': "
        raise TrainingError(f"{where}: {place}no message of the assistant is there to learn from")
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
