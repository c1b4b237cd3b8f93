"""Reply of Anthropic's Messages API: an answer as content blocks, whole or streamed."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from logitless.engine.async_engine import LoadedModel
from logitless.engine.errors import RequestError
from logitless.engine.requests import Finished, StopType, Timings, Token
from logitless.frontend.answers.anthropic import (
    BlockDelta,
    ContentBlock,
    EventType,
    Message,
    MessageEvent,
    MessageUsage,
    StopReason,
)
from logitless.frontend.config import FrontendConfig
from logitless.frontend.dialects.translate import whole_members
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.blocks import BEGIN, CALL, MORE, REASONING, TEXT, AnswerBlock, Blocks, Step
from logitless.frontend.replies.encoding import anthropics_error, sse
from logitless.frontend.replies.reply import Reply, Result

_STOP_REASONS: dict[StopType, StopReason] = {"limit": "max_tokens", "word": "stop_sequence", "eos": "end_turn"}


class MessagesReply(Reply):
    """An answer as content blocks."""

    id_prefix = "msg_"

    def __init__(self, job: GenerationJob, served: LoadedModel, config: FrontendConfig) -> None:
        super().__init__(job, served, config)
        self._blocks = Blocks()

    def whole(self) -> object:
        result = self.chosen()[0]
        blocks = Blocks()
        blocks.add(self.answers.parts(result))
        done = result.finished
        return replace(
            self._head(done.timings),
            content=[_content(block) for block in blocks.blocks],
            stop_reason=self._reason(done, any(block.kind == CALL for block in blocks.blocks)),
            stop_sequence=done.stopping_word or None,
            usage=self._usage(done.timings, done.n_predicted),
        )

    def token(self, result: Result, token: Token) -> bytes:
        text = self._start(result, token.timings or Timings())
        return text + self._step_events(self._blocks.add(self.answers.deltas(result, token.text, last=False)))

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        text = self._start(result, finished.timings)
        steps = self._blocks.add(self.answers.deltas(result, finished.text, last=True))
        text += self._step_events(steps + self._blocks.finish())
        reason = self._reason(finished, self.answers.n_calls(result) > 0)
        delta = BlockDelta(stop_reason=reason, stop_sequence=finished.stopping_word or None)
        return text + _event("message_delta", delta=delta, usage=self._usage(finished.timings, finished.n_predicted))

    def ending(self) -> bytes:
        return _event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        return sse(anthropics_error(error), "error")

    def _head(self, timings: Timings) -> Message:
        return Message(id=self.id, model=self.model, content=[], usage=self._usage(timings, 0))

    def _start(self, result: Result, timings: Timings) -> bytes:
        if result.opened:
            return b""
        result.opened = True
        return _event("message_start", message=self._head(timings))

    def _usage(self, timings: Timings, n_output: int) -> MessageUsage:
        return MessageUsage(
            input_tokens=timings.prompt_n,
            cache_read_input_tokens=timings.cache_n,
            cache_creation_input_tokens=timings.prompt_n if self.caches else 0,
            output_tokens=n_output,
        )

    def _reason(self, finished: Finished, called: bool) -> StopReason:
        reason = _STOP_REASONS[finished.stop_type]
        return "tool_use" if called and reason != "max_tokens" else reason

    def _step_events(self, steps: list[Step]) -> bytes:
        return b"".join([self._step(*step) for step in steps])

    def _step(self, step: str, block: AnswerBlock, text: str) -> bytes:
        if step == BEGIN:
            return _event("content_block_start", index=block.index, content_block=_empty(block))
        if step == MORE:
            return _event("content_block_delta", index=block.index, delta=_delta(block, text))
        signature = b""
        if block.kind == REASONING:
            delta = BlockDelta(type="signature_delta", signature="")
            signature = _event("content_block_delta", index=block.index, delta=delta)
        return signature + _event("content_block_stop", index=block.index)


def _event(kind: EventType, **data: Any) -> bytes:
    return sse(MessageEvent(type=kind, **data), kind)


def _empty(block: AnswerBlock) -> ContentBlock:
    if block.kind == TEXT:
        return ContentBlock(type="text", text="")
    if block.kind == REASONING:
        return ContentBlock(type="thinking", thinking="", signature="")
    return ContentBlock(type="tool_use", id=block.id, name=block.name, input={})


def _delta(block: AnswerBlock, text: str) -> BlockDelta:
    if block.kind == TEXT:
        return BlockDelta(type="text_delta", text=text)
    if block.kind == REASONING:
        return BlockDelta(type="thinking_delta", thinking=text)
    return BlockDelta(type="input_json_delta", partial_json=text)


def _content(block: AnswerBlock) -> ContentBlock:
    """A whole block."""
    content = _empty(block)
    if block.kind == TEXT:
        content.text = block.text
    elif block.kind == REASONING:
        content.thinking = block.text
    else:
        content.input = whole_members(block.text)
    return content
