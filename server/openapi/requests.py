"""The fields of request bodies, as schemas for the OpenAPI document. `null` always means the default."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from logitless.engine.sampling.params import INT_MAX, SamplerParams, params_of

Schema = dict[str, Any]


def _many(names: str, kind: str | list[str]) -> dict[str, Schema]:
    kinds = [kind] if isinstance(kind, str) else kind
    return {name: {"type": [*kinds, "null"]} for name in names.split()}


def _object(fields: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": fields, **({"required": list(required)} if required else {})}


ERROR = _object(
    {"error": _object({"code": {"type": "integer"}, "message": {"type": "string"}, "type": {"type": "string"}})},
    "error",
)


def _limits(kind: str, **limits: tuple[float | None, float | None]) -> dict[str, Schema]:
    """Fields outside of whose limits is a refusal."""
    return {
        name: {"type": [kind, "null"]}
        | ({} if low is None else {"minimum": low})
        | ({} if high is None else {"maximum": high})
        for name, (low, high) in limits.items()
    }


def _items(names: str, *kinds: str | Schema) -> dict[str, Schema]:
    items = [{"type": kind} if isinstance(kind, str) else kind for kind in kinds]
    return {
        name: {"type": ["array", "null"], "items": items[0] if len(items) == 1 else {"anyOf": items}}
        for name in names.split()
    }


def _declared(kind: type[Struct]) -> dict[str, Schema]:
    """The fields of a struct as it declares them."""
    types = {int: "integer", float: "number", bool: "boolean", str: "string"}
    found = {}
    for name, (of, param) in params_of(kind).items():
        schema: Schema = {"type": [types.get(of, "array"), "null"], "description": param.doc}
        if param.hard:
            schema |= {"minimum": param.low, "maximum": param.high}
        if types.get(of) is None:
            schema |= {"items": {"type": "string"}, "minItems": 1, "maxItems": param.most}
        found[name] = schema
    return found


_SAMPLING = {
    **_declared(SamplerParams),
    **_limits("number", t_max_predict_ms=(-1, None)),
    **_many("n_probs", "integer"),
    **_limits(
        "integer",
        **dict.fromkeys(("n_predict", "max_tokens", "max_completion_tokens", "n_keep"), (-1, INT_MAX)),
        **dict.fromkeys(("n_discard", "n_indent", "n_cache_reuse"), (0, INT_MAX)),
        sse_ping_interval=(-1, INT_MAX),
        n=(1, None),
        n_cmpl=(1, None),
        id_slot=(-1, None),
    ),
    **_many(
        "stream ignore_eos cache_prompt return_tokens timings_per_token return_progress post_sampling_probs "
        "backend_sampling verbose grammar_lazy",
        "boolean",
    ),
    **_many("grammar model user", "string"),
    "samplers": {"type": ["array", "string", "null"], "items": {"type": "string"}},
    "stop": {"type": ["array", "string", "null"], "items": {"type": "string"}, "maxItems": 256},
    **_items("preserved_tokens response_fields", "string"),
    **_items("grammar_triggers", _object({"type": {"type": ["string", "integer"]}}, "type")),
    **_items("lora", _object({"id": {"type": "integer"}, "scale": {"type": "number"}}, "id")),
    **_many("logit_bias", ["array", "object"]),
    **_many("json_schema", ["object", "boolean"]),
    "response_format": {
        "type": ["object", "null"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema", "grammar", "regex"]}},
    },
    "stream_options": {"type": ["object", "null"], "properties": _many("include_usage", "boolean")},
    **_many("metadata", "object"),
}
_PROMPT: Schema = {"type": ["string", "array", "object"]}
_ROLE: Schema = {"type": "string", "examples": ["system", "developer", "user", "assistant", "tool"], "minLength": 1}
_PART = _object({"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}}, "type", "text")
_CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}
_MESSAGE = _object({"role": _ROLE, "content": _CONTENT}, "role", "content")
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_FUNCTION = _object(
    {"name": {"type": "string", "minLength": 1}, "description": {"type": "string"}, "parameters": {"type": "object"}},
    "name",
)
_TOOLS = {
    **_items("tools", _object({"type": {"enum": ["function"]}, "function": _FUNCTION}, "type", "function")),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]},
    **_many("parallel_tool_calls parse_tool_calls", "boolean"),
}

COMPLETION = _object(
    {
        **_SAMPLING,
        **_many("logprobs best_of", ["integer", "boolean"]),
        **_many("echo", "boolean"),
        **_many("suffix input_prefix input_suffix", "string"),
        **_many("input_extra", "array"),
        "prompt": _PROMPT,
    }
)
VERIFY = _object(
    {**_SAMPLING, "prompt": _PROMPT, **_items("draft_tokens", "integer")},
)
CHAT = _object(
    {
        **_SAMPLING,
        **_TOOLS,
        **_many("logprobs add_generation_prompt continue_final_message reasoning_control", "boolean"),
        **_many("top_logprobs", "integer"),
        **_many("chat_template_kwargs", "object"),
        "reasoning_format": {"enum": ["none", "auto", "deepseek", "deepseek-legacy", None]},
        "messages": _MESSAGES,
    },
    "messages",
)
RESPONSES = _object(
    {
        **_SAMPLING,
        **_TOOLS,
        **_many("instructions previous_response_id", "string"),
        **_many("store", "boolean"),
        **_limits("integer", max_output_tokens=(1, None)),
        **_items("tools", _object({"type": {"enum": ["function"]}, **_FUNCTION["properties"]}, "type", "name")),
        "input": {"anyOf": [{"type": "string"}, _MESSAGES]},
    },
    "input",
)
MESSAGES = _object(
    {
        **_many("temperature top_p", "number"),
        **_many("top_k", "integer"),
        **_many("system", ["string", "array"]),
        **_many("stop_sequences tools", "array"),
        **_many("tool_choice thinking metadata", "object"),
        **_many("stream", "boolean"),
        "max_tokens": {"type": "integer", "minimum": 1},
        "messages": _MESSAGES,
    },
    "messages",
)
EMBEDDING = _object(
    {
        **_many("encoding_format model user", "string"),
        **_many("embd_normalize", "integer"),
        **_many("lora", "array"),
        "input": {"type": ["string", "array"]},
        "content": {"type": ["string", "array"]},
    }
)
RERANK = _object(
    {
        **_many("top_n", "integer"),
        **_many("model", "string"),
        **_many("lora", "array"),
        "query": {"type": "string"},
        "documents": {"type": "array"},
        "texts": {"type": "array"},
    },
    "query",
)
TEXT = _object(
    {
        **_many("add_special parse_special with_pieces", "boolean"),
        "content": {"type": ["string", "array", "null"]},
    }
)
TOKENS = _object(_items("tokens", "integer"))
TUNING = _object(
    {
        **_many("training_file validation_file suffix model", "string"),
        **_many("hyperparameters method", "object"),
        "integrations": {"type": ["array", "null"], "maxItems": 0},
        **_limits("integer", seed=(0, None)),
    },
    "training_file",
)
FILE = _object(
    {"purpose": {"enum": ["fine-tune"]}, "file": {"type": "string", "format": "binary"}},
    "purpose",
    "file",
)
SLOT = _object(_many("filename", "string") | _limits("integer", id_slot_to=(0, None)))
LOOKUP = _object(
    {"conversation_ids": {"type": "array", "items": {"type": "string"}, "maxItems": 1000}}, "conversation_ids"
)
CONTROL = _object({"id": {"type": "string", "minLength": 1}, "action": {"enum": ["reasoning_end"]}}, "id", "action")
SCORE = _object(
    {
        "input": {"type": ["string", "array", "object"]},
        **_many("model", "string"),
        **_many("lora", "array"),
        **_many("gradient_norm", "boolean"),
    },
    "input",
)
SCALES: Schema = {
    "type": "array",
    "items": _object({"id": {"type": "integer"}, "scale": {"type": "number"}}, "id", "scale"),
}

_PAGE: dict[str, Schema] = {"limit": {"type": "integer", "minimum": 1, "maximum": 10_000}, "after": {"type": "string"}}
_FROM: dict[str, Schema] = {"from": {"type": "integer", "minimum": 0}}
_CONVERSATION: dict[str, Schema] = {"conv_id": {"type": "string"}}
QUERIES: dict[tuple[str, str], dict[str, Schema]] = {
    ("get", "/slots"): {"fail_on_no_slot": {"type": "integer"}},
    ("post", "/slots/{id}"): {"action": {"enum": ["save", "restore", "erase", "fork"]}},
    ("get", "/v1/stream"): _CONVERSATION | _FROM,
    ("delete", "/v1/stream"): _CONVERSATION,
    ("get", "/v1/stream/{id}"): _FROM,
    ("get", "/v1/files"): _PAGE | {"order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}},
    ("get", "/v1/responses/{id}/input_items"): _PAGE | {"order": {"enum": ["asc", "desc"]}},
    ("get", "/v1/fine_tuning/jobs"): _PAGE,
    ("get", "/v1/fine_tuning/jobs/{id}/checkpoints"): _PAGE,
    ("get", "/v1/fine_tuning/jobs/{id}/events"): _PAGE | {"stream": {"type": "boolean"}},
}

_SAID = [{"role": "user", "content": "Hello"}]
_ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
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
    ("post", "/v1/chat/completions"): {
        "messages": _SAID,
        "max_tokens": 8,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": _ADD}}],
    },
    ("post", "/v1/chat/completions/control"): {"id": "chatcmpl-1", "action": "reasoning_end"},
    ("post", "/v1/chat/completions/input_tokens"): {"messages": _SAID},
    ("post", "/v1/responses"): {"input": "Hello", "max_output_tokens": 8},
    ("post", "/v1/responses/input_tokens"): {"input": "Hello"},
    ("post", "/v1/embeddings"): {"input": ["one text", "another"], "encoding_format": "base64"},
    ("post", "/embedding"): {"content": "a text"},
    ("post", "/rerank"): {"query": "tea", "documents": ["green tea", "a horse"], "top_n": 1},
    ("post", "/v1/messages"): {"messages": _SAID, "max_tokens": 8},
    ("post", "/v1/messages/count_tokens"): {"messages": _SAID},
    ("post", "/v1/score"): {"input": ["a text to score"]},
    ("post", "/v1/fine_tuning/jobs"): {"model": "a-model", "training_file": "file-1"},
}
