"""Routes of the HTTP API: handlers, meanings, types, and the part of a router.

The application, the OpenAPI document, the reference, the router and the shape of errors read this
table. Types are written as text (logitless.server.openapi.operations has their names), so that a
server without readers of its documentation does not import them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

from aiohttp import web

from logitless import hooks

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JSON, FORM, BYTES = "application/json", "multipart/form-data", "application/octet-stream"
NATIVE, OPENAI, ANTHROPIC, OLLAMA = "native", "OpenAI", "Anthropic", "Ollama"
AROUND, HERE = "around", "here"  # a router asks all models, or answers itself as a model's server does
# modules of handlers; others are imported at their first request
_EAGER = frozenset(["anthropic.routes", "info", "llamacpp.routes", "llamacpp.slots", "openai.routes"])
_EAGER |= {"openai.embeddings", "openai.responses"}


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. A list of types has one of them."""

    method: str
    path: str
    handler: str  # below logitless.server.api, or the whole name of an extra's
    tag: str
    summary: str  # "": it is not documented
    body: Any = None  # a tuple: all fields of these; (): any object
    answer: Any = None  # None: no content, with the status `empty`
    events: Any = None  # data of a stream's events (Ollama: lines, unless a request says no); None: no stream
    aliases: tuple[str, ...] = ()
    query: Any = None  # type by name
    raw: bool = False  # the body is a file
    example: Any = None  # a body
    media: str = JSON  # of the answer
    empty: int = 204
    refused: bool = False  # there is no answer but an error
    router: str = ""  # AROUND, HERE; "": a router sends it on to the model that it names
    public: bool = False  # no key is asked for
    polled: bool = False  # state that pages and monitors read again and again: logged with -v only, while it succeeds

    @property
    def paths(self) -> tuple[str, ...]:
        """The path and its aliases."""
        return (self.path, *self.aliases)

    def load(self) -> Handler:
        """The handler; its module may be imported at its first request."""
        module, _, function = self.handler.rpartition(".")
        name = module if module.startswith("logitless.") else f"logitless.server.api.{module}"
        if module in _EAGER:
            handler: Handler = getattr(import_module(name), function)
            return handler

        async def handle(request: web.Request) -> web.StreamResponse:
            handler: Handler = getattr(import_module(name), function)
            return await handler(request)

        return handle


_get, _post, _delete = (partial(Route, method) for method in ("get", "post", "delete"))
_HELLO = [{"role": "user", "content": "Hello"}]
_GRADER = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
_SHAKESPEARE = {"model": "shakespeare"}

