"""Answers about the server and its models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from logitless.frontend.answers import UNSET, Opt, doc


class Health(Struct):
    """The model is loaded."""

    status: Literal["ok"] = "ok"


class ApiDocument(Struct, kw_only=True):
    """Answer of /openapi.json."""

    openapi: Annotated[str, doc("the version of OpenAPI")] = "3.1.0"
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: Annotated[Opt[list[Any]], doc("where the server has API keys")] = UNSET


class Modality(Struct):
    """Kinds of inputs and outputs."""

    input_modalities: list[str]
    output_modalities: tuple[str, ...] = ("text",)


class ModelMeta(Struct, kw_only=True):
    """Sizes of a model."""

    vocab_type: int
    n_vocab: int
    n_ctx_train: Annotated[int, doc("tokens of the context in training")]
    n_embd: int
    n_params: int
    size: Annotated[int, doc("bytes of the weights")]


class ModelStatus(Struct, kw_only=True):
    """State of a router's model."""

    value: Annotated[str, doc("unloaded, loading, loaded or downloading")]
    args: Annotated[list[str], doc("flags of its server, for the admin key")]
    preset: Annotated[Opt[str], doc("for the admin key")] = UNSET
    failed: Annotated[Opt[Literal[True]], doc("its server has failed")] = UNSET
    exit_code: Opt[int | None] = UNSET
    error: Annotated[Opt[str], doc("the reason")] = UNSET


class FileProgress(Struct):
    """Bytes of a file that is being downloaded."""

    done: int
    total: int


class ModelEntry(Struct, kw_only=True):
    """A model, or a finetune of one."""

    id: str
    aliases: list[str]
    tags: list[str]
    object: Literal["model"] = "model"
    created: Annotated[int, doc("Unix time in seconds: the server's start")]
    owned_by: Literal["logitless"] = "logitless"
    path: Annotated[Opt[str], doc("of a router's model, for the admin key")] = UNSET
    status: Annotated[Opt[ModelStatus], doc("of a router's model")] = UNSET
    architecture: Modality
    source: Annotated[Opt[str], doc("of a router's model: preset, models_dir or cache")] = UNSET
    can_remove: Annotated[Opt[bool], doc("of a router's model")] = UNSET
    meta: Annotated[Opt[ModelMeta], doc("of a loaded model")] = UNSET
    root: Annotated[Opt[str], doc("of a finetune: its base model")] = UNSET
    parent: Annotated[Opt[str], doc("of a finetune: its base model")] = UNSET
    progress: Annotated[Opt[dict[str, FileProgress]], doc("of a download, by file")] = UNSET


class LMStudioModel(Struct, kw_only=True):
    """A model in LM Studio's list."""

    id: str
    object: Literal["model"] = "model"
    type: Annotated[str, doc("llm, vlm or embeddings")]
    publisher: str
    arch: str
    compatibility_type: Literal["gguf"] = "gguf"
    quantization: str
    state: Annotated[str, doc("loaded, loading or not-loaded")]
    max_context_length: Annotated[int, doc("tokens")]
    loaded_context_length: Annotated[Opt[int], doc("tokens; of a loaded model")] = UNSET
    capabilities: Annotated[list[str], doc("tool_use")]


class LMStudioModels(Struct, frozen=True):
    """Answer of GET /api/v0/models."""

    data: list[LMStudioModel]
    object: Literal["list"] = "list"


class NativeDetails(Struct, frozen=True, kw_only=True):
    """`details` of llama-server's list."""

    parent_model: str = ""
    family: str = ""
    parameter_size: str = ""
    quantization_level: str = ""
    format: str = "gguf"
    families: tuple[str, ...] = ("",)


class NativeModel(Struct, kw_only=True):
    """A model in llama-server's list."""

    name: str
    model: str
    type: Literal["model"] = "model"
    capabilities: tuple[str, ...] = ("completion",)
    modified_at: str = ""
    size: str = ""
    digest: str = ""
    description: str = ""
    parameters: str = ""
    tags: tuple[str, ...] = ("",)
    details: NativeDetails = NativeDetails()


class Models(Struct, kw_only=True):
    """Answer of /v1/models: llama-server's list and OpenAI's."""

    models: list[NativeModel]
    object: Literal["list"] = "list"
    data: list[ModelEntry]
