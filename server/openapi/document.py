"""The API's own description, OpenAPI 3.1, as `/openapi.json` serves it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from logitless.server.openapi.requests import (
    CHAT,
    COMPLETION,
    CONTROL,
    EMBEDDING,
    ERROR,
    EXAMPLES,
    FILE,
    LOOKUP,
    MESSAGES,
    QUERIES,
    RERANK,
    RESPONSES,
    SCALES,
    SCORE,
    SLOT,
    TEXT,
    TOKENS,
    TUNING,
    VERIFY,
)
from logitless.server.openapi.responses import EVENT, REPLIES

Schema = dict[str, Any]
_FAILURES = {
    "400": "A field is wrong; the message names it.",
    "401": "The API key is missing or wrong.",
    "403": "This needs the admin key, or is not offered.",
    "404": "There is no such thing.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "429": "This client has too much in the queue.",
    "500": "The device, or this program, failed.",
    "501": "Not supported, or switched off.",
    "503": "The model is loading, or the server is full.",
    "507": "There is no room on the server's disk.",
}
_FREE: Schema = {"type": "object"}
_CONTENT_TYPES = {"/metrics": "text/plain", "/v1/files/{id}/content": "application/octet-stream"}

# (method, path, aliases, tag, what it does, request's schema or None, whether the answer may be a stream)
_OPERATIONS: tuple[tuple[str, str, tuple[str, ...], str, str, Schema | None, bool], ...] = (
    ("get", "/health", ("/v1/health",), "server", "Whether the model is loaded", None, False),
    ("get", "/v1/models", ("/models", "/api/tags"), "server", "The models: one", None, False),
    ("post", "/api/show", (), "server", "The model's chat template and context, as Ollama tells them", _FREE, False),
    ("get", "/v1/models/{id}", (), "server", "One model", None, False),
    ("get", "/props", (), "server", "Properties and default settings", None, False),
    ("post", "/props", (), "server", "Change properties (needs --props)", _FREE, False),
    ("get", "/metrics", (), "server", "Prometheus metrics (needs --metrics)", None, False),
    ("get", "/openapi.json", (), "server", "This document", None, False),
    ("get", "/slots", (), "slots", "What every slot does", None, False),
    ("post", "/slots/{id}", (), "slots", "action=save, restore, erase or fork", SLOT, False),
    ("get", "/v1/stream", (), "streams", "The stream of ?conv_id=, from byte ?from= on", None, True),
    ("get", "/v1/stream/{id}", (), "streams", "A stream, from byte ?from= on", None, True),
    ("delete", "/v1/stream", (), "streams", "End the stream of ?conv_id=", None, False),
    ("delete", "/v1/stream/{id}", (), "streams", "End a stream", None, False),
    ("post", "/v1/streams/lookup", (), "streams", "How streams are: conversation_ids", LOOKUP, False),
    ("get", "/lora-adapters", (), "adapters", "The adapters and their scales", None, False),
    ("post", "/lora-adapters", (), "adapters", "Set the adapters' scales", SCALES, False),
    ("post", "/completion", ("/completions",), "native", "Continue a text", COMPLETION, True),
    ("post", "/infill", (), "native", "Fill a gap in a text", COMPLETION, True),
    ("post", "/tokenize", (), "native", "A text's tokens", TEXT, False),
    ("post", "/detokenize", (), "native", "The text of tokens", TOKENS, False),
    ("post", "/apply-template", (), "native", "The prompt that a chat becomes", CHAT, False),
    ("post", "/v1/completions", (), "OpenAI", "Continue a text", COMPLETION, True),
    ("post", "/v1/verify", ("/verify",), "native", "How far a draft is what the model says", VERIFY, False),
    ("post", "/v1/chat/completions", ("/chat/completions", "/api/chat"), "OpenAI", "Answer in a chat", CHAT, True),
    (
        "post",
        "/v1/chat/completions/input_tokens",
        ("/chat/completions/input_tokens",),
        "OpenAI",
        "Count a chat's tokens",
        CHAT,
        False,
    ),
    ("post", "/v1/chat/completions/control", (), "OpenAI", "End a running answer's reasoning", CONTROL, False),
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
    ("get", "/v1/responses/{id}", (), "OpenAI", "A response that was stored", None, False),
    ("delete", "/v1/responses/{id}", (), "OpenAI", "Forget a response", None, False),
    ("get", "/v1/responses/{id}/input_items", (), "OpenAI", "What was said for a response", None, False),
    ("post", "/v1/embeddings", (), "vectors", "Vectors of texts", EMBEDDING, False),
    ("post", "/embedding", ("/embeddings",), "vectors", "Vectors of texts, llama-server's form", EMBEDDING, False),
    ("post", "/rerank", ("/reranking", "/v1/rerank", "/v1/reranking"), "vectors", "Order texts", RERANK, False),
    ("post", "/v1/messages", (), "Anthropic", "Answer, in the Messages API", MESSAGES, True),
    ("post", "/v1/messages/count_tokens", (), "Anthropic", "Count a message's tokens", MESSAGES, False),
    ("post", "/v1/score", (), "training", "Likelihoods of texts", SCORE, False),
    ("get", "/v1/files", (), "training", "The uploaded files", None, False),
    ("post", "/v1/files", (), "training", "Upload a file", FILE, False),
    ("get", "/v1/files/{id}", (), "training", "One file's entry", None, False),
    ("delete", "/v1/files/{id}", (), "training", "Delete a file", None, False),
    ("get", "/v1/files/{id}/content", (), "training", "One file's bytes", None, False),
    ("get", "/v1/fine_tuning/jobs", (), "training", "The jobs", None, False),
    ("post", "/v1/fine_tuning/jobs", (), "training", "Begin a job", TUNING, False),
    ("get", "/v1/fine_tuning/jobs/{id}", (), "training", "One job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/cancel", (), "training", "End a job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/pause", (), "training", "Pause a job", None, False),
    ("post", "/v1/fine_tuning/jobs/{id}/resume", (), "training", "Go on with a job", None, False),
    ("get", "/v1/fine_tuning/jobs/{id}/events", (), "training", "What happened", None, True),
    ("get", "/v1/fine_tuning/jobs/{id}/checkpoints", (), "training", "A job's checkpoints", None, False),
)


def document(version: str, routes: Iterable[tuple[str, str]], *, keys: bool = False) -> Schema:
    """The document of an application with these routes (method, path), told or not. `keys`: whether requests need an
    API key."""
    known = {(row[0], name): row for row in _OPERATIONS for name in (row[1], *row[2])}
    paths: dict[str, Schema] = {}
    for method, path in sorted(routes):
        ends = [name for m, name in known if m == method and path.endswith(name)]  # behind --api-prefix
        row = known[method, max(ends, key=len)] if ends else _unknown(method, path)
        paths.setdefault(path, {})[method] = _operation(path, *row)
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


def _unknown(method: str, path: str) -> tuple[str, str, tuple[str, ...], str, str, Schema | None, bool]:
    return method, path, (), "other", path.strip("/").replace("/", " "), _FREE if method == "post" else None, False


def _operation(
    path: str,
    method: str,
    name: str,
    aliases: tuple[str, ...],
    tag: str,
    summary: str,
    body: Schema | None,
    streams: bool,
) -> Schema:
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: Schema = {
        "operationId": f"{method}{path.translate(str.maketrans('/-.{}', '_____'))}",
        "tags": [tag],
        "summary": summary,
        "responses": {
            **_success(method, name, streams),
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
        content: Schema = {"schema": body}
        if (method, name) in EXAMPLES:
            content["example"] = EXAMPLES[method, name]
        operation["requestBody"] = {"required": True, "content": {kind: content}}
    return operation


def _success(method: str, name: str, streams: bool) -> Schema:
    if method == "delete" and name.startswith("/v1/stream"):
        return {"204": {"description": "It has ended, or there was none."}}
    content: Schema = {}
    if not (streams and method == "get" and (method, name) not in REPLIES):
        content[_CONTENT_TYPES.get(name, "application/json")] = {"schema": REPLIES.get((method, name), {})}
    if streams:
        content["text/event-stream"] = {"schema": EVENT}
    return {"200": {"description": "Done.", "content": content}}
