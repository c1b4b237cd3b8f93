"""Replies of OpenAI's completions and chat completions, whole or as chunks of a stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, replace

from logitless.engine.async_engine import LoadedModel
from logitless.engine.requests import Finished, Progress, Token, TokenProb
from logitless.engine.stream import event_weight
from logitless.frontend.answers import UNSET, Opt
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
    TextChoice,
    TextChunk,
    TextCompletion,
    TextDelta,
    TextLogprobs,
    ToolCall,
    ToolCallDelta,
)
from logitless.frontend.config import FrontendConfig
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.encoding import encode_json, sse
from logitless.frontend.replies.probabilities import LegacyLogprobs, TextTokens, entries
from logitless.frontend.replies.reply import Reply, Result, progress_fields, timings
from logitless.models.chat.tool_calls.deltas import CallBegin, Content, Delta, Reasoning
from logitless.models.chat.tool_calls.deltas import ToolCall as Called

ChunkChoice = TextDelta | ChatDelta
MAX_PENDING = 1 << 14  # memory of the log-probabilities of a stream's tokens that wait for their text
_MARK = "\0"  # stands for the text of a chunk


class OpenAIReply(Reply):
    """Common part of both: chunks with `choices`, then usage, then [DONE]."""

    answer: type[OpenAIAnswer[Any]]
    chunk_answer: type[OpenAIAnswer[Any]]

    @cached_property
    def _matchers(self) -> list[TextTokens]:
        return [TextTokens(self.tokenizer, result.request) for result in self.results]

    @cached_property
    def _plain(self) -> bool:
        """True if a chunk has text alone."""
        return self.job.top is None and not (self.params.timings_per_token or self.params.return_token_ids)

    @abstractmethod
    def choice(self, result: Result) -> Struct:
        """One whole result."""

    @abstractmethod
    def delta(self, result: Result, text: str | None, finish_reason: Reason | None) -> ChunkChoice:
        """One result's part of a chunk; text None: nothing was added."""

    @abstractmethod
    def logprobs(self, result: Result, probs: Sequence[TokenProb]) -> Any:
        """The probabilities of the next tokens of a result."""

    def deltas(self, result: Result, text: str, *, last: bool = False) -> Sequence[ChunkChoice]:
        """A result's parts of chunks for more of its text."""
        return [self.delta(result, text, None)] if text else []

    def verbatim(self, result: Result) -> bool:
        """True if the text is streamed as it comes."""
        return True

    def finish_reason(self, result: Result) -> Reason:
        """Why a result ended, in OpenAI's word."""
        return "length" if result.finished.stop_type == "limit" else "stop"

    def opening(self, result: Result) -> bytes:
        """The chunk before everything else of a result."""
        return self.chunk([self.delta(result, result.prefix, None)]) if result.prefix else b""

    def whole(self) -> OpenAIAnswer[Any]:
        chosen = self.chosen()
        return self.answer(
            choices=[self.choice(result) for result in chosen],
            usage=self.usage(),
            timings=timings(chosen[0].finished.timings),
            verbose=self.native(chosen[0]) if self.params.verbose else UNSET,
            **self.head,
        )

    def chunk(self, choices: list[ChunkChoice], **extra: Any) -> bytes:
        """One event of the stream."""
        return sse(self.chunk_answer(choices=choices, **self.head, **extra))

    def token(self, result: Result, token: Token) -> bytes:
        if self._plain and result.opened and self.verbatim(result):  # the hot path
            if not token.text:
                return b""
            before, after = result.wrapping
            return b"%b%b%b" % (before, encode_json(token.text), after)
        result.prompt_probs = token.prompt_probs
        opening = self._open(result)
        if self.job.top is not None:
            result.pending.append(token)
            result.pending_weight += event_weight(token)
            result.untold += token.text
        if self.params.return_token_ids:
            result.untold_ids.append(token.id)
        if result.pending_weight > MAX_PENDING and not token.text:  # none of these tokens shows a text
            tokens, result.pending, result.pending_weight = result.pending, [], 0
            return opening + self._chunks(result, [self.delta(result, "", None)], tokens)
        if not token.text:
            return opening
        extra = {}
        if self.params.timings_per_token and token.timings is not None:
            extra["timings"] = timings(token.timings)
        deltas = self.deltas(result, token.text)
        return opening + self._chunks(result, deltas, self._begun(result) if deltas else [], **extra)

    def progress(self, result: Result, progress: Progress) -> bytes:
        waits = result.prefix and self.job.top is not None  # for the prompt's probabilities
        opening = b"" if waits else self._open(result)
        return opening + self.chunk([self.delta(result, None, None)], **progress_fields(progress))

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished, result.prompt_probs = finished, finished.prompt_probs
        text = self._open(result)
        result.untold += finished.text
        tokens = self._begun(result) if finished.stop_type == "word" else self.without_end(result.pending, result)
        deltas = self.deltas(result, finished.text, last=True)
        if deltas or tokens:
            text += self._chunks(result, deltas or [self.delta(result, "", None)], tokens)
        last = self.delta(result, None, self.finish_reason(result))
        last.stop_reason, last.token_ids = self.stop_reason(result), self._ids(result)
        return text + self.chunk([last], **self.last_extra(result))

    def last_extra(self, result: Result) -> dict[str, Any]:
        """Further fields of a result's last chunk."""
        extra: dict[str, Any] = {}
        if self.params.verbose:
            extra["verbose"] = self.native(result)
        if not self.params.stream_options.include_usage or len(self.results) > 1:
            extra["timings"] = timings(result.finished.timings)
        return extra

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self.params.stream_options.include_usage:
            return done
        extra = {"timings": timings(self.results[0].finished.timings)} if len(self.results) == 1 else {}
        return self.chunk([], usage=self.usage(), **extra) + done

    def _probs(self, result: Result) -> list[TokenProb]:
        tokens = self.without_end(self.probable(result), result)
        return [token.prob for token in tokens if token.prob is not None]

    def _open(self, result: Result) -> bytes:
        if result.opened:
            return b""
        result.opened = True
        before, _, after = self.chunk([self.delta(result, _MARK, None)]).partition(encode_json(_MARK))
        result.wrapping = before, after
        return self.opening(result)

    def _begun(self, result: Result) -> list[Token]:
        """The pending tokens that begin inside the text that has come since; those after it are pending on."""
        if not result.pending:
            return []
        tokens = self._matchers[result.number].take(result.pending, result.untold)
        del result.pending[: len(tokens)]
        result.pending_weight = sum(map(event_weight, result.pending))
        result.untold = ""
        return tokens

    def _chunks(self, result: Result, deltas: Sequence[ChunkChoice], tokens: list[Token], **extra: Any) -> bytes:
        """Chunks with these parts; the first has the tokens' probabilities."""
        if self.job.top is not None and deltas:
            deltas[0].logprobs = self.logprobs(result, [token.prob for token in tokens if token.prob is not None])
        if deltas:
            deltas[0].token_ids = self._ids(result)
        return b"".join([self.chunk([delta], **extra) for delta in deltas])

    def _ids(self, result: Result) -> Opt[list[int]]:
        """The ids of the tokens since the last chunk, where they are asked for."""
        ids, result.untold_ids = result.untold_ids, []
        return ids if self.params.return_token_ids else UNSET

    def stop_reason(self, result: Result) -> Opt[int | str | None]:
        """vLLM's: the token or the text that ended a request with stop_token_ids."""
        done = result.finished
        return (done.stopping_word or done.stop_token) if result.request.sampling.stop_token_ids else UNSET

    def token_ids(self, result: Result) -> Opt[list[int]]:
        """vLLM's: the ids of a whole choice's tokens, where they are asked for."""
        return [token.id for token in result.tokens] if self.params.return_token_ids else UNSET


