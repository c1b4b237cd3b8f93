"""Graders of reinforcement learning: their trial by hand, and the means that the operator gives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from logitless.engine.async_engine import AsyncEngine
from logitless.engine.errors import RequestError
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.api.openai.chat import ChatReply
from logitless.server.config import ServerConfig
from logitless.server.outgoing.public import names_private, public_opener
from logitless.server.protocol.answers.fine_tuning import (
    Graded,
    GraderErrors,
    GraderMetadata,
    ValidGrader,
)
from logitless.server.protocol.answers.generation import Usage
from logitless.server.protocol.chat.chat import parse_chat
from logitless.server.protocol.completions import RequestParser
from logitless.server.protocol.fields import read
from logitless.server.protocol.fine_tuning import GraderBody, grader_of, parse_grading
from logitless.server.workers import to_thread
from logitless.training.graders.grade import Grade, GradeFault, Surroundings, graded
from logitless.training.graders.remote import SECONDS, NoRedirect, chat_body, server_at

LATER = 1 << 20  # priority of a grader's request: behind those of users


def surroundings(service: AsyncEngine, config: ServerConfig) -> Surroundings:
    """The means of graders: this server's models, those at --grader-url, and what --allow-graders
    names."""
    remote = server_at(config.grader_url, config.grader_key) if config.grader_url else None

    def complete(model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> tuple[str, int]:
        served = service.served
        adapters = served.adapters if served is not None else None
        if model in config.names or (adapters is not None and adapters.find(model) is not None):
            return _ask(service, config, chat_body(model, messages, sampling))
        if remote is None:
            raise GradeFault(f"there is no model {model!r} to ask, and no --grader-url", "model_grader_server_error")
        return remote(model, messages, sampling)

    allowed = frozenset(config.allow_graders)
    if config.private_addresses:
        return Surroundings(allowed, complete)
    return Surroundings(allowed, complete, public_opener(NoRedirect), names_private)


def _ask(service: AsyncEngine, config: ServerConfig, body: dict[str, Any]) -> tuple[str, int]:
    """The answer of this server's model, and the tokens that it took. Not on the event loop's thread."""
    served = service.served
    if served is None:
        raise GradeFault("the model is not loaded", "model_grader_server_error")
    parser = RequestParser(served.tokenizer, config, served.info.n_ctx, served.adapters, served.media)

    async def answer() -> tuple[str, int]:
        requests = [replace(request, priority=LATER) for request in job.requests]
        async with asyncio.timeout(SECONDS), await service.submit(requests, "grader") as stream:
            async for index, event in stream:
                reply.add(index, event)
        whole = reply.whole()
        n_tokens = whole.usage.total_tokens if isinstance(whole.usage, Usage) else 0
        return str(whole.choices[0].message.content or ""), n_tokens

    try:
        job = parse_chat(body, parser, served.template)
        reply = ChatReply(job, served, config)
        return asyncio.run_coroutine_threadsafe(answer(), service.loop).result()
    except TimeoutError:
        told = f"the model took more than {SECONDS:g} seconds"
        raise GradeFault(told, "model_grader_server_error", timed_out=True) from None
    except (RequestError, RuntimeError) as error:
        raise GradeFault(str(error), "model_grader_server_error") from None


async def validate(request: web.Request) -> web.Response:
    """POST /v1/fine_tuning/alpha/graders/validate."""
    context = request.app[CONTEXT]
    around = surroundings(context.service, context.config)

    def parse(body: dict[str, Any]) -> Mapping[str, Any]:
        asked = read(GraderBody, body)
        grader_of(asked.grader, around)
        return asked.grader

    return json_response(ValidGrader(grader=dict(await context.parsed(request, parse))))


async def run(request: web.Request) -> web.Response:
    """POST /v1/fine_tuning/alpha/graders/run."""
    context = request.app[CONTEXT]
    around = surroundings(context.service, context.config)
    grader, sample, item = await context.parsed(request, lambda body: parse_grading(body, around))
    began = time.monotonic()
    grade = await to_thread(partial(graded, grader, sample, item))
    seconds = time.monotonic() - began
    metadata = GraderMetadata(
        name=grader.name,
        type=grader.kind,
        errors=_errors(grade),
        execution_time=seconds,
        scores=grade.parts or {grader.name: grade.reward},
        token_usage=sum(grade.tokens.values()) if grade.tokens else None,
        sampled_model_name=next(iter(grade.tokens), None),
    )
    return json_response(
        Graded(
            reward=grade.reward,
            sub_rewards=grade.parts,
            metadata=metadata,
            model_grader_token_usage_per_model=grade.tokens,
        )
    )


def _errors(grade: Grade) -> GraderErrors:
    flags: dict[str, Any] = dict.fromkeys(grade.errors, True)
    for name in ("python_grader_runtime_error", "model_grader_server_error"):
        if name in grade.errors:
            flags[f"{name}_details"] = grade.errors[name]
    if "python_grader_server_error" in grade.errors:
        flags["python_grader_server_error_type"] = grade.errors["python_grader_server_error"]
    details = grade.problem or None
    return GraderErrors(**flags, details=details)
