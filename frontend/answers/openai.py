"""Answers of OpenAI's completions and chat completions, whole and as chunks of a stream."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Struct, field

from logitless.frontend.answers import UNSET, Opt, doc
from logitless.frontend.answers.generation import (
    NativeCompletion,
    ProgressObject,
    PromptLogprobs,
    TimingsObject,
    TokenLogprob,
    Usage,
)

C = TypeVar("C")
Reason = Literal["stop", "length", "tool_calls", "function_call"]


class OpenAIAnswer(Struct, Generic[C], kw_only=True):
    """Fields of completions and chunks of both endpoints."""

    choices: list[C]
    created: Annotated[int, doc("Unix time in seconds")]
    id: str
    model: str
    system_fingerprint: Annotated[str, doc("the server's build")]
    object: str
    usage: Annotated[Opt[Usage], doc("of a stream: in the last chunk, with stream_options.include_usage")] = UNSET
    prompt_progress: Annotated[Opt[ProgressObject], doc("with return_progress, during the prefill")] = UNSET
    timings: Annotated[Opt[TimingsObject], doc("in the last chunk; in all with timings_per_token")] = UNSET
    verbose: Annotated[Opt[NativeCompletion], doc("with verbose: as /completion would answer")] = field(
        name="__verbose", default=UNSET
    )
    prompt_logprobs: Annotated[Opt[PromptLogprobs], doc("of each prompt token, by ids; of the first null")] = UNSET
    prompt_token_ids: Annotated[Opt[list[int]], doc("with return_token_ids")] = UNSET


class TextLogprobs(Struct):
    """Log-probabilities of a text's tokens, as arrays of one length."""

    tokens: list[str]
    token_logprobs: Annotated[list[float | None], doc("null: the first token of a prompt")]
    top_logprobs: Annotated[list[dict[str, float] | None], doc("the likeliest tokens and the chosen one")]
    text_offset: Annotated[list[int], doc("characters before the token")]


class TextChoice(Struct, kw_only=True):
    """One result of /v1/completions."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: Reason
    stop_reason: Annotated[Opt[int | str | None], doc("the token of stop_token_ids or the text that ended it")] = UNSET
    token_ids: Annotated[Opt[list[int]], doc("with return_token_ids")] = UNSET
    prompt_logprobs: Annotated[Opt[PromptLogprobs], doc("of each prompt token, by ids; of the first null")] = UNSET
    prompt_token_ids: Annotated[Opt[list[int]], doc("with return_token_ids")] = UNSET


class TextDelta(Struct):
    """A result's part of a chunk of /v1/completions."""

    finish_reason: Annotated[Reason | None, doc("null: it goes on")]
    index: int
    logprobs: TextLogprobs | None
    text: str
    stop_reason: Annotated[Opt[int | str | None], doc("the token of stop_token_ids or the text that ended it")] = UNSET
    token_ids: Annotated[Opt[list[int]], doc("with return_token_ids: since the last chunk")] = UNSET
    prompt_token_ids: Annotated[Opt[list[int]], doc("with return_token_ids, in the first chunk")] = UNSET


class TextCompletion(OpenAIAnswer[TextChoice], kw_only=True):
    """Answer of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    usage: Usage
    timings: TimingsObject


class TextChunk(OpenAIAnswer[TextDelta], kw_only=True):
    """An event of a stream of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"


class ChatLogprobs(Struct):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]


class FunctionCall(Struct):
    """A function that the model calls."""

    name: str
    arguments: Annotated[str, doc("JSON")]


class CustomCall(Struct):
    """A custom tool that the model calls."""

    name: str
    input: Annotated[str, doc("a text in the tool's format")]


class ToolCall(Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function", "custom"]
    function: Opt[FunctionCall] = UNSET
    custom: Opt[CustomCall] = UNSET


class AnswerMessage(Struct, kw_only=True):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: Annotated[Opt[str], doc("the reasoning before the answer")] = UNSET
    function_call: Annotated[Opt[FunctionCall], doc("of requests with `functions`")] = UNSET
    tool_calls: Opt[list[ToolCall]] = UNSET


class ChatChoice(Struct, kw_only=True):
    """One result of /v1/chat/completions."""

    finish_reason: Reason
    index: int
    message: AnswerMessage
    stop_reason: Annotated[Opt[int | str | None], doc("the token of stop_token_ids or the text that ended it")] = UNSET
    token_ids: Annotated[Opt[list[int]], doc("with return_token_ids")] = UNSET
    logprobs: Annotated[Opt[ChatLogprobs], doc("with logprobs")] = UNSET


class FunctionDelta(Struct):
    """More of a function call."""

    name: Annotated[Opt[str], doc("in the call's first delta")] = UNSET
    arguments: Annotated[str, doc("the next piece of the JSON")] = ""


class CustomDelta(Struct):
    """More of a custom tool's call."""

    name: Annotated[Opt[str], doc("in the call's first delta")] = UNSET
    input: Annotated[str, doc("the next piece of the text")] = ""


class ToolCallDelta(Struct, kw_only=True):
    """More of a call of a tool."""

    index: Annotated[int, doc("of the call")]
    id: Annotated[Opt[str], doc("in the call's first delta")] = UNSET
    type: Annotated[Opt[Literal["function", "custom"]], doc("in the call's first delta")] = UNSET
    function: Opt[FunctionDelta] = UNSET
    custom: Opt[CustomDelta] = UNSET


class MessageDelta(Struct, kw_only=True):
    """More of the message."""

    role: Annotated[Opt[Literal["assistant"]], doc("in the first chunk")] = UNSET
    content: Opt[str | None] = UNSET
    reasoning_content: Opt[str] = UNSET
    function_call: Opt[FunctionDelta] = UNSET
    tool_calls: Opt[list[ToolCallDelta]] = UNSET


class ChatDelta(Struct):
    """A result's part of a chunk of /v1/chat/completions."""

    finish_reason: Annotated[Reason | None, doc("null: it goes on")]
    index: int
    delta: MessageDelta
    logprobs: Annotated[Opt[ChatLogprobs], doc("with logprobs")] = UNSET
    stop_reason: Annotated[Opt[int | str | None], doc("the token of stop_token_ids or the text that ended it")] = UNSET
    token_ids: Annotated[Opt[list[int]], doc("with return_token_ids: since the last chunk")] = UNSET


class ChatCompletion(OpenAIAnswer[ChatChoice], kw_only=True):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    usage: Usage
    timings: TimingsObject


class ChatChunk(OpenAIAnswer[ChatDelta], kw_only=True):
    """An event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Predictions(Struct):
    """Answer of /predict."""

    predictions: list[ChatCompletion]


class RenderedSampling(Struct):
    """Sampling of a rendered request, as vLLM's SamplingParams name it."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    stop: list[str]
    ignore_eos: bool
    max_tokens: Annotated[int | None, doc("null: to the end of the context")]


class RenderedRequest(Struct):
    """Request with its prompt as token ids: vLLM's GenerateRequest."""

    request_id: str
    token_ids: Annotated[list[int], doc("of the prompt; rows of media are 0")]
    sampling_params: RenderedSampling
    model: str
    stream: bool
