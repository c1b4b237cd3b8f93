"""OpenAI's Responses API: /v1/responses, and the counting of input tokens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import to_builtins

from logitless.engine.async_engine import LoadedModel
from logitless.engine.errors import NotFound, RequestError
from logitless.engine.requests import Finished, Progress, Token, TokenProb
from logitless.models.tokenizer import Tokenizer
from logitless.server.api.blocks import BEGIN, CALL, MORE, REASONING, TEXT, Block, Blocks, Step
from logitless.server.api.context import CONTEXT, client_key, error_object, json_response, sse
from logitless.server.api.generate import run
from logitless.server.api.openai.chat import Answers
from logitless.server.api.openai.files import listed
from logitless.server.api.openai.stored_responses import Kept
from logitless.server.api.probabilities import entries
from logitless.server.api.reply import Reply, Result, progress_fields, timings
from logitless.server.config import ServerConfig
from logitless.server.protocol.answers.fine_tuning import Deleted
from logitless.server.protocol.answers.llamacpp import InputTokens
from logitless.server.protocol.chat.chat import chat_tokens, parse_chat
from logitless.server.protocol.completions import Job
from logitless.server.protocol.dialects.responses import ResponsesBody, called, chat_body, homes
from logitless.server.protocol.fields import bad_request, read

Keep = Callable[[dict[str, Any]], None]
_IDS = {REASONING: "rs_", TEXT: "msg_", CALL: "fc_"}
_ECHOED: dict[str, Any] = {  # fields of the request that the response repeats, with their defaults
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
}


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    context, key = request.app[CONTEXT], _owner(request)
    parser, template, kept = context.parser_for(request), context.served.template, context.stored

    def parse(body: dict[str, Any]) -> tuple[Job, dict[str, Any], Keep | None]:
        response = read(ResponsesBody, body)
        body = {**body, "input": kept.resolved(key, body.get("input"))}
        earlier = kept.before(key, response.previous_response_id)
        asked = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
        asked["store"] = response.store
        job = chat_body(response, body, earlier.items).read(lambda chat: parse_chat(chat, parser, template))
        keep = partial(kept.keep, key, given=body.get("input"), earlier=earlier) if asked["store"] else None
        return job, asked, keep

    job, asked, keep = await context.parsed(request, parse)
    return await run(request, context, job, ResponsesReply(job, context.served, context.config, asked, keep))


async def response(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}."""
    if request.query.get("stream", "false") != "false":
        bad_request("stream", "a response is told again as a whole only")
    return json_response(_found(request).response)


async def forget(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}."""
    id = request.match_info["id"]
    if not request.app[CONTEXT].stored.forget(_owner(request), id):
        raise NotFound(f"there is no response {id[:64]!r}")
    return json_response(Deleted(id=id, object="response"))


async def input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}/input_items: what was said for it, the last first unless `order` is
    asc.
    """
    items = list(_found(request).input)
    if request.query.get("order") != "asc":
        items.reverse()
    return json_response(listed(request, items))


def _owner(request: web.Request) -> str:
    """The key whose stored responses a request may read; "" without keys: all."""
    return client_key(request) if request.app[CONTEXT].keys else ""


def _found(request: web.Request) -> Kept:
    id = request.match_info["id"]
    found = request.app[CONTEXT].stored.find(_owner(request), id)
    if found is None:
        raise NotFound(f"there is no response {id[:64]!r}: it was not stored, or is forgotten")
    return found


async def responses_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens."""
    context, key = request.app[CONTEXT], _owner(request)
    parser, template = context.parser_for(request), context.served.template

    def parse(body: dict[str, Any]) -> int:
        response = read(ResponsesBody, body)
        body = {**body, "input": context.stored.resolved(key, body.get("input"))}
        earlier = context.stored.before(key, response.previous_response_id)
        return chat_body(response, body, earlier.items).read(lambda chat: chat_tokens(chat, parser, template))

    n_tokens = await context.parsed(request, parse)
    return json_response(InputTokens("response.input_tokens", n_tokens))


async def chat_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/input_tokens."""
    context = request.app[CONTEXT]
    parser, template = context.parser_for(request), context.served.template
    n_tokens = await context.parsed(request, lambda body: chat_tokens(body, parser, template))
    return json_response(InputTokens("response.input_tokens", n_tokens))


