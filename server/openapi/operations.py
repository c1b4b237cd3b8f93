"""The endpoints of the API: for each its route, its meaning, and the types of its body and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
from logitless.server.api.generate import ControlBody
from logitless.server.api.llamacpp.resume import LookupBody
from logitless.server.api.llamacpp.slots import ForkBody, SlotFileBody
from logitless.server.api.llamacpp.text import CountBody, DetokenizeBody, TokenizeBody
from logitless.server.api.openai import conversations
from logitless.server.api.openai.files import UploadForm
from logitless.server.api.tools import ToolCall
from logitless.server.api.vertex import PredictBody

JSON, FORM, BYTES = "application/json", "multipart/form-data", "application/octet-stream"
NATIVE, OPENAI, ANTHROPIC, OLLAMA = "native", "OpenAI", "Anthropic", "Ollama"
ERRORS = {ANTHROPIC: errors.AnthropicError, OLLAMA: errors.OllamaError}  # by tag; others: errors.Error
Body = tuple[type[Struct], ...] | list[type[Struct]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. A list of types has one of them."""

    method: str
    path: str
    tag: str
    summary: str
    body: Body | None = None  # a tuple: all fields of these; (): any object
    answer: Any = None  # None: no content, with the status `empty`
    events: Any = None  # data of a stream's events (Ollama: lines, unless a request says no); None: no stream
    aliases: tuple[str, ...] = ()
    query: Mapping[str, Any] | None = None  # type by name
    raw: bool = False  # the body is a file
    example: Any = None  # a body
    media: str = JSON  # of the answer
    empty: int = 204
    refused: bool = False  # there is no answer but an error


_get, _post, _delete = (partial(Operation, method) for method in ("get", "post", "delete"))
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
_ID, _JOBS, _TALKS = "/v1/models/{id}", "/v1/fine_tuning/jobs", "/v1/conversations"
_BATCHES, _MESSAGE_BATCHES = "/v1/batches", "/v1/messages/batches"
_ORDER: dict[str, Any] = {"order": Literal["asc", "desc"]}
_PAGE: dict[str, Any] = {"limit": Annotated[int, Meta(ge=1, le=10_000)], "after": str}
_FROM: dict[str, Any] = {"from": Annotated[int, Meta(ge=0)]}
_URL: dict[str, Any] = {"url": str}
_CONVERSATION: dict[str, Any] = {"conv_id": str}
_ACTION: dict[str, Any] = {"action": Literal["save", "restore", "erase", "fork"]}
_SAID = [{"role": "user", "content": "Hello"}]
_GRADER = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
_SHAKESPEARE = {"model": "shakespeare"}

