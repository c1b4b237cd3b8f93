"""Reply of /v1/audio: the text of a sound, whole or streamed."""

from __future__ import annotations

from msgspec import Struct

from logitless.engine.async_engine import LoadedModel
from logitless.engine.requests import Finished, Token
from logitless.frontend.answers.transcriptions import (
    InputTokenDetails,
    SpokenDelta,
    SpokenDone,
    SpokenText,
    SpokenTokens,
    VerboseText,
)
from logitless.frontend.config import FrontendConfig
from logitless.frontend.dialects.transcriptions import Spoken
from logitless.frontend.replies.encoding import sse
from logitless.frontend.replies.reply import Reply, Result
from logitless.models.chat.tool_calls.deltas import Content


class SpokenReply(Reply):
    """Text of a sound."""

    id_prefix = "transcript-"

    def __init__(self, spoken: Spoken, served: LoadedModel, config: FrontendConfig) -> None:
        super().__init__(spoken.job, served, config)
        self._spoken = spoken
        self._texts: list[str] = []  # of a stream

    def text(self) -> str:
        """The whole text, without reasoning."""
        return self.answers.message(self.results[0]).content or ""

    def whole(self) -> Struct:
        spoken = self._spoken
        if spoken.response_format == "verbose_json":
            return VerboseText(spoken.task, spoken.language, spoken.seconds, self.text())
        return SpokenText(self.text(), self._tokens())

    def token(self, result: Result, token: Token) -> bytes:
        return self._added(result, token.text)

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        last = self._added(result, finished.text, last=True)
        return last + sse(SpokenDone("".join(self._texts), self._tokens())) + b"data: [DONE]\n\n"

    def _added(self, result: Result, text: str, *, last: bool = False) -> bytes:
        deltas = self.answers.deltas(result, text, last=last)
        texts = [delta.text for delta in deltas if isinstance(delta, Content) and delta.text]
        self._texts += texts
        return b"".join(sse(SpokenDelta(text)) for text in texts)

    def _tokens(self) -> SpokenTokens:
        usage = self.usage()
        n_heard = sum(id < 0 for id in self.results[0].request.prompt)
        details = InputTokenDetails(usage.prompt_tokens - n_heard, n_heard)
        return SpokenTokens(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, details)
