"""Replies of chat completions: messages with reasoning and tool calls, whole or as deltas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from logitless.engine.async_engine import LoadedModel
from logitless.engine.requests import TokenProb
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.openai import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CustomCall,
    CustomDelta,
    FunctionCall,
    FunctionDelta,
    MessageDelta,
    OpenAIAnswer,
    Reason,
    ToolCall,
    ToolCallDelta,
)
from logitless.frontend.config import FrontendConfig
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.completions import OpenAIReply
from logitless.frontend.replies.probabilities import entries
from logitless.frontend.replies.reply import Reply, Result
from logitless.models.chat.tool_calls.deltas import CallBegin, Content, Delta, Message, Reasoning
from logitless.models.chat.tool_calls.deltas import ToolCall as Called
from logitless.models.chat.tool_calls.parser import Parser


class Answers:
    """The parsers of a job's answers: whole messages, or more deltas as more text comes."""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._style = reply, reply.job.style
        self._shows_reasoning = reply.job.reasoning
        self._parsers = [Parser(self._style) for _ in reply.results]
        self._n_tokens = [0] * len(reply.results)
        self._n_reasoning = [0] * len(reply.results)

    def message(self, result: Result) -> Message:
        """A whole answer."""
        return Message(result.prefix).add(self.parts(result))

    def parts(self, result: Result) -> list[Delta]:
        """The deltas of a whole answer; once."""
        deltas = [delta for token in result.tokens for delta in self.deltas(result, token.text, last=False)]
        return deltas + self.deltas(result, result.finished.text, last=True)

    def deltas(self, result: Result, text: str, *, last: bool) -> list[Delta]:
        """The deltas that one more token's text adds; with the last text, when the result has finished, those of the
        end."""
        parser, i = self._parsers[result.number], result.number
        thought, began = parser.thinking, time.perf_counter()
        deltas = parser.push(text)
        self._n_tokens[i] += not last
        if thought or parser.thinking:
            self._n_reasoning[i] = self._n_tokens[i]
        if last:
            is_cut = result.finished.stop_type == "limit"
            deltas = deltas + parser.finish(is_cut=is_cut, by_model=not is_cut)
        self._reply.parse_seconds += time.perf_counter() - began
        return deltas if self._shows_reasoning else [delta for delta in deltas if not isinstance(delta, Reasoning)]

    @property
    def n_reasoning(self) -> int:
        """Tokens of reasoning, with its tags, in what was parsed so far."""
        return sum(self._n_reasoning)

    def plain(self, result: Result) -> bool:
        """True if the rest of the answer is nothing but text."""
        return self._parsers[result.number].plain

    def n_calls(self, result: Result) -> int:
        """The number of tool calls that have begun."""
        return self._parsers[result.number].n_calls


class ChatReply(OpenAIReply):
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    answer, chunk_answer = ChatCompletion, ChatChunk

    def __init__(self, job: GenerationJob, served: LoadedModel, config: FrontendConfig) -> None:
        super().__init__(job, served, config)
        self._answers = Answers(self)

    def opening(self, result: Result) -> bytes:
        role = ChatDelta(None, result.index, MessageDelta(role="assistant", content=None))
        return self.chunk([role], **self.of_prompt(result)) + super().opening(result)

    def choice(self, result: Result) -> ChatChoice:
        answer = self._answers.message(result)
        message = AnswerMessage(content=answer.content, reasoning_content=answer.reasoning or UNSET)
        if answer.calls:
            message.content = answer.content or None
            if self.job.functions:
                message.function_call = FunctionCall(answer.calls[0].name, answer.calls[0].arguments)
            else:
                message.tool_calls = [_call(call) for call in answer.calls]
        ended = super().finish_reason(result)
        return ChatChoice(
            finish_reason=self._called if answer.calls and ended == "stop" else ended,
            index=result.index,
            message=message,
            stop_reason=self.stop_reason(result),
            token_ids=self.token_ids(result),
            logprobs=UNSET if self.job.top is None else self.logprobs(result, self._probs(result)),
        )

    def whole(self) -> OpenAIAnswer[Any]:
        return replace(super().whole(), **self.of_prompt(self.results[0]))

    def delta(self, result: Result, text: str | None, finish_reason: Reason | None) -> ChatDelta:
        return ChatDelta(finish_reason, result.index, MessageDelta(content=UNSET if text is None else text))

    def deltas(self, result: Result, text: str, *, last: bool = False) -> list[ChatDelta]:
        lines = self._answers.deltas(result, text, last=last)
        return [ChatDelta(None, result.index, self._shape(delta)) for delta in lines]

    def verbatim(self, result: Result) -> bool:
        return self._answers.plain(result)

    def finish_reason(self, result: Result) -> Reason:
        ended = super().finish_reason(result)
        return self._called if ended == "stop" and self._answers.n_calls(result) else ended

    def logprobs(self, result: Result, probs: Sequence[TokenProb]) -> ChatLogprobs:
        post = result.request.sampling.post_sampling_probs
        top, as_ids = self.job.top or 0, self.params.return_tokens_as_token_ids
        return ChatLogprobs(entries(probs, self.tokenizer, top, post, as_ids=as_ids))

    @property
    def _called(self) -> Reason:
        """The reason of an end with calls."""
        return "function_call" if self.job.functions else "tool_calls"

    def _shape(self, delta: Delta) -> MessageDelta:
        """A delta as OpenAI's API has it, with llama-server's reasoning_content."""
        if isinstance(delta, Content):
            return MessageDelta(content=delta.text)
        if isinstance(delta, Reasoning):
            return MessageDelta(reasoning_content=delta.text)
        name, text = (delta.name, "") if isinstance(delta, CallBegin) else (UNSET, delta.text)
        if self.job.functions:
            return MessageDelta(function_call=FunctionDelta(name, text))
        call = ToolCallDelta(index=delta.index)
        if isinstance(delta, CallBegin):
            call.id, call.type = delta.id, "custom" if delta.custom else "function"
        if delta.custom:
            call.custom = CustomDelta(name, text)
        else:
            call.function = FunctionDelta(name, text)
        return MessageDelta(tool_calls=[call])


def _call(call: Called) -> ToolCall:
    if call.custom:
        return ToolCall(id=call.id, type="custom", custom=CustomCall(call.name, call.arguments))
    return ToolCall(id=call.id, type="function", function=FunctionCall(call.name, call.arguments))
