"""The fields of request bodies, as schemas for the OpenAPI document. `null` always means the default."""

from __future__ import annotations

from typing import Any

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

_SAMPLING = {
    **_many(
        "temperature dynatemp_range dynatemp_exponent top_p min_p top_n_sigma typical_p xtc_probability xtc_threshold "
        "mirostat_tau mirostat_eta adaptive_target adaptive_decay repeat_penalty presence_penalty frequency_penalty "
        "dry_multiplier dry_base t_max_predict_ms",
        "number",
    ),
    **_many(
        "top_k mirostat min_keep seed repeat_last_n dry_allowed_length dry_penalty_last_n n_probs n_predict max_tokens "
        "max_completion_tokens n_keep n_discard n_indent n n_cmpl id_slot n_cache_reuse sse_ping_interval",
        "integer",
    ),
    **_many(
        "stream ignore_eos cache_prompt return_tokens timings_per_token return_progress post_sampling_probs "
        "backend_sampling verbose grammar_lazy",
        "boolean",
    ),
    **_many("grammar model user", "string"),
    **_many("samplers stop", ["array", "string"]),
    **_many("dry_sequence_breakers grammar_triggers preserved_tokens lora response_fields", "array"),
    **_many("logit_bias", ["array", "object"]),
    **_many("json_schema", ["object", "boolean"]),
    **_many("response_format stream_options metadata", "object"),
}
_PROMPT: Schema = {"type": ["string", "array", "object"]}
_MESSAGE = _object({"role": {"type": "string"}, "content": {"type": ["string", "array", "null"]}}, "role")
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TOOLS = {
    **_many("tools", "array"),
    **_many("tool_choice", ["string", "object"]),
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
CHAT = _object(
    {
        **_SAMPLING,
        **_TOOLS,
        **_many("logprobs add_generation_prompt continue_final_message reasoning_control", "boolean"),
        **_many("top_logprobs", "integer"),
        **_many("chat_template_kwargs", "object"),
        **_many("reasoning_format", "string"),
        "messages": _MESSAGES,
    },
    "messages",
)
RESPONSES = _object(
    {
        **_SAMPLING,
        **_TOOLS,
        **_many("instructions", "string"),
        **_many("max_output_tokens", "integer"),
        "input": {"type": ["string", "array"]},
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
        "input": {"type": ["string", "array"]},
        "content": {"type": ["string", "array"]},
    }
)
RERANK = _object(
    {
        **_many("top_n", "integer"),
        "query": {"type": "string"},
        "documents": {"type": "array"},
        "texts": {"type": "array"},
    },
    "query",
)
TEXT = _object(
    {
        **_many("add_special parse_special with_pieces", "boolean"),
        "content": {"type": "string"},
        "tokens": {"type": "array", "items": {"type": "integer"}},
    }
)
TUNING = _object(
    {
        **_many("training_file validation_file suffix model", "string"),
        **_many("hyperparameters method", "object"),
        **_many("seed", "integer"),
    },
    "training_file",
)
