"""The documented operations: the routes with the types of their bodies and answers."""

# ruff: noqa: F401
# (the routes name the imported types)
from __future__ import annotations

import re
from dataclasses import replace
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from logitless.frontend.answers import (
    anthropic,
    batches,
    errors,
    fine_tuning,
    generation,
    llamacpp,
    models,
    ollama,
    openai,
    responses,
    transcriptions,
    vectors,
)
from logitless.frontend.chat.chat import ChatGeneration
from logitless.frontend.chat.messages import Chat
from logitless.frontend.dialects import ollama as ollama_bodies
from logitless.frontend.dialects.anthropic import MessagesBody
from logitless.frontend.dialects.responses import ResponsesBody
from logitless.frontend.dialects.transcriptions import TranscriptionForm, TranslationForm
from logitless.frontend.fine_tuning import GradeBody, GraderBody, JobBody
from logitless.frontend.lora import Scales
from logitless.frontend.parser import Completion, OpenAICompletion
from logitless.frontend.texts.embeddings import EmbeddingBody, RerankBody
from logitless.frontend.texts.infill import Infill
from logitless.frontend.texts.score import ScoreBody
from logitless.frontend.texts.verify import Verify
from logitless.server.api.batches.batch import BatchBody, MessageBatchBody
from logitless.server.api.llamacpp.resume import LookupBody
from logitless.server.api.llamacpp.routes import CountBody, DetokenizeBody, TokenizeBody
from logitless.server.api.llamacpp.slots import ForkBody, SlotFileBody
from logitless.server.api.openai import conversations
from logitless.server.api.openai.files import UploadForm
from logitless.server.api.openai.routes import ControlBody
from logitless.server.api.vertex import PredictBody
from logitless.server.routes import ANTHROPIC, OLLAMA, Route, all_routes

ERRORS = {ANTHROPIC: errors.AnthropicError, OLLAMA: errors.OllamaError}  # by tag; others: errors.Error
Body = tuple[type[Struct], ...] | list[type[Struct]]
CHAT = (Chat, ChatGeneration)
RESPONSES, MESSAGES = (ChatGeneration, ResponsesBody), (ChatGeneration, MessagesBody)
COMPLETIONS = [
    generation.NativeCompletion,
    list[generation.NativeCompletion],
    generation.Selected,
    list[generation.Selected],
]
COMPLETION_EVENTS = [generation.NativeChunk, generation.NativeCompletion]
RESPONSE_EVENTS = [
    responses.StatusEvent,
    responses.ItemEvent,
    responses.PartEvent,
    responses.DeltaEvent,
    responses.WholeEvent,
    responses.McpEvent,
    responses.FailureEvent,
]
RERANKED = [vectors.Ranking, list[vectors.TeiRankedDocument]]
_ORDER: dict[str, Any] = {"order": Literal["asc", "desc"]}
_PAGE: dict[str, Any] = {"limit": Annotated[int, Meta(ge=1, le=10_000)], "after": str}
_FROM: dict[str, Any] = {"from": Annotated[int, Meta(ge=0)]}
_URL: dict[str, Any] = {"url": str}
_CONVERSATION: dict[str, Any] = {"conv_id": str}
_ACTION: dict[str, Any] = {"action": Literal["save", "restore", "erase", "fork"]}


def _typed(route: Route) -> Route:
    """The route with types in the place of their names, and a path as OpenAPI writes it."""
    body, answer, events, query = (
        None if text is None else resolve_name(text) if text.startswith("logitless.") else eval(text, globals())
        for text in (route.body, route.answer, route.events, route.query)
    )
    path = re.sub(r"{(\w+):[^}]*}", r"{\1}", route.path)
    body = (body,) if isinstance(body, type) else body
    return replace(route, path=path, body=body, answer=answer, events=events, query=query)


OPERATIONS: tuple[Route, ...] = tuple(_typed(route) for route in all_routes() if route.summary)