class CompletionReply(OpenAIReply):
    """POST /v1/completions."""

    id_prefix = "cmpl-"
    answer, chunk_answer = TextCompletion, TextChunk

    def __init__(self, job: GenerationJob, served: LoadedModel, config: FrontendConfig) -> None:
        super().__init__(job, served, config)
        self._legacy: dict[int, LegacyLogprobs] = {}

    def choice(self, result: Result) -> TextChoice:
        logprobs = None
        if self.job.top is not None:
            probs = self._probs(result)
            logprobs = self.logprobs(result, probs)
            if result.prefix:
                prompt = self._of_prefix(result, result.finished.prompt_probs)
                pairs = zip(astuple(prompt), astuple(logprobs), strict=True)
                logprobs = TextLogprobs(*(first + rest for first, rest in pairs))
        return TextChoice(
            text=result.prefix + result.content,
            index=result.index,
            logprobs=logprobs,
            finish_reason=self.finish_reason(result),
            stop_reason=self.stop_reason(result),
            token_ids=self.token_ids(result),
            **self.of_prompt(result),
        )

    def delta(self, result: Result, text: str | None, finish_reason: Reason | None) -> TextDelta:
        return TextDelta(finish_reason, result.index, None, text or "")

    def logprobs(self, result: Result, probs: Sequence[TokenProb]) -> TextLogprobs:
        legacy = self._legacy.get(result.index)
        if legacy is None:
            legacy = self._legacy[result.index] = self._new_legacy(result)
            legacy.skip(result.prefix)
        return legacy.of(probs)

    def opening(self, result: Result) -> bytes:
        """The prompt's text, probabilities and ids come in the first chunk, as far as they are asked for."""
        first = self.delta(result, result.prefix, None)
        if result.prefix and self.job.top is not None:
            first.logprobs = self._of_prefix(result, result.prompt_probs)
        if self.params.return_token_ids:
            first.prompt_token_ids = list(result.request.prompt)
        return self.chunk([first]) if result.prefix or self.params.return_token_ids else b""

    def _of_prefix(self, result: Result, probs: Sequence[TokenProb | None]) -> TextLogprobs:
        return self._new_legacy(result).of_prompt(result.request.prompt, probs, result.prefix)

    def last_extra(self, result: Result) -> dict[str, Any]:
        extra = super().last_extra(result)
        if len(self.results) == 1 and not self.params.stream_options.include_usage:  # as llama-server's last chunk
            extra["usage"] = self.usage()
        return extra

    def _new_legacy(self, result: Result) -> LegacyLogprobs:
        as_ids = self.params.return_tokens_as_token_ids
        return LegacyLogprobs(self.tokenizer, self.job.top or 0, result.request, as_ids=as_ids)


class ChatReply(OpenAIReply):
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    answer, chunk_answer = ChatCompletion, ChatChunk

    def opening(self, result: Result) -> bytes:
        role = ChatDelta(None, result.index, MessageDelta(role="assistant", content=None))
        return self.chunk([role], **self.of_prompt(result)) + super().opening(result)

    def choice(self, result: Result) -> ChatChoice:
        answer = self.answers.message(result)
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
        lines = self.answers.deltas(result, text, last=last)
        return [ChatDelta(None, result.index, self._shape(delta)) for delta in lines]

    def verbatim(self, result: Result) -> bool:
        return self.answers.plain(result)

    def finish_reason(self, result: Result) -> Reason:
        ended = super().finish_reason(result)
        return self._called if ended == "stop" and self.answers.n_calls(result) else ended

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