class ResponsesReply(Reply):
    """An answer as output items."""

    id_prefix = "resp_"

    def __init__(
        self, job: Job, served: LoadedModel, config: ServerConfig, asked: dict[str, Any], keep: Keep | None
    ) -> None:
        super().__init__(job, served, config)
        self._asked = asked
        self._keep = keep  # told of the response when it is whole
        self._answers = Answers(self)
        self._blocks = Blocks()
        self._item_ids: list[str] = []
        self._n_events = 0
        self._untold: list[TokenProb] = []  # of tokens whose text is still to come
        self._extra: dict[str, Any] = {}  # further fields of deltas
        self._homes = homes(asked["tools"])

    def whole(self) -> object:
        result = self.chosen()[0]
        for token in result.tokens:
            self._add(result, token.text, token)
        self._add(result, result.finished.text)
        self._blocks.finish(cut=result.finished.stop_type == "limit")
        return self._final(result)

    def token(self, result: Result, token: Token) -> bytes:
        text = self._start(result)
        if self.options.timings_per_token and token.timings is not None:
            self._extra = {"timings": timings(token.timings)}
        return text + self._told(self._add(result, token.text, token))

    def progress(self, result: Result, progress: Progress) -> bytes:
        response = self._response("in_progress")
        return self._start(result) + self._event("response.in_progress", response=response, **progress_fields(progress))

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        text = self._start(result)
        steps = self._add(result, finished.text)
        steps += self._blocks.finish(cut=finished.stop_type == "limit")
        text += self._told(steps)
        final = self._final(result)
        return text + self._event(f"response.{final['status']}", response=final, timings=final["timings"])

    def _add(self, result: Result, text: str, token: Token | None = None) -> list[Step]:
        """The steps that more text makes: of a token, or the last. A text's block gets the entries of its tokens."""
        if token is not None and token.prob is not None and self.options.top is not None:
            self._untold.append(token.prob)
        deltas = self._answers.deltas(result, text, last=token is None)
        if not deltas:
            return []
        steps = self._blocks.add(deltas)
        shown = "".join([more for step, block, more in steps if step == MORE and block.kind == TEXT])
        if self._untold and shown:
            block = next(block for step, block, _ in steps if step == MORE and block.kind == TEXT)
            begins = any(step == BEGIN and of is block for step, of, _ in steps)
            probs, self._untold = _within(shown.encode(), self._untold, self.tokenizer, last=begins)
            post = result.request.sampling.post_sampling_probs
            block.logprobs += entries(probs, self.tokenizer, self.options.top or 0, post)
        elif not shown:
            self._untold = []
        return steps

    def failed(self, error: RequestError) -> bytes:
        """As OpenAI tells it, and `error` beside it, which makes its client raise."""
        told = error_object(error)
        return self._event("error", code=error.type, message=error.message, param=None, **told)

    def _start(self, result: Result) -> bytes:
        if result.opened:
            return b""
        result.opened = True
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "usage": None,
            **self._asked,
        }

    def _final(self, result: Result) -> dict[str, Any]:
        cut = result.finished.stop_type == "limit"
        usage = self.usage()
        response = {
            **self._response("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, _status(block)) for block in self._blocks.blocks],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": usage.prompt_tokens_details,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._answers.n_reasoning},
                "total_tokens": usage.total_tokens,
            },
            "timings": timings(result.finished.timings),
        }
        if self._keep is not None:
            self._keep(to_builtins(response))
        return response

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return sse({"type": kind, "sequence_number": number, **data}, kind)

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an output item; empty while it is in progress."""
        while len(self._item_ids) <= block.index:
            self._item_ids.append(secrets.token_urlsafe(24))
        text = "" if status == "in_progress" else block.text
        prefix = "ctc_" if block.custom else _IDS[block.kind]
        item: dict[str, Any] = {"id": prefix + self._item_ids[block.index], "status": status}
        if block.custom:
            return item | {"type": "custom_tool_call", "call_id": block.id, **self._called(block), "input": text}
        if block.kind == CALL:
            return item | {"type": "function_call", "call_id": block.id, **self._called(block), "arguments": text}
        content = [_part(block, text)] if status != "in_progress" else []
        if block.kind == REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _called(self, block: Block) -> dict[str, str]:
        return called(block.name, self._homes)

    def _told(self, steps: list[Step]) -> bytes:
        return b"".join([self._step(*step) for step in steps])

    def _step(self, step: str, block: Block, text: str) -> bytes:
        at: dict[str, Any] = {"output_index": block.index}
        item = self._item(block, "in_progress" if step == BEGIN else _status(block))
        inner = at | {"item_id": item["id"]} | ({} if block.kind == CALL else {"content_index": 0})
        if step == BEGIN:
            begun = self._event("response.output_item.added", **at, item=item)
            if block.kind == TEXT:
                begun += self._event("response.content_part.added", **inner, part=_part(block, ""))
            return begun
        kind = {TEXT: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}[block.kind]
        kind = "custom_tool_call_input" if block.custom else kind
        since, block.n_told = block.n_told, len(block.logprobs)
        told = block.logprobs[since:] if step == MORE else block.logprobs
        logprobs: dict[str, Any] = {"logprobs": told} if block.kind == TEXT else {}
        if step == MORE:
            return self._event(f"response.{kind}.delta", **inner, delta=text, **logprobs, **self._extra)
        whole = {"text": block.text}
        if block.custom:
            whole = {"input": block.text}
        elif block.kind == CALL:
            whole = {"arguments": block.text, "name": self._called(block)["name"]}
        ended = self._event(f"response.{kind}.done", **inner, **whole, **logprobs)
        if block.kind == TEXT:
            ended += self._event("response.content_part.done", **inner, part=_part(block, block.text))
        return ended + self._event("response.output_item.done", **at, item=item)


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


def _status(block: Block) -> str:
    """The status of an item that has ended."""
    return "incomplete" if block.cut else "completed"


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": block.logprobs if text else []}
