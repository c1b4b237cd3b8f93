"""Messages of a chat request, checked: every content a text, every tool call with a name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from logitless.engine.sampling.params import INT_MAX, Param
from logitless.frontend.fields import as_object, as_text, bad_request
from logitless.frontend.media.media import KINDS, OTHERS, Media, Medium
from logitless.models.chat.tool_calls.free_text import INPUT, SYNTAXES

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}


class CalledFunction(Struct, frozen=True, kw_only=True):
    """The function of a call: its name, and its arguments as JSON text or an object."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"


class CalledCustom(Struct, frozen=True, kw_only=True):
    """The custom tool of a call: its name, and the text that it was given."""

    name: str
    input: str


class Call(Struct, frozen=True, kw_only=True):
    """A call that the assistant has made, of a function or of a custom tool."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class Part(Struct, frozen=True, kw_only=True):
    """A typed part of a message's content."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "input_text", "output_text"]})]
    text: Annotated[Any, Meta(extra_json_schema={"type": "string"})] = ""


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message; templates may read further fields."""

    role: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None


class Function(Struct, frozen=True, kw_only=True):
    """A function's name, what it does, and a JSON schema of its arguments."""

    name: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class GrammarSource(Struct, frozen=True, kw_only=True):
    """A grammar's text."""

    syntax: Annotated[str, Meta(extra_json_schema={"enum": [*SYNTAXES]})]
    definition: str


class TextFormat(Struct, frozen=True, kw_only=True):
    """Format of a custom tool's text; the grammar's fields may also stand in `grammar`."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "grammar"]})] = "text"
    grammar: GrammarSource | None = None
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Struct, frozen=True, kw_only=True):
    """A custom tool's name, what it does, and the format of the text that it takes."""

    name: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    description: str | None = None
    format: TextFormat | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """A function, or a custom tool, that the model may call. Tools of other types, which a provider's
    service would run, are skipped."""

    function: Function | None = None
    custom: CustomTool | None = None
    type: Annotated[str, Param("function, custom, or the type of a hosted tool, which is skipped")] = "function"


MAX_MESSAGES = 1 << 17  # of a conversation: each is some objects, in a body of 64 MiB too many


class Chat(Struct, frozen=True, kw_only=True):
    """The conversation of a chat, and how it becomes a prompt."""

    messages: Annotated[list[ChatMessage], Param("the conversation", least=1, most=MAX_MESSAGES)]
    add_generation_prompt: Annotated[bool, Param("begin the assistant's answer")] = True
    continue_final_message: Annotated[bool | None, Param("go on with the assistant's last message")] = None
    documents: Annotated[Sequence[dict[str, Any]] | None, Param("texts that templates of RAG models show")] = None
    chat_template_kwargs: Annotated[Mapping[str, Any], Param("further variables of the chat template")] = {}
    tools: Annotated[Sequence[Tool], Param("functions and custom tools that the model may call", most=256)] = ()
    tool_choice: Annotated[
        str | dict[str, Any],
        Param("none, auto, required, {type: function, function: {name}}, or the same with custom"),
        Meta(extra_json_schema=_CHOICE),
    ] = "auto"
    parallel_tool_calls: Annotated[bool | None, Param("several calls in one answer")] = None
    parse_tool_calls: Annotated[bool, Param("off: calls stay in the text")] = True
    reasoning_format: Annotated[
        str, Param("where reasoning goes", choices=("none", "auto", "deepseek", "deepseek-legacy"))
    ] = "auto"
    reasoning_effort: Annotated[str, Param("a variable of the chat template; none: no reasoning")] = ""
    reasoning_budget_tokens: Annotated[
        int,
        Param(
            "tokens of reasoning before it is ended; -1: no limit",
            -1,
            INT_MAX,
            hard=True,
            aliases=("thinking_token_budget",),
        ),
    ] = -1
    reasoning_budget_message: Annotated[str, Param("text before the end of reasoning that its budget ends")] = ""
    include_reasoning: Annotated[bool, Param("show the reasoning; false: the answer alone")] = True
    reasoning_control: Annotated[bool, Param("let /v1/chat/completions/control end the reasoning")] = False


def parse_messages(
    chat: Chat, value: Sequence[Mapping[str, Any]], separator: str, media: Media, result: list[Medium]
) -> list[dict[str, Any]]:
    """The conversation as templates expect it, with the fields that they alone know; `separator`:
    the text between text parts; `result` gets its media, for each of which the text has a marker."""
    messages = []
    for i, (message, raw) in enumerate(zip(chat.messages, value, strict=True)):
        if not message.role:
            bad_request(f"messages[{i}].role", "must not be empty")
        if "content" not in raw and not message.tool_calls and not message.reasoning_content:
            bad_request(f"messages[{i}].content", "is required")
        content = content_text(raw, i, separator, media, result)
        built = {**raw, "content": "" if content is None and not message.tool_calls else content}
        if message.tool_calls:
            calls = enumerate(raw["tool_calls"])
            built["tool_calls"] = [_call(f"messages[{i}].tool_calls[{k}]", call) for k, call in calls]
        messages.append(built)
    if media.sources.missing:
        media.complete()
    return messages


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as one of a function, whose arguments are there, which some clients leave out where there are none."""
    function, custom = call.get("function"), call.get("custom")
    if custom is not None and function is None:
        arguments = json.dumps({INPUT: custom["input"]}, ensure_ascii=False)
        rest = {key: value for key, value in call.items() if key != "custom"}
        return {**rest, "type": "function", "function": {"name": custom["name"], "arguments": arguments}}
    if function is None:
        bad_request(f"{where}.function", "is required")
    return {**call, "function": {**function, "arguments": function.get("arguments") or "{}"}}


def content_text(message: Mapping[str, Any], i: int, separator: str, media: Media, result: list[Medium]) -> str | None:
    """A message's text: a string, or typed parts joined by `separator`."""
    content: str | list[Any] | None = message.get("content")
    if content is None or isinstance(content, str):
        return content
    return separator.join(part_texts(content, f"messages[{i}].content", media, result))


def part_texts(content: Sequence[Any], name: str, media: Media, result: list[Medium]) -> list[str]:
    """The texts of typed parts, which stand in the field `name`, and a marker for each file of media,
    which goes to `result`. InvalidRequest: a part is neither."""
    texts: list[str] = []
    for k, part in enumerate(content):
        kind = as_object(f"{name}[{k}]", part).get("type")
        if kind in KINDS or kind in OTHERS:
            texts.append(media.part(f"{name}[{k}]", part, result))
            continue
        if not isinstance(kind, str) or kind not in _TEXTS:
            bad_request(f"{name}[{k}].type", "must be text")
        texts.append(as_text(f"{name}[{k}].text", part.get(_TEXTS[kind])))
    return texts
