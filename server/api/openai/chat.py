"""Chat completions: answers as messages with reasoning and tool calls, whole or as deltas that add
up to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitless.engine.async_engine import LoadedModel
from logitless.engine.requests import TokenProb
from logitless.models.chat.tool_calls import CallArguments, CallBegin, Content, Delta, Message, Parser, Reasoning
from logitless.server.api.openai.completions import OpenAIReply
from logitless.server.api.probabilities import entries
from logitless.server.api.reply import Reply, Result
from logitless.server.config import ServerConfig
from logitless.server.protocol.completions import Job


class Answers:
    """The parsers of a job's answers: whole messages, or more deltas as more text comes."""

    def __init__(self, reply: Reply) -> None:
        self._style = reply.options.style
        self._shows_reasoning = reply.options.reasoning
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
        """The deltas that one more token's text adds; with the last text, those of the end."""
        parser, i = self._parsers[result.number], result.number
        thought = parser.thinking
        deltas = parser.push(text)
        self._n_tokens[i] += not last
        if thought or parser.thinking:
            self._n_reasoning[i] = self._n_tokens[i]
        deltas = deltas + parser.finish() if last else deltas
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
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    text_open = b'"delta":{"content":'
    text_close = b"}}"

    def __init__(self, job: Job, served: LoadedModel, config: ServerConfig) -> None:
        super().__init__(job, served, config)
        self._answers = Answers(self)

    def opening(self, result: Result) -> bytes:
        delta = {"role": "assistant", "content": None}
        role = self.chunk([{"finish_reason": None, "index": result.index, "delta": delta}], **self.of_prompt(result))
        return role + super().opening(result)

    def choice(self, result: Result) -> dict[str, Any]:
        answer = self._answers.message(result)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            if self.options.functions:
                (call, *_) = answer.calls
                message["function_call"] = {"name": call.name, "arguments": call.arguments}
        if answer.calls and not self.options.functions:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        ended = super().finish_reason(result)
        data: dict[str, Any] = {
            "finish_reason": self._called if answer.calls and ended == "stop" else ended,
            "index": result.index,
            "message": message,
            **self.details(result),
        }
        if self.options.top is not None:
            probs = self._probs(result)
            data["logprobs"] = self.logprobs(result, probs)
        return data

    def whole(self) -> object:
        told = super().whole()
        assert isinstance(told, dict)
        return told | self.of_prompt(self.results[0])

    def delta(self, result: Result, text: str | None, finish_reason: str | None) -> dict[str, Any]:
        content = {} if text is None else {"content": text}
        return {"finish_reason": finish_reason, "index": result.index, "delta": content}

    def deltas(self, result: Result, text: str, *, last: bool = False) -> list[dict[str, Any]]:
        told = self._answers.deltas(result, text, last=last)
        return [{"finish_reason": None, "index": result.index, "delta": self._shape(delta)} for delta in told]

    def verbatim(self, result: Result) -> bool:
        return self._answers.plain(result)

    def finish_reason(self, result: Result) -> str:
        ended = super().finish_reason(result)
        return self._called if ended == "stop" and self._answers.n_calls(result) else ended

    def logprobs(self, result: Result, probs: Sequence[TokenProb]) -> dict[str, Any]:
        post = result.request.sampling.post_sampling_probs
        top, as_ids = self.options.top or 0, self.options.tokens_as_ids
        return {"content": entries(probs, self.tokenizer, top, post, as_ids=as_ids)}

    @property
    def _called(self) -> str:
        """The reason of an end with calls."""
        return "function_call" if self.options.functions else "tool_calls"

    def _shape(self, delta: Delta) -> dict[str, Any]:
        """A delta as OpenAI's API has it, with llama-server's reasoning_content."""
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        named, function = {}, {"arguments": delta.text if isinstance(delta, CallArguments) else ""}
        if isinstance(delta, CallBegin):
            named, function = {"id": delta.id, "type": "function"}, {"name": delta.name, **function}
        if self.options.functions:
            return {"function_call": function}
        return {"tool_calls": [{"index": delta.index, **named, "function": function}]}
