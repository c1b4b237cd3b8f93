"""Tool calls and replies that several test modules share."""

from __future__ import annotations

from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.families import HERMES
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style

THINK = ("<think>", "</think>")
NAMES = frozenset({"add", "get_weather"})
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\""}]}}'
ARGUMENTS = '{"a": 1, "b": [2, {"c": "}\\""}]}'


def parse(
    text: str, calls: CallFormat | None = HERMES, reasoning: tuple[str, str] | None = None, **kw: object
) -> Message:
    parser = Parser(Style(calls, NAMES, reasoning, **kw))  # type: ignore[arg-type]
    return Message().add(parser.push(text)).add(parser.finish())


def told(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


def content(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    return text, "", []


def called(*calls: tuple[str, str], text: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    return text, "", list(calls)


ADD = ("add", ARGUMENTS)
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>")
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


def deepseek(*calls: tuple[str, str]) -> str:
    """A call as the templates of DeepSeek R1 and V3 write it."""
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>"
