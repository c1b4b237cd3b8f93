"""Answers of Ollama's API. Durations are nanoseconds."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from logitless.frontend.answers import UNSET, Opt, doc
from logitless.frontend.answers.generation import TokenLogprob


class OllamaFunction(Struct, frozen=True):
    """The function of a call; `arguments` is an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct, frozen=True):
    """A call that the model makes."""

    id: str
    function: OllamaFunction


class OllamaMessage(Struct, frozen=True):
    """A message of the assistant, or a part of it."""

    content: str = ""
    thinking: Opt[str] = UNSET
    tool_calls: Opt[list[OllamaCall]] = UNSET
    role: str = "assistant"


class OllamaAnswer(Struct, frozen=True):
    """A line of a stream, or a whole answer; durations are nanoseconds."""

    model: str
    created_at: str
    message: Opt[OllamaMessage] = UNSET
    response: Opt[str] = UNSET
    thinking: Opt[str] = UNSET
    tool_calls: Opt[list[OllamaCall]] = UNSET
    done: bool = False
    done_reason: Opt[str] = UNSET
    context: Opt[list[int]] = UNSET
    logprobs: Opt[list[TokenLogprob]] = UNSET
    total_duration: Opt[int] = UNSET
    load_duration: Opt[int] = UNSET
    prompt_eval_count: Opt[int] = UNSET
    prompt_eval_duration: Opt[int] = UNSET
    eval_count: Opt[int] = UNSET
    eval_duration: Opt[int] = UNSET


class OllamaVectors(Struct, frozen=True):
    """The answer of /api/embed; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: Opt[int] = UNSET


class OllamaVector(Struct, frozen=True):
    """The answer of /api/embeddings."""

    embedding: list[float]


class OllamaVersion(Struct, frozen=True):
    """The answer of /api/version."""

    version: Annotated[str, doc("version of Ollama that this API follows")]


class ModelDetails(Struct, frozen=True):
    """`details` of a model."""

    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""
    format: str = "gguf"
    parent_model: str = ""


class ListedModel(Struct, frozen=True):
    """An item of /api/tags and /api/ps."""

    name: str
    model: str
    modified_at: Opt[str]
    size: int
    digest: str
    details: ModelDetails
    capabilities: Opt[list[str]] = UNSET
    expires_at: Opt[str] = UNSET
    size_vram: Opt[int] = UNSET
    context_length: Opt[int] = UNSET


class ListedModels(Struct, frozen=True):
    """The answer of /api/tags and /api/ps."""

    models: list[ListedModel]


class ShownModel(Struct, frozen=True):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: Opt[str] = UNSET
    system: Annotated[Opt[str], doc("of a created model")] = UNSET
    messages: Annotated[Opt[list[OllamaMessage]], doc("of a created model")] = UNSET


class PullProgress(Struct, frozen=True):
    """A line of /api/pull and /api/create; the last one has the status success."""

    status: str
    digest: Annotated[Opt[str], doc("the file that is downloaded")] = UNSET
    total: Annotated[Opt[int], doc("bytes")] = UNSET
    completed: Annotated[Opt[int], doc("bytes")] = UNSET
