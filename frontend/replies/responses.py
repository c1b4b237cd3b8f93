"""Reply of OpenAI's Responses API: an answer as output items, whole or streamed."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from logitless.engine.async_engine import LoadedModel
from logitless.engine.errors import RequestError
from logitless.engine.requests import Finished, Progress, Token, TokenProb
from logitless.frontend.answers import UNSET, Opt
from logitless.frontend.answers.generation import TimingsObject, TokenLogprob
from logitless.frontend.answers.responses import (
    ContentPart,
    DeltaEvent,
    FailureEvent,
    IncompleteDetails,
    ItemEvent,
    OutputItem,
    OutputTokensDetails,
    PartEvent,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseStatus,
    ResponseUsage,
    Status,
    StatusEvent,
    WholeEvent,
)
from logitless.frontend.config import FrontendConfig
from logitless.frontend.dialects.responses import called, homes
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.blocks import BEGIN, CALL, MORE, REASONING, TEXT, AnswerBlock, Blocks, Step
from logitless.frontend.replies.encoding import error_object, plain, sse
from logitless.frontend.replies.probabilities import entries
from logitless.frontend.replies.reply import Reply, Result, progress_fields, timings
from logitless.models.tokenizer import Tokenizer

Keep = Callable[[dict[str, Any]], None]


class ResponsesReply(Reply):
    """An answer as output items."""

    id_prefix = "resp_"
    most_logprobs, keeps_logprobs = 1 << 18, True  # its last events have all of them
    n_before = 0  # output items of earlier generations of the response

    def __init__(
        self,
        job: GenerationJob,
        served: LoadedModel,
        config: FrontendConfig,
        body: dict[str, Any],
        keep: Keep | None,
        follow: Keep | None = None,
    ) -> None:
        """`keep` is told of the response when it is whole; `follow`, of one in the background, of each earlier
        state."""
        super().__init__(job, served, config)
        self._request = body
        self._keep, self._follow = keep, follow
        self._blocks = Blocks()
        self._item_ids: list[str] = []
        self._n_events = 0
        self._untold: list[TokenProb] = []  # of tokens whose text is still to come
        self._timings: Opt[TimingsObject] = UNSET  # of the next deltas
        self._homes = homes(body.get("tools", ()))

    def whole(self) -> object:
        result = self.chosen()[0]
        for token in result.tokens:
            self._add(result, token.text, token)
        self._add(result, result.finished.text)
        self._blocks.finish(cut=result.finished.stop_type == "limit")
        return self._final(result)

    def token(self, result: Result, token: Token) -> bytes:
        text = self._start(result)
        if self.params.timings_per_token and token.timings is not None:
            self._timings = timings(token.timings)
        return text + self._step_events(self._add(result, token.text, token))

    def progress(self, result: Result, progress: Progress) -> bytes:
        begun = self._start(result)
        return begun + self._report("response.in_progress", self._response("in_progress"), **progress_fields(progress))

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        text = self._start(result)
        steps = self._add(result, finished.text)
        steps += self._blocks.finish(cut=finished.stop_type == "limit")
        text += self._step_events(steps)
        final = self._final(result)
        return text + self._report(f"response.{final.status}", final, timings=final.timings)

    def _add(self, result: Result, text: str, token: Token | None = None) -> list[Step]:
        """The steps that more text makes: of a token, or the last. A text's block gets the entries of its tokens."""
        if token is not None and token.prob is not None and self.job.top is not None:
            self._untold.append(token.prob)
        deltas = self.answers.deltas(result, text, last=token is None)
        if not deltas:
            return []
        steps = self._blocks.add(deltas)
        entry = "".join([more for step, block, more in steps if step == MORE and block.kind == TEXT])
        if self._untold and entry:
            block = next(block for step, block, _ in steps if step == MORE and block.kind == TEXT)
            begins = any(step == BEGIN and of is block for step, of, _ in steps)
            probs, self._untold = _within(entry.encode(), self._untold, self.tokenizer, last=begins)
            block.logprobs += probs
        elif not entry:
            self._untold = []
        return steps

    def failed(self, error: RequestError) -> bytes:
        """As OpenAI tells it, and `error` beside it, which makes its client raise."""
        if self._follow is not None:
            cause = ResponseError("invalid_prompt" if error.code < 500 else "server_error", error.message)
            return self._report("response.failed", self._followed(self._response("failed", error=cause)))
        error_of = error_object(error).error
        return self._event(FailureEvent, "error", code=error.type, message=error.message, error=error_of)

    def _start(self, result: Result) -> bytes:
        if result.opened:
            return b""
        result.opened = True
        response = self._response("in_progress")
        if self._follow is not None:
            return self._report("response.in_progress", self._followed(response))
        return self._report("response.created", response) + self._report("response.in_progress", response)

    def queued(self) -> tuple[Response, bytes]:
        """The response before its turn, and the events that tell of it."""
        response = self._response("queued")
        return response, self._report("response.created", response) + self._report("response.queued", response)

    def _followed(self, response: Response) -> Response:
        if self._follow is not None:
            self._follow(plain(response))
        return response

    def _response(self, status: ResponseStatus, **more: Any) -> Response:
        return Response(id=self.id, created_at=self.created, status=status, model=self.model, **more, **self._request)

    def _final(self, result: Result) -> Response:
        cut = result.finished.stop_type == "limit"
        usage = self.usage()
        response = self._response(
            "incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=[self._item(block, _status(block)) for block in self._blocks.blocks],
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=usage.prompt_tokens_details,
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(self.answers.n_reasoning),
                total_tokens=usage.total_tokens,
            ),
            timings=timings(result.finished.timings),
        )
        if self._keep is not None:
            self._keep(plain(response))
        return response

    def _event(self, event: type[ResponseEvent], kind: str, **fields: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return sse(event(type=kind, sequence_number=number, **fields), kind)

    def _report(self, kind: str, response: Response, **fields: Any) -> bytes:
        return self._event(StatusEvent, kind, response=response, **fields)

    def _item(self, block: AnswerBlock, status: Status) -> OutputItem:
        """A block as an output item; empty while it is in progress."""
        while len(self._item_ids) <= block.index:
            self._item_ids.append(secrets.token_urlsafe(24))
        id, begun = self._item_ids[block.index], status == "in_progress"
        if block.kind == CALL:
            head: dict[str, Any] = {"status": status, "call_id": block.id, **self._called(block)}
            text = "" if begun else block.text
            if block.custom:
                return OutputItem(id="ctc_" + id, type="custom_tool_call", input=text, **head)
            return OutputItem(id="fc_" + id, type="function_call", arguments=text, **head)
        content = [] if begun else [self._part(block, block.text)]
        if block.kind == REASONING:
            return OutputItem(id="rs_" + id, status=status, type="reasoning", summary=[], content=content)
        return OutputItem(id="msg_" + id, status=status, type="message", role="assistant", content=content)

    def _called(self, block: AnswerBlock) -> dict[str, str]:
        return called(block.name, self._homes)

    def _step_events(self, steps: list[Step]) -> bytes:
        return b"".join([self._step(*step) for step in steps])

    def _step(self, step: str, block: AnswerBlock, text: str) -> bytes:
        item = self._item(block, "in_progress" if step == BEGIN else _status(block))
        at: dict[str, Any] = {"output_index": self.n_before + block.index}
        inner = at | {"item_id": item.id} | ({} if block.kind == CALL else {"content_index": 0})
        if step == BEGIN:
            begun = self._event(ItemEvent, "response.output_item.added", **at, item=item)
            if block.kind == TEXT:
                begun += self._event(PartEvent, "response.content_part.added", **inner, part=self._part(block, ""))
            return begun
        kind = {TEXT: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}[block.kind]
        kind = "custom_tool_call_input" if block.custom else kind
        since, block.n_told = block.n_told, len(block.logprobs)
        probs = block.logprobs[since:] if step == MORE else block.logprobs
        logprobs = self._logprobs(probs) if block.kind == TEXT else UNSET
        if step == MORE:
            more = {"delta": text, "logprobs": logprobs, "timings": self._timings}
            return self._event(DeltaEvent, f"response.{kind}.delta", **inner, **more)
        whole = {"text": block.text}
        if block.custom:
            whole = {"input": block.text}
        elif block.kind == CALL:
            whole = {"arguments": block.text, "name": self._called(block)["name"]}
        ended = self._event(WholeEvent, f"response.{kind}.done", **inner, **whole, logprobs=logprobs)
        if block.kind == TEXT:
            ended += self._event(PartEvent, "response.content_part.done", **inner, part=self._part(block, block.text))
        return ended + self._event(ItemEvent, "response.output_item.done", **at, item=item)

    def _part(self, block: AnswerBlock, text: str) -> ContentPart:
        if block.kind == REASONING:
            return ContentPart(type="reasoning_text", text=text)
        logprobs = self._logprobs(block.logprobs if text else [])
        return ContentPart(type="output_text", text=text, annotations=[], logprobs=logprobs)

    def _logprobs(self, probs: list[TokenProb]) -> list[TokenLogprob]:
        post = self.results[0].request.sampling.post_sampling_probs
        return entries(probs, self.tokenizer, self.job.top or 0, post) if probs else []


def _within(
    text: bytes, probs: list[TokenProb], tokenizer: Tokenizer, *, last: bool
) -> tuple[list[TokenProb], list[TokenProb]]:
    """(tokens that begin inside the text, those after it). `last`: tags of reasoning or calls may come before it."""
    pieces = [tokenizer.piece(prob.id) for prob in probs]
    whole = b"".join(pieces)
    start = max(0, whole.rfind(text) if last else whole.find(text))
    inside, after, at = [], [], 0
    for prob, piece in zip(probs, pieces, strict=True):
        if at >= start + len(text):
            after.append(prob)
        elif at + len(piece) > start:
            inside.append(prob)
        at += len(piece)
    return inside, after


def _status(block: AnswerBlock) -> Status:
    """The status of an item that has ended."""
    return "incomplete" if block.cut else "completed"
