"""Answers of OpenAI's Responses API: responses, their items and the events of streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from logitless.frontend.answers import UNSET, Opt, doc
from logitless.frontend.answers.errors import ErrorDetail
from logitless.frontend.answers.generation import (
    ProgressObject,
    PromptTokensDetails,
    TimingsObject,
    TokenLogprob,
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ContentPart(Struct, kw_only=True):
    """A text or a thought."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: Annotated[Opt[list[Any]], doc("of a text; empty")] = UNSET
    logprobs: Annotated[Opt[list[TokenLogprob]], doc("of a text's tokens, with top_logprobs")] = UNSET


class OutputItem(Struct, kw_only=True):
    """A message, a thought, or a call; its type says which fields it has."""

    id: str
    status: Annotated[Opt[Status], doc("failed: of a call of an MCP tool")] = UNSET
    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "web_search_call",
    ]
    call_id: Annotated[Opt[str], doc("of a call, to be named by its output")] = UNSET
    name: Annotated[Opt[str], doc("the function or the custom tool")] = UNSET
    namespace: Annotated[Opt[str], doc("the namespace that the function is in")] = UNSET
    arguments: Annotated[Opt[str], doc("of a function, as JSON")] = UNSET
    input: Annotated[Opt[str], doc("of a custom tool: a text in its format")] = UNSET
    role: Annotated[Opt[Literal["assistant"]], doc("of a message")] = UNSET
    summary: Annotated[Opt[list[Any]], doc("of a thought; empty")] = UNSET
    content: Annotated[Opt[list[ContentPart]], doc("of a message or a thought")] = UNSET
    action: Annotated[Opt[dict[str, Any]], doc("of a search: {type: search, query}")] = UNSET
    server_label: Annotated[Opt[str], doc("the MCP server")] = UNSET
    tools: Annotated[Opt[list[dict[str, Any]]], doc("of an MCP server")] = UNSET
    output: Annotated[Opt[str | None], doc("of an MCP tool or a search")] = UNSET
    error: Annotated[Opt[str | dict[str, Any] | None], doc("of an MCP server or tool")] = UNSET
    approval_request_id: Annotated[Opt[str | None], doc("the approval that the call had")] = UNSET


class InputItem(Struct):
    """An item of the request's input, with all the fields that it was given."""

    id: str
    type: str


class OutputTokensDetails(Struct):
    """Tokens of the answer."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """The reason of an early end."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    """The reason of a failure in the background."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ConversationName(Struct):
    """The conversation that a response is part of."""

    id: str


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """`reasoning` of the request."""

    effort: Opt[str | None] = UNSET
    summary: Opt[str | None] = UNSET


class TextOptions(Struct, frozen=True, kw_only=True):
    """`text` of the request."""

    format: Opt[dict[str, Any] | None] = UNSET


class Response(Struct, kw_only=True):
    """Answer of /v1/responses. From `instructions` to `truncation` it repeats the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: Annotated[int, doc("Unix time in seconds")]
    status: Annotated[ResponseStatus, doc("queued, failed and cancelled: with background only")]
    background: Annotated[bool, doc("it goes on without its client")] = False
    conversation: Annotated[ConversationName | None, doc("null: it is in none")] = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: Annotated[ResponseUsage | None, doc("null: it goes on")] = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Any = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningOptions = ReasoningOptions(effort=None, summary=None)
    temperature: Annotated[float | None, doc("null: the server's default")] = None
    text: TextOptions = TextOptions(format={"type": "text"})
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: Annotated[float | None, doc("null: the server's default")] = None
    truncation: Any = "disabled"
    store: Annotated[bool, doc("GET /v1/responses/{id} tells it again")]
    timings: Annotated[Opt[TimingsObject], doc("once it is whole")] = UNSET


_FIELDS = Response.__struct_fields__
REPEATED = _FIELDS[_FIELDS.index("instructions") : _FIELDS.index("store")]
"""Fields of the request that the response repeats."""


class ResponseEvent(Struct, kw_only=True):
    """An event of a stream of /v1/responses."""

    type: str
    sequence_number: Annotated[int, doc("from 0")]


class StatusEvent(ResponseEvent, kw_only=True):
    """The response at its beginning, while the prompt is computed, or at its end."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response
    prompt_progress: Annotated[Opt[ProgressObject], doc("with return_progress")] = UNSET
    timings: Annotated[Opt[TimingsObject], doc("at the end, and with return_progress")] = UNSET


class ItemEvent(ResponseEvent, kw_only=True):
    """An item begins (it is empty) or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(ResponseEvent, kw_only=True):
    """A message's text begins (it is empty) or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    output_index: int
    item_id: str
    content_index: int
    part: ContentPart


class DeltaEvent(ResponseEvent, kw_only=True):
    """More of an item's text, thought, arguments or input."""

    type: Literal[
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
        "response.mcp_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    ]
    output_index: int
    item_id: str
    content_index: Annotated[Opt[int], doc("of a text or a thought")] = UNSET
    delta: str
    logprobs: Annotated[Opt[list[TokenLogprob]], doc("of a text's new tokens, with top_logprobs")] = UNSET
    timings: Annotated[Opt[TimingsObject], doc("with timings_per_token")] = UNSET


class WholeEvent(ResponseEvent, kw_only=True):
    """An item's text, thought, arguments or input is whole."""

    type: Literal[
        "response.output_text.done",
        "response.reasoning_text.done",
        "response.function_call_arguments.done",
        "response.mcp_call_arguments.done",
        "response.custom_tool_call_input.done",
    ]
    output_index: int
    item_id: str
    content_index: Annotated[Opt[int], doc("of a text or a thought")] = UNSET
    text: Annotated[Opt[str], doc("of a text or a thought")] = UNSET
    arguments: Annotated[Opt[str], doc("of a function, as JSON")] = UNSET
    name: Annotated[Opt[str], doc("the function")] = UNSET
    input: Annotated[Opt[str], doc("of a custom tool")] = UNSET
    logprobs: Annotated[Opt[list[TokenLogprob]], doc("of a text's tokens, with top_logprobs")] = UNSET


class McpEvent(ResponseEvent, kw_only=True):
    """A call of an MCP tool, a search, or the list of a server's tools, begins or ends."""

    type: Literal[
        "response.mcp_call.in_progress",
        "response.mcp_call.completed",
        "response.mcp_call.failed",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.mcp_list_tools.failed",
        "response.web_search_call.in_progress",
        "response.web_search_call.searching",
        "response.web_search_call.completed",
    ]
    output_index: int
    item_id: str


class FailureEvent(ResponseEvent, kw_only=True):
    """The generation failed; `error` is what other endpoints answer."""

    type: Literal["error"] = "error"
    code: Annotated[str, doc("the type of the error")]
    message: str
    param: None = None
    error: ErrorDetail


class Conversation(Struct, kw_only=True):
    """A stored conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: Annotated[int, doc("Unix time in seconds")]
    metadata: dict[str, str]


class DeletedConversation(Struct, kw_only=True):
    """A conversation has been deleted."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationItems(Struct, kw_only=True):
    """Items of a conversation: `limit` ones after the one that the query's `after` names."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: Annotated[str, doc('"": there is none')]
    last_id: str
    has_more: bool
