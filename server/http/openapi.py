"""The API's own description, OpenAPI 3.1, as `/openapi.json` serves it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from server.http.openapi_fields import CHAT, COMPLETION, EMBEDDING, ERROR, MESSAGES, RERANK, RESPONSES, TEXT, TUNING

Schema = dict[str, Any]
_FAILURES = {
    "400": "A field is wrong; the message names it.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such thing.",
    "501": "Not supported, or switched off.",
    "503": "The model is loading, or the server is full.",
}
_FREE: Schema = {"type": "object"}

# (method, path, aliases, tag, what it does, request's schema or None, whether the answer may be a stream)
_OPERATIONS: tuple[tuple[str, str, tuple[str, ...], str, str, Schema | None, bool], ...] = (
    ("get", "/health", ("/v1/health",), "server", "Whether the model is loaded", None, False),
    ("get", "/v1/models", ("/models",), "server", "The models: one", None, False),
    ("get", "/v1/models/{id}", (), "server", "One model", None, False),
    ("get", "/props", (), "server", "Properties and default settings", None, False),
    ("post", "/props", (), "server", "Change properties (needs --props)", _FREE, False),
    ("get", "/metrics", (), "server", "Prometheus metrics (needs --metrics)", None, False),
    ("get", "/openapi.json", (), "server", "This document", None, False),
    ("get", "/slots", (), "slots", "What every slot does", None, False),
    ("post", "/slots/{id}", (), "slots", "action=save, restore, erase or fork", _FREE, False),
    ("get", "/v1/stream", (), "streams", "The stream of ?conv_id=, from byte ?from= on", None, True),
    ("get", "/v1/stream/{id}", (), "streams", "A stream, from byte ?from= on", None, True),
    ("delete", "/v1/stream", (), "streams", "End the stream of ?conv_id=", None, False),
    ("delete", "/v1/stream/{id}", (), "streams", "End a stream", None, False),
    ("post", "/v1/streams/lookup", (), "streams", "How streams are: conversation_ids", _FREE, False),
    ("get", "/lora-adapters", (), "adapters", "The adapters and their scales", None, False),
    ("post", "/lora-adapters", (), "adapters", "Set the adapters' scales", {"type": "array"}, False),
    ("post", "/completion", ("/completions",), "native", "Continue a text", COMPLETION, True),
    ("post", "/infill", (), "native", "Fill a gap in a text", COMPLETION, True),
    ("post", "/tokenize", (), "native", "A text's tokens", TEXT, False),
    ("post", "/detokenize", (), "native", "The text of tokens", TEXT, False),
    ("post", "/apply-template", (), "native", "The prompt that a chat becomes", CHAT, False),
    ("post", "/v1/completions", (), "OpenAI", "Continue a text", COMPLETION, True),
    ("post", "/v1/verify", ("/verify",), "native", "How far a draft is what the model says", COMPLETION, False),
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
    ("post", "/v1/responses", ("/responses",), "OpenAI", "Answer, in the Responses API", RESPONSES, True),
    (
        "post",
        "/v1/responses/input_tokens",
        ("/responses/input_tokens",),
        "OpenAI",
        "Count the tokens of an input",
        RESPONSES,
        False,
    ),
    ("post", "/v1/embeddings", (), "vectors", "Vectors of texts", EMBEDDING, False),
    ("post", "/embedding", ("/embeddings",), "vectors", "Vectors of texts, llama-server's form", EMBEDDING, False),
    ("post", "/rerank", ("/reranking", "/v1/rerank", "/v1/reranking"), "vectors", "Order texts", RERANK, False),
    ("post", "/v1/messages", (), "Anthropic", "Answer, in the Messages API", MESSAGES, True),
    ("post", "/v1/messages/count_tokens", (), "Anthropic", "Count a message's tokens", MESSAGES, False),
    ("post", "/v1/score", (), "training", "Likelihoods of texts", _FREE, False),
    ("get", "/v1/files", (), "training", "The uploaded files", None, False),
    ("post", "/v1/files", (), "training", "Upload a file (multipart)", None, False),
    ("get", "/v1/files/{id}", (), "training", "One file's entry", None, False),
    ("delete", "/v1/files/{id}", (), "training", "Delete a file", None, False),
    ("get", "/v1/files/{id}/content", (), "training", "One file's bytes", None, False),
    ("get", "/v1/fine_tuning/jobs", (), "training", "The jobs", None, False),
    ("post", "/v1/fine_tuning/jobs", (), "training", "Begin a job", TUNING, False),
    ("get", "/v1/fine_tuning/jobs/{id}", (), "training", "One job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/cancel", (), "training", "End a job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/pause", (), "training", "Pause a job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/resume", (), "training", "Go on with a job", None, False),
    ("get", "/v1/fine_tuning/jobs/{id}/events", (), "training", "What happened", None, False),
    ("get", "/v1/fine_tuning/jobs/{id}/checkpoints", (), "training", "A job's checkpoints", None, False),
)


def document(version: str, routes: Iterable[tuple[str, str]], *, keys: bool = False) -> Schema:
    """The document of an application with these routes (method, path), told or not. `keys`: whether requests need an
    API key."""
    known: dict[tuple[str, str], tuple[str, str, Schema | None, bool]] = {
        (method, name): (tag, summary, body, streams)
        for method, path, aliases, tag, summary, body, streams in _OPERATIONS
        for name in (path, *aliases)
    }
    paths: dict[str, Schema] = {}
    for method, path in sorted(routes):
        ends = [name for m, name in known if m == method and path.endswith(name)]  # behind --api-prefix
        tag, summary, body, streams = known[method, max(ends, key=len)] if ends else _unknown(method, path)
        paths.setdefault(path, {})[method] = _operation(method, path, tag, summary, body, streams)
    made: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "logitless", "version": version, "description": "One GGUF model, served."},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    if keys:
        made["security"] = [{"key": []}]
    return made


def _unknown(method: str, path: str) -> tuple[str, str, Schema | None, bool]:
    return "other", path.strip("/").replace("/", " "), _FREE if method == "post" else None, False


def _operation(method: str, path: str, tag: str, summary: str, body: Schema | None, streams: bool) -> Schema:
    content: Schema = {} if path == "/metrics" or path.endswith("/content") else {"application/json": {"schema": {}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: Schema = {
        "operationId": f"{method}{path.translate(str.maketrans('/-.{}', '_____'))}",
        "tags": [tag],
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", **({"content": content} if content else {})},
            **{code: {"description": text, "content": failure} for code, text in _FAILURES.items()},
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