OPERATIONS: tuple[Operation, ...] = (
    _get("/health", "server", "State: 503 until the model is loaded", answer=models.Health, aliases=("/v1/health",)),
    _get(
        "/v1/models",
        "server",
        "The model and its finetunes",
        answer=[models.Models, anthropic.ModelList],
        aliases=("/models",),
        query={"checkpoints": bool},
    ),
    _get(_ID, "server", "One model", answer=[models.ModelEntry, anthropic.ModelInfo]),
    _delete(_ID, "training", "Delete a fine-tuned model", answer=fine_tuning.Deleted),
    _get("/props", "server", "Properties and default settings", answer=llamacpp.Props),
    _post("/props", "server", "Change properties (needs --props)", (), llamacpp.Done, example={}),
    _get("/metrics", "server", "Prometheus metrics (needs --metrics)", answer=str, media="text/plain"),
    _get("/openapi.json", "server", "This document", answer=models.ApiDocument),
    _get(
        "/cors-proxy",
        "server",
        "A configured MCP server's answer (needs --ui-mcp-proxy)",
        answer=bytes,
        media="application/octet-stream",
        query=_URL,
    ),
    _post(
        "/cors-proxy",
        "server",
        "The same of a body (needs --ui-mcp-proxy)",
        (),
        bytes,
        media="application/octet-stream",
        query=_URL,
    ),
    _delete("/cors-proxy", "server", "End of a session: nothing is sent on", query=_URL, empty=200),
    _get(
        "/tools", "server", "Tools that the server runs (needs --tools or MCP servers)", answer=list[llamacpp.ToolEntry]
    ),
    _post(
        "/tools",
        "server",
        "Run a tool (needs --tools or MCP servers)",
        (ToolCall,),
        llamacpp.ToolAnswer,
        example={"tool": "get_info"},
    ),
    _get(
        "/slots",
        "slots",
        "State of every slot",
        answer=list[llamacpp.SlotState],
        query={"fail_on_no_slot": int},
    ),
    _post(
        "/slots/{id}",
        "slots",
        "Save, restore, erase or fork a slot",
        [SlotFileBody, ForkBody],
        llamacpp.SlotAction,
        query=_ACTION,
        example={"filename": "chat.bin"},
    ),
    _get("/v1/stream", "streams", "A stream from byte `from` on", events=Any, query=_CONVERSATION | _FROM),
    _get("/v1/stream/{id}", "streams", "A stream from byte `from` on", events=Any, query=_FROM),
    _delete("/v1/stream", "streams", "End a stream", query=_CONVERSATION),
    _delete("/v1/stream/{id}", "streams", "End a stream"),
    _post(
        "/v1/streams/lookup",
        "streams",
        "States of streams",
        (LookupBody,),
        list[llamacpp.StreamState],
        example={"conversation_ids": ["mine"]},
    ),
    _get("/lora-adapters", "adapters", "The adapters and their scales", answer=list[llamacpp.Adapter]),
    _post("/lora-adapters", "adapters", "Set the adapters' scales", (Scales,), llamacpp.Done, example=[]),
    _post(
        "/completion",
        NATIVE,
        "Continue a text",
        (Completion,),
        COMPLETIONS,
        COMPLETION_EVENTS,
        ("/completions",),
        example={"prompt": "Once upon a time", "n_predict": 8, "n_probs": 2},
    ),
    _post(
        "/infill",
        NATIVE,
        "Fill a gap in a text",
        (Infill,),
        COMPLETIONS,
        COMPLETION_EVENTS,
        example={"input_prefix": "def f(", "input_suffix": "return x", "n_predict": 8},
    ),
    _post(
        "/tokenize",
        NATIVE,
        "Tokenize a text",
        (TokenizeBody, CountBody),
        [llamacpp.TokenIds, llamacpp.TokenPieces, llamacpp.TokenizedPrompt],
        example={"content": "Hello", "with_pieces": True},
    ),
    _post(
        "/detokenize",
        NATIVE,
        "The text of tokens",
        (DetokenizeBody,),
        llamacpp.DetokenizedText,
        example={"tokens": [5, 6]},
    ),
    _get("/tokenizer_info", NATIVE, "Special tokens and chat template", answer=llamacpp.TokenizerInfo),
    _post(
        "/apply-template",
        NATIVE,
        "Render a chat as a prompt",
        CHAT,
        llamacpp.RenderedPrompt,
        example={"messages": _SAID},
    ),
    _post(
        "/v1/completions",
        OPENAI,
        "Continue a text",
        (OpenAICompletion,),
        openai.TextCompletion,
        openai.TextChunk,
        example={"prompt": "Once upon a time", "max_tokens": 8, "logprobs": 2},
    ),
    _post(
        "/v1/verify",
        NATIVE,
        "Number of accepted tokens of a draft",
        (Verify,),
        generation.Verification,
        aliases=("/verify",),
        example={"prompt": "Once upon a", "draft_tokens": [5, 6]},
    ),
    _post(
        "/v1/chat/completions",
        OPENAI,
        "Answer in a chat",
        CHAT,
        openai.ChatCompletion,
        openai.ChatChunk,
        ("/chat/completions",),
        example={"messages": _SAID, "max_tokens": 8},
    ),
    _post(
        "/v1/completions/render",
        OPENAI,
        "Token ids of prompts, as vLLM's",
        (OpenAICompletion,),
        list[openai.RenderedRequest],
        example={"prompt": "Once upon a time", "max_tokens": 8},
    ),
    _post(
        "/v1/chat/completions/render",
        OPENAI,
        "Token ids of a chat's prompt, as vLLM's",
        CHAT,
        openai.RenderedRequest,
        example={"messages": _SAID},
    ),
    _post(
        "/v1/chat/completions/input_tokens",
        OPENAI,
        "Count a chat's tokens",
        CHAT,
        llamacpp.InputTokens,
        aliases=("/chat/completions/input_tokens",),
        example={"messages": _SAID},
    ),
    _post(
        "/v1/chat/completions/control",
        OPENAI,
        "End a running answer's reasoning",
        (ControlBody,),
        llamacpp.Control,
        example={"id": "chatcmpl-1", "action": "reasoning_end"},
    ),
    _post(
        "/v1/responses",
        OPENAI,
        "Answer, in the Responses API",
        RESPONSES,
        responses.Response,
        RESPONSE_EVENTS,
        ("/responses",),
        example={"input": "Hello", "max_output_tokens": 8},
    ),
    _post(
        "/v1/responses/input_tokens",
        OPENAI,
        "Count the tokens of an input",
        RESPONSES,
        llamacpp.InputTokens,
        aliases=("/responses/input_tokens",),
        example={"input": "Hello"},
    ),
    _get(
        "/v1/responses/{id}",
        OPENAI,
        "A stored response",
        answer=responses.Response,
        events=RESPONSE_EVENTS,
        query={"stream": bool, "starting_after": Annotated[int, Meta(ge=0)]},
    ),
    _delete("/v1/responses/{id}", OPENAI, "Forget a response", answer=fine_tuning.Deleted),
    _get(
        "/v1/responses/{id}/input_items",
        OPENAI,
        "Input items of a stored response",
        answer=fine_tuning.Page[responses.InputItem],
        query=_PAGE | _ORDER,
    ),
    _post("/v1/responses/{id}/cancel", OPENAI, "End a response in the background", answer=responses.Response),
    _post(
        _TALKS,
        OPENAI,
        "Begin a conversation",
        (conversations.ConversationBody,),
        responses.Conversation,
        example={"items": _SAID, "metadata": {"topic": "greetings"}},
    ),
    _get(_TALKS + "/{id}", OPENAI, "A conversation", answer=responses.Conversation),
    _post(
        _TALKS + "/{id}",
        OPENAI,
        "Replace a conversation's metadata",
        (conversations.MetadataBody,),
        responses.Conversation,
        example={"metadata": {"topic": "greetings"}},
    ),
    _delete(_TALKS + "/{id}", OPENAI, "Forget a conversation", answer=responses.DeletedConversation),
    _get(
        _TALKS + "/{id}/items",
        OPENAI,
        "Items of a conversation",
        answer=responses.ConversationItems,
        query={"limit": Annotated[int, Meta(ge=1, le=conversations.MAX_PAGE)], "after": str} | _ORDER,
    ),
    _post(
        _TALKS + "/{id}/items",
        OPENAI,
        "Append items to a conversation",
        (conversations.ItemsBody,),
        responses.ConversationItems,
        example={"items": _SAID},
    ),
    _get(_TALKS + "/{id}/items/{item}", OPENAI, "An item of a conversation", answer=responses.InputItem),
    _delete(_TALKS + "/{id}/items/{item}", OPENAI, "Drop an item of a conversation", answer=responses.Conversation),
    _post(
        "/v1/embeddings",
        "vectors",
        "Vectors of texts",
        (EmbeddingBody,),
        vectors.Embeddings,
        example={"input": ["one text", "another"], "encoding_format": "base64"},
    ),
    _post(
        "/embedding",
        "vectors",
        "Vectors of texts, in llama-server's form",
        (EmbeddingBody,),
        list[vectors.NativeEmbedding],
        aliases=("/embeddings",),
        example={"content": "a text"},
    ),
    _post(
        "/rerank",
        "vectors",
        "Order texts by their relevance",
        (RerankBody,),
        RERANKED,
        aliases=("/reranking", "/v1/rerank", "/v1/reranking"),
        example={"query": "tea", "documents": ["green tea", "a horse"], "top_n": 1},
    ),
    _post(
        "/v1/messages",
        ANTHROPIC,
        "Answer, in the Messages API",
        MESSAGES,
        anthropic.Message,
        anthropic.MessageEvent,
        example={"messages": _SAID, "max_tokens": 8},
    ),
    _post(
        "/v1/messages/count_tokens",
        ANTHROPIC,
        "Count a message's tokens",
        MESSAGES,
        anthropic.CountedTokens,
        example={"messages": _SAID},
    ),
    _post(
        "/api/generate",
        OLLAMA,
        "Answer a prompt, or continue a text",
        (ollama_bodies.GenerateBody,),
        ollama.OllamaAnswer,
        ollama.OllamaAnswer,
        example=_SHAKESPEARE | {"prompt": "Once upon a time", "options": {"num_predict": 8}},
    ),
    _post(
        "/api/chat",
        OLLAMA,
        "Answer in a conversation",
        (ollama_bodies.ChatBody,),
        ollama.OllamaAnswer,
        ollama.OllamaAnswer,
        example=_SHAKESPEARE | {"messages": _SAID, "options": {"num_predict": 8}},
    ),
    _post(
        "/api/embed",
        OLLAMA,
        "Vectors of texts, of length 1",
        (ollama_bodies.EmbedBody,),
        ollama.OllamaVectors,
        example=_SHAKESPEARE | {"input": ["one text", "another"]},
    ),
    _post(
        "/api/embeddings",
        OLLAMA,
        "One text's vector",
        (ollama_bodies.EmbeddingsBody,),
        ollama.OllamaVector,
        example=_SHAKESPEARE | {"prompt": "a text"},
    ),
    _get("/api/tags", OLLAMA, "The models", answer=ollama.ListedModels),
    _get("/api/ps", OLLAMA, "The loaded models", answer=ollama.ListedModels),
    _get("/api/v0/models", OLLAMA, "The models, in the shape of LM Studio", answer=models.LMStudioModels),
    _post(
        "/api/show",
        OLLAMA,
        "A model's metadata, chat template and capabilities",
        (ollama_bodies.ShowBody,),
        ollama.ShownModel,
        example=_SHAKESPEARE,
    ),
    _get("/api/version", OLLAMA, "Version of Ollama that this API follows", answer=ollama.OllamaVersion),
    _post(
        "/api/pull",
        OLLAMA,
        "Download a model (a router's)",
        (ollama_bodies.PullBody,),
        ollama.PullProgress,
        ollama.PullProgress,
    ),
    _post("/api/push", OLLAMA, "Refused: nothing is uploaded from here", (ollama_bodies.Named,), refused=True),
    _post("/api/copy", OLLAMA, "Another name for a model (a router's)", (ollama_bodies.CopyBody,), empty=200),
    _post(
        "/api/create",
        OLLAMA,
        "Make a model of uploaded files, or of another model (a router's)",
        (ollama_bodies.CreateBody,),
        ollama.PullProgress,
        ollama.PullProgress,
    ),
    _post(
        "/api/blobs/{id}",
        OLLAMA,
        "Upload a file; the path has its digest, sha256:… (a router's)",
        raw=True,
        empty=201,
    ),
    _delete("/api/delete", OLLAMA, "Delete a model (a router's)", (ollama_bodies.Named,), empty=200),
    _post(
        "/v1/audio/transcriptions",
        OPENAI,
        "The text of a sound",
        (TranscriptionForm,),
        [transcriptions.SpokenText, transcriptions.VerboseText],
        events=[transcriptions.SpokenDelta, transcriptions.SpokenDone],
    ),
    _post(
        "/v1/audio/translations",
        OPENAI,
        "The text of a sound, in English",
        (TranslationForm,),
        [transcriptions.SpokenText, transcriptions.VerboseText],
        events=[transcriptions.SpokenDelta, transcriptions.SpokenDone],
    ),
    _post(
        "/v1/score",
        "training",
        "Likelihoods of texts",
        (ScoreBody,),
        vectors.Scores,
        example={"input": ["a text to score"]},
    ),
    _get(_BATCHES, "batches", "The batches", answer=fine_tuning.Page[batches.Batch], query=_PAGE),
    _post(
        _BATCHES,
        "batches",
        "Answer the requests of a file",
        (BatchBody,),
        batches.Batch,
        example={"input_file_id": "file-1", "endpoint": "/v1/completions"},
    ),
    _get(_BATCHES + "/{id}", "batches", "One batch", answer=batches.Batch),
    _post(_BATCHES + "/{id}/cancel", "batches", "End a batch", answer=batches.Batch),
    _get(
        _MESSAGE_BATCHES,
        ANTHROPIC,
        "The message batches",
        answer=batches.MessageBatchPage,
        query={"limit": Annotated[int, Meta(ge=1, le=1000)], "after_id": str, "before_id": str},
    ),
    _post(
        _MESSAGE_BATCHES,
        ANTHROPIC,
        "Answer many messages",
        (MessageBatchBody,),
        batches.MessageBatch,
        example={"requests": [{"custom_id": "a", "params": {"messages": _SAID, "max_tokens": 8}}]},
    ),
    _get(_MESSAGE_BATCHES + "/{id}", ANTHROPIC, "One message batch", answer=batches.MessageBatch),
    _delete(_MESSAGE_BATCHES + "/{id}", ANTHROPIC, "Delete an ended message batch", answer=batches.DeletedBatch),
    _post(_MESSAGE_BATCHES + "/{id}/cancel", ANTHROPIC, "End a message batch", answer=batches.MessageBatch),
    _get(
        _MESSAGE_BATCHES + "/{id}/results",
        ANTHROPIC,
        "A line for each request",
        answer=str,
        media="application/x-jsonl",
    ),
    _get(
        "/v1/files",
        "training",
        "The uploaded files",
        answer=fine_tuning.Page[fine_tuning.File],
        query=_PAGE | _ORDER | {"purpose": str},
    ),
    _post("/v1/files", "training", "Upload a file", (UploadForm,), fine_tuning.File),
    _get("/v1/files/{id}", "training", "One file's entry", answer=fine_tuning.File),
    _delete("/v1/files/{id}", "training", "Delete a file", answer=fine_tuning.Deleted),
    _get("/v1/files/{id}/content", "training", "One file's bytes", answer=bytes, media="application/octet-stream"),
    _get(_JOBS, "training", "The jobs", answer=fine_tuning.Page[fine_tuning.Job], query=_PAGE),
    _post(
        _JOBS,
        "training",
        "Begin a job",
        (JobBody,),
        fine_tuning.Job,
        example={"model": "a-model", "training_file": "file-1"},
    ),
    _get(_JOBS + "/{id}", "training", "One job", answer=fine_tuning.Job),
    _post(_JOBS + "/{id}/cancel", "training", "End a job", answer=fine_tuning.Job),
    _post(_JOBS + "/{id}/pause", "training", "Pause a job", answer=fine_tuning.Job),
    _post(_JOBS + "/{id}/resume", "training", "Go on with a job", answer=fine_tuning.Job),
    _get(
        _JOBS + "/{id}/events",
        "training",
        "A job's messages and metrics",
        answer=fine_tuning.Page[fine_tuning.JobEvent],
        events=fine_tuning.JobEvent,
        query=_PAGE | {"stream": bool},
    ),
    _get(
        _JOBS + "/{id}/checkpoints",
        "training",
        "A job's checkpoints",
        answer=fine_tuning.Page[fine_tuning.Checkpoint],
        query=_PAGE,
    ),
    _post(
        "/v1/fine_tuning/alpha/graders/run",
        "training",
        "Grade an answer",
        (GradeBody,),
        fine_tuning.Graded,
        example={"grader": _GRADER, "model_sample": "4", "item": {"answer": "4"}},
    ),
    _post(
        "/v1/fine_tuning/alpha/graders/validate",
        "training",
        "Check a grader",
        (GraderBody,),
        fine_tuning.ValidGrader,
        example={"grader": _GRADER},
    ),
    _post("/predict", "server", "Vertex AI: answer several chats", (PredictBody,), openai.Predictions),
)