ROUTES: tuple[Route, ...] = (
    _get("/health", "info.health", "server", "State: 503 until the model is loaded", answer="models.Health",
         aliases=("/v1/health",), public=True, polled=True),
    _get("/v1/models", "info.models", "server", "The model and its finetunes",
         answer="[models.Models, anthropic.ModelList]", aliases=("/models",), query="{'checkpoints': bool}",
         public=True, polled=True),
    _get("/v1/models/{id:.+}", "info.model", "server", "One model", answer="[models.ModelEntry, anthropic.ModelInfo]"),
    _delete("/v1/models/{id:.+}", "openai.fine_tuning.delete_model", "training", "Delete a fine-tuned model",
         answer="fine_tuning.Deleted"),
    _get("/props", "info.props", "server", "Properties and default settings", answer="llamacpp.Props", polled=True),
    _post("/props", "info.change_props", "server", "Change properties (needs --props)", body="()",
         answer="llamacpp.Done", example={}),
    _get("/metrics", "info.metrics", "server", "Prometheus metrics (needs --metrics)", answer="str", media="text/plain",
         polled=True),
    _get("/openapi.json", "info.openapi", "server", "This document", answer="models.ApiDocument"),
    _get("/slots", "llamacpp.slots.slots", "slots", "State of every slot", answer="list[llamacpp.SlotState]",
         query="{'fail_on_no_slot': int}", polled=True),
    _post("/slots/{id}", "llamacpp.slots.slot_action", "slots", "Save, restore, erase or fork a slot",
         body="[SlotFileBody, ForkBody]", answer="llamacpp.SlotAction", query="_ACTION",
         example={"filename": "chat.bin"}),
    _get("/v1/stream", "llamacpp.resume.follow", "streams", "A stream from byte `from` on", events="Any",
         query="_CONVERSATION | _FROM"),
    _get("/v1/stream/{id}", "llamacpp.resume.follow", "streams", "A stream from byte `from` on", events="Any",
         query="_FROM"),
    _delete("/v1/stream", "llamacpp.resume.stop", "streams", "End a stream", query="_CONVERSATION"),
    _delete("/v1/stream/{id}", "llamacpp.resume.stop", "streams", "End a stream"),
    _post("/v1/streams/lookup", "llamacpp.resume.lookup", "streams", "States of streams", body="LookupBody",
         answer="list[llamacpp.StreamState]", example={"conversation_ids": ["mine"]}),
    _get("/lora-adapters", "llamacpp.routes.adapters", "adapters", "The adapters and their scales",
         answer="list[llamacpp.Adapter]", polled=True),
    _post("/lora-adapters", "llamacpp.routes.set_scales", "adapters", "Set the adapters' scales", body="Scales",
         answer="llamacpp.Done", example=[]),
    _post("/completion", "llamacpp.routes.native_completion", NATIVE, "Continue a text", body="Completion",
         answer="COMPLETIONS", events="COMPLETION_EVENTS", aliases=("/completions",),
         example={"prompt": "Once upon a time", "n_predict": 8, "n_probs": 2}),
    _post("/infill", "llamacpp.routes.infill", NATIVE, "Fill a gap in a text", body="Infill", answer="COMPLETIONS",
         events="COMPLETION_EVENTS", example={"input_prefix": "def f(", "input_suffix": "return x", "n_predict": 8}),
    _post("/tokenize", "llamacpp.routes.tokenize", NATIVE, "Tokenize a text", body="(TokenizeBody, CountBody)",
         answer="[llamacpp.TokenIds, llamacpp.TokenPieces, llamacpp.TokenizedPrompt]",
         example={"content": "Hello", "with_pieces": True}),
    _post("/detokenize", "llamacpp.routes.detokenize", NATIVE, "The text of tokens", body="DetokenizeBody",
         answer="llamacpp.DetokenizedText", example={"tokens": [5, 6]}),
    _get("/tokenizer_info", "llamacpp.routes.tokenizer_info", NATIVE, "Special tokens and chat template",
         answer="llamacpp.TokenizerInfo"),
    _post("/apply-template", "llamacpp.routes.apply_template", NATIVE, "Render a chat as a prompt", body="CHAT",
         answer="llamacpp.RenderedPrompt", example={"messages": _HELLO}),
    _post("/v1/completions", "openai.routes.openai_completion", OPENAI, "Continue a text", body="OpenAICompletion",
         answer="openai.TextCompletion", events="openai.TextChunk",
         example={"prompt": "Once upon a time", "max_tokens": 8, "logprobs": 2}),
    _post("/v1/verify", "llamacpp.routes.verify", NATIVE, "Number of accepted tokens of a draft", body="Verify",
         answer="generation.Verification", aliases=("/verify",),
         example={"prompt": "Once upon a", "draft_tokens": [5, 6]}),
    _post("/v1/chat/completions", "openai.routes.chat_completion", OPENAI, "Answer in a chat", body="CHAT",
         answer="openai.ChatCompletion", events="openai.ChatChunk", aliases=("/chat/completions",),
         example={"messages": _HELLO, "max_tokens": 8}),
    _post("/v1/completions/render", "openai.routes.render_completion", OPENAI, "Token ids of prompts, as vLLM's",
         body="OpenAICompletion", answer="list[openai.RenderedRequest]",
         example={"prompt": "Once upon a time", "max_tokens": 8}),
    _post("/v1/chat/completions/render", "openai.routes.render_chat_completion", OPENAI,
         "Token ids of a chat's prompt, as vLLM's", body="CHAT", answer="openai.RenderedRequest",
         example={"messages": _HELLO}),
    _post("/v1/chat/completions/input_tokens", "openai.responses.chat_input_tokens", OPENAI, "Count a chat's tokens",
         body="CHAT", answer="llamacpp.InputTokens", aliases=("/chat/completions/input_tokens",),
         example={"messages": _HELLO}),
    _post("/v1/chat/completions/control", "openai.routes.control", OPENAI, "End a running answer's reasoning",
         body="ControlBody", answer="llamacpp.Control", example={"id": "chatcmpl-1", "action": "reasoning_end"},
         router=AROUND),
    _post("/v1/responses", "openai.responses.responses", OPENAI, "Answer, in the Responses API", body="RESPONSES",
         answer="responses.Response", events="RESPONSE_EVENTS", aliases=("/responses",),
         example={"input": "Hello", "max_output_tokens": 8}),
    _post("/v1/responses/input_tokens", "openai.responses.responses_input_tokens", OPENAI,
         "Count the tokens of an input", body="RESPONSES", answer="llamacpp.InputTokens",
         aliases=("/responses/input_tokens",), example={"input": "Hello"}),
    _get("/v1/responses/{id}", "openai.responses.response", OPENAI, "A stored response", answer="responses.Response",
         events="RESPONSE_EVENTS", query="{'stream': bool, 'starting_after': Annotated[int, Meta(ge=0)]}",
         router=AROUND),
    _delete("/v1/responses/{id}", "openai.responses.forget", OPENAI, "Forget a response", answer="fine_tuning.Deleted",
         router=AROUND),
    _get("/v1/responses/{id}/input_items", "openai.responses.input_items", OPENAI, "Input items of a stored response",
         answer="fine_tuning.Page[responses.InputItem]", query="_PAGE | _ORDER", router=AROUND),
    _post("/v1/responses/{id}/cancel", "openai.responses.cancel", OPENAI, "End a response in the background",
         answer="responses.Response", router=AROUND),
    _post("/v1/conversations", "openai.conversations.create", OPENAI, "Begin a conversation",
         body="conversations.ConversationBody", answer="responses.Conversation",
         example={"items": _HELLO, "metadata": {"topic": "greetings"}}),
    _get("/v1/conversations/{id}", "openai.conversations.conversation", OPENAI, "A conversation",
         answer="responses.Conversation", router=AROUND),
    _post("/v1/conversations/{id}", "openai.conversations.update", OPENAI, "Replace a conversation's metadata",
         body="conversations.MetadataBody", answer="responses.Conversation",
         example={"metadata": {"topic": "greetings"}}, router=AROUND),
    _delete("/v1/conversations/{id}", "openai.conversations.delete", OPENAI, "Forget a conversation",
         answer="responses.DeletedConversation", router=AROUND),
    _get("/v1/conversations/{id}/items", "openai.conversations.items", OPENAI, "Items of a conversation",
         answer="responses.ConversationItems",
         query="{'limit': Annotated[int, Meta(ge=1, le=conversations.MAX_PAGE)], 'after': str} | _ORDER",
         router=AROUND),
    _post("/v1/conversations/{id}/items", "openai.conversations.add", OPENAI, "Append items to a conversation",
         body="conversations.ItemsBody", answer="responses.ConversationItems", example={"items": _HELLO},
         router=AROUND),
    _get("/v1/conversations/{id}/items/{item}", "openai.conversations.item", OPENAI, "An item of a conversation",
         answer="responses.InputItem", router=AROUND),
    _delete("/v1/conversations/{id}/items/{item}", "openai.conversations.remove", OPENAI,
         "Drop an item of a conversation", answer="responses.Conversation", router=AROUND),
    _post("/v1/embeddings", "openai.embeddings.openai_embeddings", "vectors", "Vectors of texts", body="EmbeddingBody",
         answer="vectors.Embeddings", example={"input": ["one text", "another"], "encoding_format": "base64"}),
    _post("/embedding", "openai.embeddings.native_embeddings", "vectors", "Vectors of texts, in llama-server's form",
         body="EmbeddingBody", answer="list[vectors.NativeEmbedding]", aliases=("/embeddings",),
         example={"content": "a text"}),
    _post("/rerank", "openai.embeddings.rerank", "vectors", "Order texts by their relevance", body="RerankBody",
         answer="RERANKED", aliases=("/reranking", "/v1/rerank", "/v1/reranking"),
         example={"query": "tea", "documents": ["green tea", "a horse"], "top_n": 1}),
    _post("/v1/messages", "anthropic.routes.messages", ANTHROPIC, "Answer, in the Messages API", body="MESSAGES",
         answer="anthropic.Message", events="anthropic.MessageEvent", example={"messages": _HELLO, "max_tokens": 8}),
    _post("/v1/messages/count_tokens", "anthropic.routes.count_tokens", ANTHROPIC, "Count a message's tokens",
         body="MESSAGES", answer="anthropic.CountedTokens", example={"messages": _HELLO}),
    _post("/api/generate", "ollama.routes.generate", OLLAMA, "Answer a prompt, or continue a text",
         body="ollama_bodies.GenerateBody", answer="ollama.OllamaAnswer", events="ollama.OllamaAnswer",
         example=_SHAKESPEARE | {"prompt": "Once upon a time", "options": {"num_predict": 8}}),
    _post("/api/chat", "ollama.routes.chat", OLLAMA, "Answer in a conversation", body="ollama_bodies.ChatBody",
         answer="ollama.OllamaAnswer", events="ollama.OllamaAnswer",
         example=_SHAKESPEARE | {"messages": _HELLO, "options": {"num_predict": 8}}),
    _post("/api/embed", "ollama.routes.embed", OLLAMA, "Vectors of texts, of length 1",
         body="ollama_bodies.EmbedBody", answer="ollama.OllamaVectors",
         example=_SHAKESPEARE | {"input": ["one text", "another"]}),
    _post("/api/embeddings", "ollama.routes.embeddings", OLLAMA, "One text's vector",
         body="ollama_bodies.EmbeddingsBody", answer="ollama.OllamaVector",
         example=_SHAKESPEARE | {"prompt": "a text"}),
    _get("/api/tags", "ollama.routes.tags", OLLAMA, "The models", answer="ollama.ListedModels", public=True,
         polled=True),
    _get("/api/ps", "ollama.routes.ps", OLLAMA, "The loaded models", answer="ollama.ListedModels", polled=True),
    _get("/api/v0/models", "ollama.routes.lmstudio_models", OLLAMA, "The models, in the shape of LM Studio",
         answer="models.LMStudioModels"),
    _post("/api/show", "ollama.routes.show", OLLAMA, "A model's metadata, chat template and capabilities",
         body="ollama_bodies.ShowBody", answer="ollama.ShownModel", example=_SHAKESPEARE),
    _get("/api/version", "ollama.routes.version", OLLAMA, "Version of Ollama that this API follows",
         answer="ollama.OllamaVersion", public=True, polled=True),
    _post("/api/pull", "ollama.routes.only_in_router", OLLAMA, "Download a model (a router's)",
         body="ollama_bodies.PullBody", answer="ollama.PullProgress", events="ollama.PullProgress"),
    _post("/api/push", "ollama.routes.not_here", OLLAMA, "Refused: nothing is uploaded from here",
         body="ollama_bodies.Named", refused=True),
    _delete("/api/delete", "ollama.routes.only_in_router", OLLAMA, "Delete a model (a router's)",
         body="ollama_bodies.Named", empty=200),
    _post("/v1/audio/transcriptions", "transcriptions.transcriptions", OPENAI, "The text of a sound",
         body="TranscriptionForm", answer="[transcriptions.SpokenText, transcriptions.VerboseText]",
         events="[transcriptions.SpokenDelta, transcriptions.SpokenDone]"),
    _post("/v1/audio/translations", "transcriptions.translations", OPENAI, "The text of a sound, in English",
         body="TranslationForm", answer="[transcriptions.SpokenText, transcriptions.VerboseText]",
         events="[transcriptions.SpokenDelta, transcriptions.SpokenDone]"),
    _post("/v1/score", "openai.embeddings.score", "training", "Likelihoods of texts", body="ScoreBody",
         answer="vectors.Scores", example={"input": ["a text to score"]}),
    _get("/v1/batches", "batches.openai.batches", "batches", "The batches", answer="fine_tuning.Page[batches.Batch]",
         query="_PAGE", polled=True),
    _post("/v1/batches", "batches.openai.create", "batches", "Answer the requests of a file", body="BatchBody",
         answer="batches.Batch", example={"input_file_id": "file-1", "endpoint": "/v1/completions"}),
    _get("/v1/batches/{id}", "batches.openai.batch", "batches", "One batch", answer="batches.Batch", polled=True),
    _post("/v1/batches/{id}/cancel", "batches.openai.cancel", "batches", "End a batch", answer="batches.Batch"),
    _get("/v1/messages/batches", "batches.messages.batches", ANTHROPIC, "The message batches",
         answer="batches.MessageBatchPage",
         query="{'limit': Annotated[int, Meta(ge=1, le=1000)], 'after_id': str, 'before_id': str}"),
    _post("/v1/messages/batches", "batches.messages.create", ANTHROPIC, "Answer many messages", body="MessageBatchBody",
         answer="batches.MessageBatch",
         example={"requests": [{"custom_id": "a", "params": {"messages": _HELLO, "max_tokens": 8}}]}),
    _get("/v1/messages/batches/{id}", "batches.messages.batch", ANTHROPIC, "One message batch",
         answer="batches.MessageBatch"),
    _delete("/v1/messages/batches/{id}", "batches.messages.delete", ANTHROPIC, "Delete an ended message batch",
         answer="batches.DeletedBatch"),
    _post("/v1/messages/batches/{id}/cancel", "batches.messages.cancel", ANTHROPIC, "End a message batch",
         answer="batches.MessageBatch"),
    _get("/v1/messages/batches/{id}/results", "batches.messages.results", ANTHROPIC, "A line for each request",
         answer="str", media="application/x-jsonl"),
    _get("/v1/files", "openai.files.files", "training", "The uploaded files",
         answer="fine_tuning.Page[fine_tuning.File]", query="_PAGE | _ORDER | {'purpose': str}", router=HERE),
    _post("/v1/files", "openai.files.upload", "training", "Upload a file", body="UploadForm", answer="fine_tuning.File",
         router=HERE),
    _get("/v1/files/{id}", "openai.files.file", "training", "One file's entry", answer="fine_tuning.File", router=HERE),
    _delete("/v1/files/{id}", "openai.files.delete", "training", "Delete a file", answer="fine_tuning.Deleted",
         router=HERE),
    _get("/v1/files/{id}/content", "openai.files.content", "training", "One file's bytes", answer="bytes",
         media="application/octet-stream", router=HERE),
    _get("/v1/fine_tuning/jobs", "openai.fine_tuning.jobs", "training", "The jobs",
         answer="fine_tuning.Page[fine_tuning.Job]", query="_PAGE", router=HERE, polled=True),
    _post("/v1/fine_tuning/jobs", "openai.fine_tuning.create", "training", "Begin a job", body="JobBody",
         answer="fine_tuning.Job", example={"model": "a-model", "training_file": "file-1"}),
    _get("/v1/fine_tuning/jobs/{id}", "openai.fine_tuning.job", "training", "One job", answer="fine_tuning.Job",
         router=HERE, polled=True),
    _post("/v1/fine_tuning/jobs/{id}/cancel", "openai.fine_tuning.cancel", "training", "End a job",
         answer="fine_tuning.Job", router=HERE),
    _post("/v1/fine_tuning/jobs/{id}/pause", "openai.fine_tuning.pause", "training", "Pause a job",
         answer="fine_tuning.Job", router=HERE),
    _post("/v1/fine_tuning/jobs/{id}/resume", "openai.fine_tuning.resume", "training", "Go on with a job",
         answer="fine_tuning.Job"),
    _get("/v1/fine_tuning/jobs/{id}/events", "openai.fine_tuning.events", "training", "A job's messages and metrics",
         answer="fine_tuning.Page[fine_tuning.JobEvent]", events="fine_tuning.JobEvent",
         query="_PAGE | {'stream': bool}", router=HERE, polled=True),
    _get("/v1/fine_tuning/jobs/{id}/checkpoints", "openai.fine_tuning.checkpoints", "training", "A job's checkpoints",
         answer="fine_tuning.Page[fine_tuning.Checkpoint]", query="_PAGE", router=HERE, polled=True),
    _post("/v1/fine_tuning/alpha/graders/run", "openai.fine_tuning.grade", "training", "Grade an answer",
         body="GradeBody", answer="fine_tuning.Graded",
         example={"grader": _GRADER, "model_sample": "4", "item": {"answer": "4"}}),
    _post("/v1/fine_tuning/alpha/graders/validate", "openai.fine_tuning.validate_grader", "training", "Check a grader",
         body="GraderBody", answer="fine_tuning.ValidGrader", example={"grader": _GRADER}),
    _post("/predict", "vertex.predict", "server", "Vertex AI: answer several chats", body="PredictBody",
         answer="openai.Predictions"),
)  # fmt: skip
PUBLIC = frozenset(path for route in ROUTES if route.public for path in route.paths)


@cache
def all_routes() -> tuple[Route, ...]:
    """The routes of the core and of the extras."""
    return (*ROUTES, *hooks.rows("routes"))


def routes() -> Iterator[Route]:
    """The routes of a model's server, without the page: /predict is there where Vertex AI runs it."""
    is_vertex = os.environ.get("AIP_MODE") == "PREDICTION"
    return (route for route in all_routes() if is_vertex or route.path != "/predict")


@cache
def polled() -> frozenset[str]:
    """Paths of state that is read again and again."""
    return frozenset(path for route in all_routes() if route.polled for path in route.paths)
