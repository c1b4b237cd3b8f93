"""OpenAI's /v1/audio: the text of a sound, whole, as plain text, or as a stream."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from logitless.engine.async_engine import LoadedModel
from logitless.engine.errors import InvalidRequest
from logitless.engine.requests import Finished, Progress, Token
from logitless.frontend.answers.transcriptions import (
    InputTokenDetails,
    SpokenDelta,
    SpokenDone,
    SpokenText,
    SpokenTokens,
    VerboseText,
)
from logitless.frontend.dialects.transcriptions import TRANSCRIBE, TRANSLATE, Spoken, parse_spoken
from logitless.frontend.replies.chat import Answers
from logitless.frontend.replies.encoding import sse
from logitless.frontend.replies.reply import Reply, Result
from logitless.models.chat.tool_calls import Content
from logitless.server.api.context import CONTEXT
from logitless.server.api.generate import collected, run
from logitless.server.bodies.form import form_fields, is_form
from logitless.server.config import ServerConfig


async def transcriptions(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/transcriptions: the text of a sound in its own language."""
    return await _answer(request, TRANSCRIBE)


async def translations(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/translations: the text of a sound in English."""
    return await _answer(request, TRANSLATE)


async def _answer(request: web.Request, task: str) -> web.StreamResponse:
    context = request.app[CONTEXT]
    _ = context.writer
    if not is_form(request):
        raise InvalidRequest("the body must be a multipart form with the fields 'file' and 'model'")
    parser, template, kind = context.parser_for(request), context.served.template, request.headers["Content-Type"]
    spoken = await context.parsed_value(
        request, lambda raw: parse_spoken(form_fields(kind, raw), parser, template, task), slow=True
    )
    reply = SpokenReply(spoken, context.served, context.config)
    if spoken.response_format != "text":
        return await run(request, context, spoken.job, reply)
    async with collected(request, context, spoken.job, reply):
        return web.Response(text=reply.text())


class SpokenReply(Reply):
    """Text of a sound."""

    id_prefix = "transcript-"

    def __init__(self, spoken: Spoken, served: LoadedModel, config: ServerConfig) -> None:
        super().__init__(spoken.job, served, config)
        self._spoken = spoken
        self._answers = Answers(self)
        self._texts: list[str] = []  # of a stream

    def text(self) -> str:
        """The whole text, without reasoning."""
        return self._answers.message(self.results[0]).content or ""

    def whole(self) -> Struct:
        spoken = self._spoken
        if spoken.response_format == "verbose_json":
            return VerboseText(spoken.task, spoken.language, spoken.seconds, self.text())
        return SpokenText(self.text(), self._tokens())

    def token(self, result: Result, token: Token) -> bytes:
        return self._added(result, token.text)

    def progress(self, result: Result, progress: Progress) -> bytes:
        return b""

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        last = self._added(result, finished.text, last=True)
        return last + sse(SpokenDone("".join(self._texts), self._tokens())) + b"data: [DONE]\n\n"

    def _added(self, result: Result, text: str, *, last: bool = False) -> bytes:
        deltas = self._answers.deltas(result, text, last=last)
        texts = [delta.text for delta in deltas if isinstance(delta, Content) and delta.text]
        self._texts += texts
        return b"".join(sse(SpokenDelta(text)) for text in texts)

    def _tokens(self) -> SpokenTokens:
        usage = self.usage()
        n_heard = sum(id < 0 for id in self.results[0].request.prompt)
        details = InputTokenDetails(usage.prompt_tokens - n_heard, n_heard)
        return SpokenTokens(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, details)
