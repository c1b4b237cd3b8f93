"""Answers in the OpenAPI document: the schemas of the structs that the handlers return."""

from __future__ import annotations

from typing import Any

from msgspec.json import schema_components

from logitless.engine.sampling.params import params_of
from logitless.server.protocol.answers.anthropic import CountedTokens, Message, MessageEvent
from logitless.server.protocol.answers.fine_tuning import (
    Checkpoint,
    Deleted,
    File,
    Graded,
    Job,
    JobEvent,
    Page,
    ValidGrader,
)
from logitless.server.protocol.answers.generation import (
    GenerationSettings,
    NativeChunk,
    NativeCompletion,
    Selected,
    Verification,
)
from logitless.server.protocol.answers.llamacpp import (
    Adapter,
    Control,
    DetokenizedText,
    Done,
    InputTokens,
    Props,
    RenderedPrompt,
    SlotAction,
    SlotState,
    StreamState,
    TokenIds,
    TokenPieces,
)
from logitless.server.protocol.answers.ollama import (
    ListedModels,
    OllamaAnswer,
    OllamaVector,
    OllamaVectors,
    OllamaVersion,
    ShownModel,
)
from logitless.server.protocol.answers.openai import ChatChunk, ChatCompletion, TextChunk, TextCompletion
from logitless.server.protocol.answers.responses import (
    DeltaEvent,
    FailureEvent,
    InputItem,
    ItemEvent,
    PartEvent,
    Response,
    StatusEvent,
    WholeEvent,
)
from logitless.server.protocol.answers.vectors import Embeddings, NativeEmbedding, Ranking, Scores, TeiRankedDocument

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
ARRAY: Schema = {"type": "array"}
OBJECT: Schema = {"type": "object"}


