"""Request bodies in the OpenAPI document: the schemas of the structs that the parsers read.

`null` always means the default. Queries and examples stand here.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.json import schema_components

from logitless.engine.sampling.params import Param, params_of
from logitless.server.protocol.media.sources import PURPOSES

Schema = dict[str, Any]
ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"type": "integer"}, "message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
    "required": ["error"],
}
OLLAMA_ERROR: Schema = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
FREE: Schema = {"type": "object"}
FILE: Schema = {
    "type": "object",
    "properties": {"purpose": {"enum": ["fine-tune", *PURPOSES]}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}


def body_schema(*kinds: type[Struct]) -> tuple[Schema, dict[str, Schema]]:
    """(schema of a body that has the fields of these structs, schemas that it refers to)."""
    _, components = schema_components(kinds, ref_template="#/components/schemas/{name}")
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for kind in kinds:
        made = components.pop(kind.__name__)
        for name, (_, param) in params_of(kind).items():
            needed = name in made["required"]
            schema = _described(made["properties"][name], param, needed)
            properties |= dict.fromkeys((name, *param.aliases), schema)
            required += [name] if needed else []
    return {"type": "object", "properties": properties, "required": required}, components


def _described(schema: Schema, param: Param, required: bool) -> Schema:
    """The schema of a field with its declaration's help and bounds."""
    described = {**schema, "description": param.doc}
    if param.hard:
        described |= {"minimum": param.low, "maximum": param.high}
    if param.choices:
        described["enum"] = [*param.choices, None]
    if param.least:
        described["minItems"] = param.least
    if param.most is not None:
        described["maxItems"] = param.most
    if not required and isinstance(described.get("type"), str):
        described["type"] = [described["type"], "null"]
    elif not required and "anyOf" in described and {"type": "null"} not in described["anyOf"]:
        described["anyOf"] = [*described["anyOf"], {"type": "null"}]
    return described


_PAGE: dict[str, Schema] = {"limit": {"type": "integer", "minimum": 1, "maximum": 10_000}, "after": {"type": "string"}}
_FROM: dict[str, Schema] = {"from": {"type": "integer", "minimum": 0}}
_CONVERSATION: dict[str, Schema] = {"conv_id": {"type": "string"}}
QUERIES: dict[tuple[str, str], dict[str, Schema]] = {
    ("get", "/slots"): {"fail_on_no_slot": {"type": "integer"}},
    ("post", "/slots/{id}"): {"action": {"enum": ["save", "restore", "erase", "fork"]}},
    ("get", "/v1/stream"): _CONVERSATION | _FROM,
    ("delete", "/v1/stream"): _CONVERSATION,
    ("get", "/v1/stream/{id}"): _FROM,
    ("get", "/v1/models"): {"checkpoints": {"type": "boolean"}},
    ("get", "/v1/files"): _PAGE | {"order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}},
    ("get", "/v1/responses/{id}/input_items"): _PAGE | {"order": {"enum": ["asc", "desc"]}},
    ("get", "/v1/fine_tuning/jobs"): _PAGE,
    ("get", "/v1/fine_tuning/jobs/{id}/checkpoints"): _PAGE,
    ("get", "/v1/fine_tuning/jobs/{id}/events"): _PAGE | {"stream": {"type": "boolean"}},
}

_SAID = [{"role": "user", "content": "Hello"}]
_GRADER = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
EXAMPLES: dict[tuple[str, str], Any] = {
    ("post", "/props"): {},
    ("post", "/slots/{id}"): {"filename": "chat.bin"},
    ("post", "/v1/streams/lookup"): {"conversation_ids": ["mine"]},
    ("post", "/lora-adapters"): [],
    ("post", "/completion"): {"prompt": "Once upon a time", "n_predict": 8, "n_probs": 2},
    ("post", "/infill"): {"input_prefix": "def f(", "input_suffix": "return x", "n_predict": 8},
    ("post", "/tokenize"): {"content": "Hello", "with_pieces": True},
    ("post", "/detokenize"): {"tokens": [5, 6]},
    ("post", "/apply-template"): {"messages": _SAID},
    ("post", "/v1/completions"): {"prompt": "Once upon a time", "max_tokens": 8, "logprobs": 2},
    ("post", "/v1/verify"): {"prompt": "Once upon a", "draft_tokens": [5, 6]},
    ("post", "/v1/chat/completions"): {"messages": _SAID, "max_tokens": 8},
    ("post", "/v1/chat/completions/control"): {"id": "chatcmpl-1", "action": "reasoning_end"},
    ("post", "/v1/chat/completions/input_tokens"): {"messages": _SAID},
    ("post", "/v1/responses"): {"input": "Hello", "max_output_tokens": 8},
    ("post", "/v1/responses/input_tokens"): {"input": "Hello"},
    ("post", "/v1/embeddings"): {"input": ["one text", "another"], "encoding_format": "base64"},
    ("post", "/embedding"): {"content": "a text"},
    ("post", "/rerank"): {"query": "tea", "documents": ["green tea", "a horse"], "top_n": 1},
    ("post", "/v1/messages"): {"messages": _SAID, "max_tokens": 8},
    ("post", "/v1/messages/count_tokens"): {"messages": _SAID},
    ("post", "/api/generate"): {"model": "shakespeare", "prompt": "Once upon a time", "options": {"num_predict": 8}},
    ("post", "/api/chat"): {"model": "shakespeare", "messages": _SAID, "options": {"num_predict": 8}},
    ("post", "/api/embed"): {"model": "shakespeare", "input": ["one text", "another"]},
    ("post", "/api/embeddings"): {"model": "shakespeare", "prompt": "a text"},
    ("post", "/api/show"): {"model": "shakespeare"},
    ("post", "/v1/score"): {"input": ["a text to score"]},
    ("post", "/v1/fine_tuning/alpha/graders/run"): {"grader": _GRADER, "model_sample": "4", "item": {"answer": "4"}},
    ("post", "/v1/fine_tuning/alpha/graders/validate"): {"grader": _GRADER},
    ("post", "/v1/fine_tuning/jobs"): {"model": "a-model", "training_file": "file-1"},
}
