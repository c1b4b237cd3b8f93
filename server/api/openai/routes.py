"""OpenAI's completions: /v1/completions, /v1/chat/completions, their rendered prompts, the end of reasoning."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from msgspec import Struct

from logitless.engine.sampling.params import Param
from logitless.engine.sampling.sampler import RANDOM_SEED
from logitless.frontend.answers.llamacpp import Control
from logitless.frontend.answers.openai import RenderedRequest, RenderedSampling
from logitless.frontend.chat.chat import parse_chat
from logitless.frontend.fields import bad_request, read
from logitless.frontend.replies.openai import ChatReply, CompletionReply
from logitless.frontend.replies.reply import Reply
from logitless.server.api.context import CONTEXT, client_key, json_response
from logitless.server.api.generate import run


async def openai_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await run(request, await _completion_of(request))


async def chat_completion(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await run(request, await request.app[CONTEXT].reply(request, parse_chat, ChatReply))


async def render_completion(request: web.Request) -> web.Response:
    """POST /v1/completions/render, as vLLM has it: the token ids of each prompt."""
    return json_response(_rendered(await _completion_of(request)))


async def render_chat_completion(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/render, as vLLM has it: the token ids of the conversation."""
    return json_response(_rendered(await request.app[CONTEXT].reply(request, parse_chat, ChatReply))[0])


async def _completion_of(request: web.Request) -> Reply:
    return await request.app[CONTEXT].reply(request, lambda body, parser: parser.openai(body), CompletionReply)


def _rendered(reply: Reply) -> list[RenderedRequest]:
    """The job's prompts, each with its sampling. Nothing is generated."""
    job, result = reply.job, []
    for i, request in enumerate(job.requests[:: job.best_of]):
        s = request.sampling
        sampling = RenderedSampling(
            n=job.n,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            repetition_penalty=s.repeat_penalty,
            seed=None if s.seed == RANDOM_SEED else s.seed,
            stop=list(request.stop),
            ignore_eos=request.ignore_eos,
            max_tokens=None if request.n_predict < 0 else request.n_predict,
        )
        ids = [max(0, id) for id in request.prompt]
        name = reply.id if len(job.requests) == job.best_of else f"{reply.id}-{i}"
        result.append(RenderedRequest(name, ids, sampling, reply.model, job.params.stream))
    return result


class ControlBody(Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions/control."""

    id: Annotated[str, Param("the id of the completion that runs")]
    action: Annotated[str, Param("action", choices=("reasoning_end",))]


async def control(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/control: {"id": …, "action": "reasoning_end"} ends the reasoning of a completion that
    was asked for with `reasoning_control`."""
    context = request.app[CONTEXT]

    id = await context.parsed(request, lambda body: read(ControlBody, body).id)
    if not id:
        bad_request("id", "must not be empty")
    key, stream = context.running.get(id, ("", None))
    if stream is None or key != client_key(request):
        message = f"no completion with id {id[:64]!r} is running"
        return json_response(Control(id, False, message))  # as llama-server
    return json_response(Control(id, await context.service.end_reasoning(stream)))
