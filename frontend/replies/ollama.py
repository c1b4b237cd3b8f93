"""Answers of Ollama's /api/generate and /api/chat: one JSON object, or a stream of one a line."""

from __future__ import annotations

import time
from typing import Any

from logitless.engine.async_engine import LoadedModel
from logitless.engine.errors import RequestError
from logitless.engine.requests import Finished, Token
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.ollama import OllamaAnswer, OllamaCall, OllamaFunction, OllamaMessage
from logitless.frontend.config import FrontendConfig
from logitless.frontend.dialects.ollama_names import timestamp
from logitless.frontend.dialects.translate import whole_members
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.blocks import CALL, END, MORE, REASONING, TEXT, AnswerBlock, Blocks
from logitless.frontend.replies.encoding import encode_json, ollamas_error
from logitless.frontend.replies.probabilities import TextTokens, entries
from logitless.frontend.replies.reply import Reply, Result


def text_fields(
    chat: bool, text: str = "", thinking: str = "", calls: list[OllamaCall] | None = None
) -> dict[str, Any]:
    """The fields of an answer that have its text, in the shape of a chat or of /api/generate."""
    thought, called = thinking or UNSET, calls or UNSET
    if chat:
        return {"message": OllamaMessage(text, thought, called)}
    return {"response": text, "thinking": thought, "tool_calls": called}


def nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


class OllamaReply(Reply):
    """POST /api/chat, or /api/generate (`chat` False)."""

    content_type = "application/x-ndjson"

    def __init__(
        self, job: GenerationJob, model: str, served: LoadedModel, config: FrontendConfig, *, chat: bool
    ) -> None:
        super().__init__(job, served, config)
        self.model, self._chat = model, chat
        self._began = time.monotonic()
        self._blocks = Blocks()
        self._ids: list[int] = []  # /api/generate: tokens of the answer, for its context
        target = self.job.top is not None
        self._matcher = TextTokens(self.tokenizer, self.results[0].request) if target else None

    def whole(self) -> object:
        result, blocks = self.results[0], Blocks()
        blocks.add(self.answers.parts(result))
        text, thinking = ("".join(b.text for b in blocks.blocks if b.kind == kind) for kind in (TEXT, REASONING))
        calls = [_call(block, i) for i, block in enumerate(b for b in blocks.blocks if b.kind == CALL)]
        self._ids = [token.id for token in result.tokens]
        tokens = self.without_end(self.probable(result), result) if self._matcher is not None else []
        return self._line(
            **text_fields(self._chat, text, thinking, calls),
            **self._logprobs(result, tokens),
            **self._end(result.finished),
        )

    def token(self, result: Result, token: Token) -> bytes:
        if not self._chat:
            self._ids.append(token.id)
        if self._matcher is not None:
            result.pending.append(token)
            result.untold += token.text
        if not token.text:
            return b""
        steps = self._blocks.add(self.answers.deltas(result, token.text, last=False))
        return self._lines_of(result, steps)

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        result.untold += finished.text
        steps = self._blocks.add(self.answers.deltas(result, finished.text, last=True)) + self._blocks.finish()
        text = self._lines_of(result, steps, last=True)
        return text + encode_json(self._line(**text_fields(self._chat), **self._end(finished))) + b"\n"

    def failed(self, error: RequestError) -> bytes:
        return encode_json(ollamas_error(error)) + b"\n"

    def _lines_of(self, result: Result, steps: list[Any], *, last: bool = False) -> bytes:
        """The lines of these steps; the first has the log-probabilities."""
        lines = []
        for step, block, text in steps:
            if step == MORE and block.kind == TEXT:
                lines.append(text_fields(self._chat, text))
            elif step == MORE and block.kind == REASONING:
                lines.append(text_fields(self._chat, thinking=text))
            elif step == END and block.kind == CALL:
                n_before = sum(other.kind == CALL for other in self._blocks.blocks[: block.index])
                lines.append(text_fields(self._chat, calls=[_call(block, n_before)]))
        tokens = self._begun(result, last=last) if lines or last else []
        if tokens and not lines:
            lines.append(text_fields(self._chat))
        probs = self._logprobs(result, tokens)
        return b"".join(
            [encode_json(self._line(**line, **(probs if i == 0 else {}))) + b"\n" for i, line in enumerate(lines)]
        )

    def _begun(self, result: Result, *, last: bool) -> list[Token]:
        """The pending tokens that begin inside the text that has come since."""
        if self._matcher is None:
            return []
        if last and result.finished.stop_type != "word":
            return self.without_end(result.pending, result)
        tokens = self._matcher.take(result.pending, result.untold)
        del result.pending[: len(tokens)]
        result.untold = ""
        return tokens

    def _logprobs(self, result: Result, tokens: list[Token]) -> dict[str, Any]:
        probs = [token.prob for token in tokens if token.prob is not None]
        if self.job.top is None or not probs:
            return {}
        return {"logprobs": entries(probs, self.tokenizer, self.job.top, False)}

    def _line(self, **fields: Any) -> OllamaAnswer:
        return OllamaAnswer(self.model, timestamp(), **fields)

    def _end(self, done: Finished) -> dict[str, Any]:
        """The fields of the end. `load_duration` is the request's time of waiting."""
        total, timings, request = time.monotonic() - self._began, done.timings, self.results[0].request
        waited = total * 1e3 - timings.prompt_ms - timings.predicted_ms
        ended: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if done.stop_type == "limit" else "stop",
            "total_duration": nanoseconds(total * 1e3),
            "load_duration": nanoseconds(max(0.0, waited)),
            "prompt_eval_count": done.n_prompt,
            "prompt_eval_duration": nanoseconds(timings.prompt_ms),
            "eval_count": done.n_predicted,
            "eval_duration": nanoseconds(timings.predicted_ms),
        }
        if not self._chat and request.media is None:
            ended["context"] = [*request.prompt, *self._ids]
        return ended


def _call(block: AnswerBlock, index: int) -> OllamaCall:
    return OllamaCall(block.id, OllamaFunction(index, block.name, whole_members(block.text)))
