"""Tool calls and reasoning in a model's answer."""

from models.tool_calls.deltas import CallArguments, CallBegin, Content, Delta, Message, Reasoning, ToolCall
from models.tool_calls.families import GENERIC, HERMES, LLAMA3, MISTRAL, family_of, reasoning_tags
from models.tool_calls.parser import CallFormat, Parser, Style

__all__ = [
    "GENERIC",
    "HERMES",
    "LLAMA3",
    "MISTRAL",
    "CallArguments",
    "CallBegin",
    "CallFormat",
    "Content",
    "Delta",
    "Message",
    "Parser",
    "Reasoning",
    "Style",
    "ToolCall",
    "family_of",
    "reasoning_tags",
]