def _always(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _each(names: str, kind: Schema) -> dict[str, Schema]:
    return dict.fromkeys(names.split(), kind)


def _one(*values: str | bool) -> Schema:
    return {"enum": list(values)}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_MODEL = _always(
    id=STRING,
    aliases=_array(STRING),
    tags=_array(STRING),
    object=_one("model"),
    created=INTEGER,
    owned_by=STRING,
    architecture=_always(input_modalities=_array(STRING), output_modalities=_array(STRING)),
    meta=_always(**_each("vocab_type n_vocab n_ctx_train n_embd n_params size", INTEGER)),
)
NATIVE = [NativeCompletion, list[NativeCompletion], Selected, list[Selected]]
EVENTS: dict[str, Any] = {  # the data of a stream's events
    "/completion": [NativeChunk, NativeCompletion],
    "/infill": [NativeChunk, NativeCompletion],
    "/v1/completions": TextChunk,
    "/v1/chat/completions": ChatChunk,
    "/v1/responses": [StatusEvent, ItemEvent, PartEvent, DeltaEvent, WholeEvent, FailureEvent],
    "/v1/messages": MessageEvent,
    "/v1/fine_tuning/jobs/{id}/events": JobEvent,
}
REPLIES: dict[tuple[str, str], Any] = {
    ("get", "/health"): _always(status=_one("ok")),
    ("get", "/v1/models"): _always(object=_one("list"), data=_array(_MODEL), models=_array(OBJECT)),
    ("get", "/v1/models/{id}"): _MODEL,
    ("delete", "/v1/models/{id}"): Deleted,
    ("get", "/props"): Props,
    ("post", "/props"): Done,
    ("get", "/openapi.json"): _always(openapi=STRING, info=OBJECT, paths=OBJECT, components=OBJECT),
    ("get", "/slots"): list[SlotState],
    ("post", "/slots/{id}"): SlotAction,
    ("post", "/v1/streams/lookup"): list[StreamState],
    ("get", "/lora-adapters"): list[Adapter],
    ("post", "/lora-adapters"): Done,
    ("post", "/completion"): NATIVE,
    ("post", "/infill"): NATIVE,
    ("post", "/tokenize"): [TokenIds, TokenPieces],
    ("post", "/detokenize"): DetokenizedText,
    ("post", "/apply-template"): RenderedPrompt,
    ("post", "/v1/completions"): TextCompletion,
    ("post", "/v1/verify"): Verification,
    ("post", "/v1/chat/completions"): ChatCompletion,
    ("post", "/v1/chat/completions/control"): Control,
    ("post", "/v1/chat/completions/input_tokens"): InputTokens,
    ("post", "/v1/responses"): Response,
    ("get", "/v1/responses/{id}"): Response,
    ("delete", "/v1/responses/{id}"): Deleted,
    ("get", "/v1/responses/{id}/input_items"): Page[InputItem],
    ("post", "/v1/responses/input_tokens"): InputTokens,
    ("post", "/v1/embeddings"): Embeddings,
    ("post", "/embedding"): list[NativeEmbedding],
    ("post", "/rerank"): [Ranking, list[TeiRankedDocument]],
    ("post", "/v1/messages"): Message,
    ("post", "/v1/messages/count_tokens"): CountedTokens,
    ("post", "/api/generate"): OllamaAnswer,
    ("post", "/api/chat"): OllamaAnswer,
    ("post", "/api/embed"): OllamaVectors,
    ("post", "/api/embeddings"): OllamaVector,
    ("get", "/api/tags"): ListedModels,
    ("get", "/api/ps"): ListedModels,
    ("post", "/api/show"): ShownModel,
    ("get", "/api/version"): OllamaVersion,
    ("post", "/v1/score"): Scores,
    ("get", "/v1/files"): Page[File],
    ("post", "/v1/files"): File,
    ("get", "/v1/files/{id}"): File,
    ("delete", "/v1/files/{id}"): Deleted,
    ("get", "/v1/fine_tuning/jobs"): Page[Job],
    ("post", "/v1/fine_tuning/jobs"): Job,
    ("get", "/v1/fine_tuning/jobs/{id}"): Job,
    ("post", "/v1/fine_tuning/jobs/{id}/cancel"): Job,
    ("post", "/v1/fine_tuning/jobs/{id}/pause"): Job,
    ("post", "/v1/fine_tuning/jobs/{id}/resume"): Job,
    ("get", "/v1/fine_tuning/jobs/{id}/events"): Page[JobEvent],
    ("get", "/v1/fine_tuning/jobs/{id}/checkpoints"): Page[Checkpoint],
    ("post", "/v1/fine_tuning/alpha/graders/run"): Graded,
    ("post", "/v1/fine_tuning/alpha/graders/validate"): ValidGrader,
}

_SAMPLERS = params_of(GenerationSettings)  # their fields have the requests' declarations


def answer_schema(answer: Any) -> tuple[Schema, dict[str, Schema]]:
    """(schema of an answer of this type, or of one of a list of types, schemas that it refers to).

    All fields are always there, except Opt ones.
    """
    if isinstance(answer, dict):
        return answer, {}
    kinds = answer if isinstance(answer, list) else [answer]
    schemas, components = schema_components(kinds, ref_template="#/components/schemas/{name}")
    for component in components.values():
        for name, field in component["properties"].items():
            if "default" in field:
                del field["default"]
                component["required"].append(name)
            if name in _SAMPLERS:
                field.setdefault("description", _SAMPLERS[name][1].doc)
    return {"anyOf": list(schemas)} if isinstance(answer, list) else schemas[0], components


def event_schema(answer: Any) -> tuple[Schema, dict[str, Schema]]:
    """The same of a server-sent event whose data are such an answer; None: any."""
    data: Schema = {"type": "string"}
    schema, components = answer_schema({} if answer is None else answer)
    if answer is not None:
        told = {"anyOf": [schema, {"$ref": "#/components/schemas/Error"}]}
        json = {"contentMediaType": "application/json", "contentSchema": told}
        data["anyOf"] = [{"const": "[DONE]"}, json]
    return {"type": "object", "properties": {"event": STRING, "data": data}}, components
