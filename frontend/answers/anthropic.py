"""Answers of Anthropic's Messages API: messages and the events of streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from logitless.frontend.answers import UNSET, Opt, doc

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
EventType = Literal[
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


class CountedTokens(Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class ContentBlock(Struct, kw_only=True):
    """A text, a thought, or the use of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    id: Annotated[Opt[str], doc("of a use, to be named by its result")] = UNSET
    name: Annotated[Opt[str], doc("the tool")] = UNSET
    input: Annotated[Opt[dict[str, Any]], doc("of the tool")] = UNSET
    text: Opt[str] = UNSET
    thinking: Opt[str] = UNSET
    signature: Annotated[Opt[str], doc("of a thought; empty")] = UNSET


class MessageUsage(Struct, kw_only=True):
    """Token counts of a message."""

    input_tokens: Annotated[int, doc("tokens of the prompt that were computed")]
    cache_read_input_tokens: Annotated[int, doc("tokens of the prompt found in the KV cache")]
    cache_creation_input_tokens: Annotated[int, doc("of the computed tokens, those kept in the KV cache")] = 0
    output_tokens: int


class Message(Struct, kw_only=True):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: Annotated[StopReason | None, doc("null: it goes on")] = None
    stop_sequence: Annotated[str | None, doc("the stop sequence that ended it")] = None
    usage: MessageUsage


class BlockDelta(Struct, kw_only=True):
    """More of a block, or of the message."""

    type: Opt[Literal["text_delta", "thinking_delta", "input_json_delta", "signature_delta"]] = UNSET
    text: Opt[str] = UNSET
    thinking: Opt[str] = UNSET
    partial_json: Opt[str] = UNSET
    signature: Opt[str] = UNSET
    stop_reason: Annotated[Opt[StopReason], doc("of the message, at its end")] = UNSET
    stop_sequence: Annotated[Opt[str | None], doc("the stop sequence that ended it")] = UNSET


class MessageEvent(Struct, kw_only=True):
    """An event of a stream of /v1/messages; its type says which fields it has."""

    type: EventType
    message: Opt[Message] = UNSET
    index: Annotated[Opt[int], doc("of the block")] = UNSET
    content_block: Annotated[Opt[ContentBlock], doc("empty: it begins")] = UNSET
    delta: Opt[BlockDelta] = UNSET
    usage: Opt[MessageUsage] = UNSET


class ModelInfo(Struct, kw_only=True):
    """A model in Anthropic's list."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: Annotated[str, doc("the server's start, as RFC 3339")]
    lifecycle: Literal["active"] = "active"
    max_input_tokens: Annotated[int | None, doc("null: not loaded")]
    max_tokens: int | None


class ModelList(Struct, kw_only=True):
    """Answer of /v1/models to Anthropic's clients."""

    data: list[ModelInfo]
    has_more: bool
    first_id: Annotated[str | None, doc("null: there is none")]
    last_id: str | None
