"""Tool calls and reasoning in a model's answer."""

from logitless.models.chat.tool_calls.deltas import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Message,
    Reasoning,
    ToolCall,
)
from logitless.models.chat.tool_calls.families import (
    GENERIC,
    GRANITE,
    HERMES,
    KIMI_K3,
    LFM2,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    NEMOTRON,
    REASONING_OF,
    family_of,
    reasoning_tags,
)
from logitless.models.chat.tool_calls.framed import (
    COMMAND_R,
    COMMAND_R_ACTION,
    DEEPSEEK,
    DEEPSEEK_V31,
    FUNCTIONARY,
    GPT_OSS,
    MUSE,
)
from logitless.models.chat.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style
from logitless.models.chat.tool_calls.tagged import QWEN3_CODER

__all__ = [
    "COMMAND_R",
    "COMMAND_R_ACTION",
    "DEEPSEEK",
    "DEEPSEEK_V31",
    "FUNCTIONARY",
    "FUNCTION_GEMMA",
    "GEMMA4",
    "GENERIC",
    "GPT_OSS",
    "GRANITE",
    "HERMES",
    "KIMI_K3",
    "LFM2",
    "LLAMA3",
    "LLAMA4",
    "MISTRAL",
    "MUSE",
    "NEMOTRON",
    "QWEN3_CODER",
    "REASONING_OF",
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
