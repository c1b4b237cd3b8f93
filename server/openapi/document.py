"""OpenAPI 3.1 document of the API, as `/openapi.json` serves it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from logitless.server.api.generate import ControlBody
from logitless.server.api.llamacpp.resume import LookupBody
from logitless.server.api.llamacpp.slots import ForkBody, SlotFileBody
from logitless.server.api.llamacpp.text import DetokenizeBody, TokenizeBody
from logitless.server.openapi.requests import ERROR, EXAMPLES, FILE, FREE, OLLAMA_ERROR, QUERIES, Schema, body_schema
from logitless.server.openapi.responses import EVENTS, REPLIES, answer_schema, event_schema
from logitless.server.protocol.chat.chat import ChatGeneration
from logitless.server.protocol.chat.messages import Chat
from logitless.server.protocol.completions import Completion, OpenAICompletion
from logitless.server.protocol.dialects.anthropic import MessagesBody
from logitless.server.protocol.dialects.ollama import ChatBody as OllamaChatBody
from logitless.server.protocol.dialects.ollama import (
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    Named,
    PullBody,
    ShowBody,
)
from logitless.server.protocol.dialects.responses import ResponsesBody
from logitless.server.protocol.embeddings import EmbeddingBody, RerankBody
from logitless.server.protocol.fine_tuning import GradeBody, GraderBody, JobBody
from logitless.server.protocol.infill import Infill
from logitless.server.protocol.lora import Scales
from logitless.server.protocol.score import ScoreBody
from logitless.server.protocol.verify import Verify

Body = Schema | tuple[type[Struct], ...] | list[type[Struct]]  # all of their fields, or those of one
Operation = tuple[str, str, tuple[str, ...], str, str, Body | None, bool]
CHAT = (Chat, ChatGeneration)
OLLAMA = "Ollama"  # its streams are lines of JSON, and on unless a request says no
_FAILURES = {
    "400": "A field is wrong; the message names it.",
    "401": "The API key is missing or wrong.",
    "403": "This needs the admin key, or is not offered.",
    "404": "There is no such thing.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "429": "This client has too much in the queue.",
    "500": "The device, or this program, failed.",
    "501": "The operator has not switched this on.",
    "503": "The model is loading, or the server is full.",
    "507": "There is no room on the server's disk.",
}
_CONTENT_TYPES = {"/metrics": "text/plain", "/v1/files/{id}/content": "application/octet-stream"}

# (method, path, aliases, tag, what it does, request's schema or None, whether the answer may be a stream)
OPERATIONS: tuple[Operation, ...] = (
    ("get", "/health", ("/v1/health",), "server", "Whether the model is loaded", None, False),
    ("get", "/v1/models", ("/models",), "server", "The models: one", None, False),
    ("get", "/v1/models/{id}", (), "server", "One model", None, False),
    ("delete", "/v1/models/{id}", (), "training", "Delete a fine-tuned model", None, False),
    ("get", "/props", (), "server", "Properties and default settings", None, False),
    ("post", "/props", (), "server", "Change properties (needs --props)", FREE, False),
    ("get", "/metrics", (), "server", "Prometheus metrics (needs --metrics)", None, False),
    ("get", "/openapi.json", (), "server", "This document", None, False),
    ("get", "/slots", (), "slots", "State of every slot", None, False),
    ("post", "/slots/{id}", (), "slots", "action=save, restore, erase or fork", [SlotFileBody, ForkBody], False),
    ("get", "/v1/stream", (), "streams", "The stream of ?conv_id=, from byte ?from= on", None, True),
    ("get", "/v1/stream/{id}", (), "streams", "A stream, from byte ?from= on", None, True),
    ("delete", "/v1/stream", (), "streams", "End the stream of ?conv_id=", None, False),
    ("delete", "/v1/stream/{id}", (), "streams", "End a stream", None, False),
    ("post", "/v1/streams/lookup", (), "streams", "How streams are: conversation_ids", (LookupBody,), False),
    ("get", "/lora-adapters", (), "adapters", "The adapters and their scales", None, False),
    ("post", "/lora-adapters", (), "adapters", "Set the adapters' scales", (Scales,), False),
    ("post", "/completion", ("/completions",), "native", "Continue a text", (Completion,), True),
    ("post", "/infill", (), "native", "Fill a gap in a text", (Infill,), True),
    ("post", "/tokenize", (), "native", "A text's tokens", (TokenizeBody,), False),
    ("post", "/detokenize", (), "native", "The text of tokens", (DetokenizeBody,), False),
    ("post", "/apply-template", (), "native", "The prompt that a chat becomes", CHAT, False),
    ("post", "/v1/completions", (), "OpenAI", "Continue a text", (OpenAICompletion,), True),
    ("post", "/v1/verify", ("/verify",), "native", "Number of accepted tokens of a draft", (Verify,), False),
    ("post", "/v1/chat/completions", ("/chat/completions",), "OpenAI", "Answer in a chat", CHAT, True),
    (
        "post",
        "/v1/chat/completions/input_tokens",
        ("/chat/completions/input_tokens",),
        "OpenAI",
        "Count a chat's tokens",
        CHAT,
        False,
    ),
    ("post", "/v1/chat/completions/control", (), "OpenAI", "End a running answer's reasoning", (ControlBody,), False),
    (
        "post",
        "/v1/responses",
        ("/responses",),
        "OpenAI",
        "Answer, in the Responses API",
        (ChatGeneration, ResponsesBody),
        True,
    ),
    (
        "post",
        "/v1/responses/input_tokens",
        ("/responses/input_tokens",),
        "OpenAI",
        "Count the tokens of an input",
        (ChatGeneration, ResponsesBody),
        False,
    ),
    ("get", "/v1/responses/{id}", (), "OpenAI", "A response that was stored", None, False),
    ("delete", "/v1/responses/{id}", (), "OpenAI", "Forget a response", None, False),
    ("get", "/v1/responses/{id}/input_items", (), "OpenAI", "Input items of a response", None, False),
    ("post", "/v1/embeddings", (), "vectors", "Vectors of texts", (EmbeddingBody,), False),
    (
        "post",
        "/embedding",
        ("/embeddings",),
        "vectors",
        "Vectors, in llama-server's form",
        (EmbeddingBody,),
        False,
    ),
    ("post", "/rerank", ("/reranking", "/v1/rerank", "/v1/reranking"), "vectors", "Order texts", (RerankBody,), False),
    ("post", "/v1/messages", (), "Anthropic", "Answer, in the Messages API", (ChatGeneration, MessagesBody), True),
    (
        "post",
        "/v1/messages/count_tokens",
        (),
        "Anthropic",
        "Count a message's tokens",
        (ChatGeneration, MessagesBody),
        False,
    ),
    ("post", "/api/generate", (), OLLAMA, "Answer a prompt, or continue a text", (GenerateBody,), True),
    ("post", "/api/chat", (), OLLAMA, "Answer in a conversation", (OllamaChatBody,), True),
    ("post", "/api/embed", (), OLLAMA, "Vectors of texts, of length 1", (EmbedBody,), False),
    ("post", "/api/embeddings", (), OLLAMA, "One text's vector", (EmbeddingsBody,), False),
    ("get", "/api/tags", (), OLLAMA, "The models", None, False),
    ("get", "/api/ps", (), OLLAMA, "The models that are loaded", None, False),
    ("post", "/api/show", (), OLLAMA, "A model's metadata, chat template and capabilities", (ShowBody,), False),
    ("get", "/api/version", (), OLLAMA, "Version of Ollama that this API follows", None, False),
    ("post", "/api/pull", (), OLLAMA, "Download a model (a router's)", (PullBody,), True),
    ("post", "/api/push", (), OLLAMA, "Refused: nothing is uploaded from here", (Named,), False),
    ("post", "/api/copy", (), OLLAMA, "Refused: a model has the names of its file and flags", None, False),
    ("post", "/api/create", (), OLLAMA, "Refused: models are files", None, False),
    ("post", "/api/blobs/{id}", (), OLLAMA, "Refused: models are files", None, False),
    ("delete", "/api/delete", (), OLLAMA, "Delete a model (a router's)", (Named,), False),
    ("post", "/v1/score", (), "training", "Likelihoods of texts", (ScoreBody,), False),
    ("get", "/v1/files", (), "training", "The uploaded files", None, False),
    ("post", "/v1/files", (), "training", "Upload a file", FILE, False),
    ("get", "/v1/files/{id}", (), "training", "One file's entry", None, False),
    ("delete", "/v1/files/{id}", (), "training", "Delete a file", None, False),
    ("get", "/v1/files/{id}/content", (), "training", "One file's bytes", None, False),
    ("get", "/v1/fine_tuning/jobs", (), "training", "The jobs", None, False),
    ("post", "/v1/fine_tuning/jobs", (), "training", "Begin a job", (JobBody,), False),
    ("get", "/v1/fine_tuning/jobs/{id}", (), "training", "One job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/cancel", (), "training", "End a job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/pause", (), "training", "Pause a job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/resume", (), "training", "Go on with a job", None, False),
    ("get", "/v1/fine_tuning/jobs/{id}/events", (), "training", "Events of a job", None, True),
    ("get", "/v1/fine_tuning/jobs/{id}/checkpoints", (), "training", "A job's checkpoints", None, False),
    ("post", "/v1/fine_tuning/alpha/graders/run", (), "training", "Grade an answer", (GradeBody,), False),
    ("post", "/v1/fine_tuning/alpha/graders/validate", (), "training", "Check a grader", (GraderBody,), False),
)


def document(version: str, routes: Iterable[tuple[str, str]], *, keys: bool = False) -> Schema:
    """The document of an application with these routes (method, path), told or not. `keys`: whether requests need an
    API key."""
    known = {(row[0], name): row for row in OPERATIONS for name in (row[1], *row[2])}
    paths: dict[str, Schema] = {}
    schemas = {"Error": ERROR, "OllamaError": OLLAMA_ERROR}
    for method, path in sorted(routes):
        ends = [name for m, name in known if m == method and path.endswith(name)]  # behind --api-prefix
        row = known[method, max(ends, key=len)] if ends else _unknown(method, path)
        paths.setdefault(path, {})[method] = _operation(path, schemas, *row)
    made: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "logitless", "version": version, "description": "One GGUF model, served."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    if keys:
        made["security"] = [{"key": []}]
    return made


def _unknown(method: str, path: str) -> Operation:
    return method, path, (), "other", path.strip("/").replace("/", " "), FREE if method == "post" else None, False


def body_of(body: Body) -> tuple[Schema, dict[str, Schema]]:
    """(schema of an operation's body, schemas that it refers to)."""
    if isinstance(body, dict):
        return body, {}
    if isinstance(body, list):
        return {"anyOf": [*(body_schema(kind)[0] for kind in body), FREE]}, {}
    schema, components = body_schema(*body)
    return (schema["properties"]["body"] if body == (Scales,) else schema), components


def _operation(
    path: str,
    schemas: dict[str, Schema],
    method: str,
    name: str,
    aliases: tuple[str, ...],
    tag: str,
    summary: str,
    body: Body | None,
    streams: bool,
) -> Schema:
    error = "OllamaError" if tag == OLLAMA else "Error"
    failure = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    operation: Schema = {
        "operationId": f"{method}{path.translate(str.maketrans('/-.{}', '_____'))}",
        "tags": [tag],
        "summary": summary,
        "responses": {
            **_success(method, name, streams, schemas, lines=tag == OLLAMA),
            **{code: {"description": text, "content": failure} for code, text in _FAILURES.items()},
        },
    }
    parameters = [
        {"name": found, "in": "path", "required": True, "schema": {"type": "string"}}
        for found in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": key, "in": "query", "required": key == "action", "schema": schema}
        for key, schema in QUERIES.get((method, name), {}).items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        kind = "multipart/form-data" if body is FILE else "application/json"
        schema, components = body_of(body)
        schemas |= components
        content: Schema = {"schema": schema}
        if (method, name) in EXAMPLES:
            content["example"] = EXAMPLES[method, name]
        operation["requestBody"] = {"required": True, "content": {kind: content}}
    return operation


def _success(method: str, name: str, streams: bool, schemas: dict[str, Schema], *, lines: bool) -> Schema:
    if method == "delete" and name.startswith("/v1/stream"):
        return {"204": {"description": "It has ended, or there was none."}}
    content: Schema = {}
    if not (streams and method == "get" and (method, name) not in REPLIES):
        schema, components = answer_schema(REPLIES.get((method, name), {}))
        content[_CONTENT_TYPES.get(name, "application/json")] = {"schema": schema}
        schemas |= components
    if streams and lines:
        content["application/x-ndjson"] = {"schema": {"type": "string"}}
    elif streams:
        schema, components = event_schema(EVENTS.get(name))
        content["text/event-stream"] = {"schema": schema}
        schemas |= components
    return {"200": {"description": "Done.", "content": content}}
