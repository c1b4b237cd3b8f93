"""Surroundings of graders: the models to ask, and the addresses and programs that the operator allows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from logitless.engine.async_engine import AsyncEngine
from logitless.engine.errors import RequestError
from logitless.frontend.answers.generation import Usage
from logitless.frontend.chat.chat import parse_chat
from logitless.frontend.config import FrontendConfig
from logitless.frontend.parser import RequestParser
from logitless.frontend.replies.openai import ChatReply
from logitless.training.graders.grade import GradeFault, Surroundings
from logitless.training.graders.public import names_private, public_opener
from logitless.training.graders.remote import SECONDS, NoRedirect, chat_body, server_at

LATER = 1 << 20  # priority of a grader's request: behind those of users


def surroundings(service: AsyncEngine, config: FrontendConfig) -> Surroundings:
    """The means of graders: this server's models, those at --grader-url, and what --allow-graders names."""
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


def _ask(service: AsyncEngine, config: FrontendConfig, body: dict[str, Any]) -> tuple[str, int]:
    """The answer of this server's model, and the tokens that it took. Not on the event loop's thread."""
    served = service.served
    if served is None:
        raise GradeFault("the model is not loaded", "model_grader_server_error")
    parser = RequestParser.of(served, config)

    async def answer() -> tuple[str, int]:
        requests = [replace(request, priority=LATER) for request in job.requests]
        async with asyncio.timeout(SECONDS), await service.submit(requests, "grader") as stream:
            async for index, event in stream:
                reply.add(index, event)
        whole = reply.whole()
        n_tokens = whole.usage.total_tokens if isinstance(whole.usage, Usage) else 0
        return str(whole.choices[0].message.content or ""), n_tokens

    try:
        job = parse_chat(body, parser)
        reply = ChatReply(job, served, config)
        return asyncio.run_coroutine_threadsafe(answer(), service.loop).result()
    except TimeoutError:
        problem = f"the model took more than {SECONDS:g} seconds"
        raise GradeFault(problem, "model_grader_server_error", timed_out=True) from None
    except (RequestError, RuntimeError) as error:
        raise GradeFault(str(error), "model_grader_server_error") from None
