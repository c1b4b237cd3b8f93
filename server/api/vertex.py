"""Vertex AI's prediction route, present where Vertex sets AIP_MODE=PREDICTION."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any

from aiohttp import web
from msgspec import Struct

from logitless.engine.errors import InvalidRequest, RequestError
from logitless.engine.sampling.params import Param
from logitless.frontend.answers.openai import Predictions
from logitless.frontend.chat.chat import parse_chat
from logitless.frontend.fields import bad_request, read
from logitless.frontend.parser import GenerationJob, RequestParser
from logitless.frontend.replies.openai import ChatReply
from logitless.server.api.context import CONTEXT
from logitless.server.api.generate import collected, send_json

FORMAT = "@requestFormat"


class PredictBody(Struct, frozen=True, kw_only=True):
    """POST /predict."""

    instances: Annotated[Sequence[Any], Param("chat requests, each with @requestFormat", least=1, most=64)]


async def predict(request: web.Request) -> web.StreamResponse:
    """POST /predict: {"instances": [{"@requestFormat": "chatCompletions", …}]} → {"predictions": [completions]}."""
    context = request.app[CONTEXT]
    _ = context.writer

    def parse(body: dict[str, Any], parser: RequestParser) -> list[GenerationJob]:
        return [one(i, instance, parser) for i, instance in enumerate(read(PredictBody, body).instances)]

    def one(i: int, instance: object, parser: RequestParser) -> GenerationJob:
        if not isinstance(instance, dict) or instance.get(FORMAT) != "chatCompletions":
            bad_request(f"instances[{i}]", f"must be an object whose {FORMAT} is chatCompletions")
        if instance.get("stream"):
            bad_request(f"instances[{i}].stream", "predictions are told as a whole only")
        try:
            return parse_chat({name: value for name, value in instance.items() if name != FORMAT}, parser)
        except RequestError as error:
            raise InvalidRequest(f"instances[{i}]: {error.message}") from None

    predictions: list[Any] = []
    async with AsyncExitStack() as stack:
        for job in await context.read(request, parse):
            reply = ChatReply(job, context.served, context.config)
            await stack.enter_async_context(collected(request, reply))
            predictions.append(reply.whole())
        return await send_json(request, lambda: Predictions(predictions))
