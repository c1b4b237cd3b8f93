"""Answers of llama-server's other endpoints: tokens, slots, adapters, streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Struct

from logitless.frontend.answers import UNSET, Opt, doc
from logitless.frontend.answers.generation import GenerationSettings


class Done(Struct):
    """It has been done."""

    success: bool = True


class Control(Struct):
    """Answer of /v1/chat/completions/control."""

    id: str
    success: bool
    message: Annotated[Opt[str], doc("why not")] = UNSET


class TokenIds(Struct):
    """Answer of /tokenize."""

    tokens: list[int]


class TokenPiece(Struct):
    """A token with its text."""

    id: int
    piece: Annotated[str | list[int], doc("its text, or its bytes where they are no text")]


class TokenPieces(Struct):
    """Answer of /tokenize with `with_pieces`."""

    tokens: list[TokenPiece]


class TokenizedPrompt(Struct):
    """Answer of /tokenize to vLLM's fields."""

    count: int
    max_model_len: Annotated[int, doc("the context, in tokens")]
    tokens: list[int]
    token_strs: Annotated[list[str] | None, doc("the tokens' texts, with `return_token_strs`")] = None


class DetokenizedText(Struct):
    """Answer of /detokenize."""

    content: str
    prompt: Annotated[str, doc("the same text, as vLLM names it")]


class TokenizerInfo(Struct):
    """Answer of /tokenizer_info: what a client needs to tokenize and to render chats by itself."""

    tokenizer_class: Annotated[str, doc("logitless's class of this kind of vocabulary")]
    vocab_size: int
    model_max_length: Annotated[int, doc("the context, in tokens")]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    add_eos_token: bool
    chat_template: str | None


class RenderedPrompt(Struct):
    """Answer of /apply-template."""

    prompt: str


class InputTokens(Struct):
    """Answer of the endpoints that count the tokens of an input."""

    object: str
    input_tokens: int


class Adapter(Struct, kw_only=True):
    """A LoRA adapter, and the scale that it has where a request names none."""

    id: int
    path: str
    scale: float
    task_name: str
    prompt_prefix: str
    model: Annotated[Opt[str], doc("its name as a fine-tuned model")] = UNSET


class StreamState(Struct, kw_only=True):
    """State of a stream that can be read again."""

    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: Annotated[int, doc("Unix time in seconds")]
    completed_at: Annotated[int, doc("0: it goes on")]


class NextToken(Struct, kw_only=True):
    """Progress of a slot's generation."""

    has_next_token: bool
    has_new_line: bool
    n_remain: Annotated[int, doc("tokens that the request still allows; -1: no limit")]
    n_decoded: Annotated[int, doc("tokens generated")]


class SlotState(Struct, kw_only=True):
    """A slot; of another key's request only the first four fields are shown."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    id_task: Opt[int] = UNSET
    n_prompt_tokens: Opt[int] = UNSET
    n_prompt_tokens_processed: Opt[int] = UNSET
    n_prompt_tokens_cache: Opt[int] = UNSET
    params: Opt[GenerationSettings] = UNSET
    next_token: Opt[list[NextToken]] = UNSET
    prompt: Annotated[Opt[str], doc("of servers with --verbose")] = UNSET


class SlotTimings(Struct):
    """Milliseconds of an action."""

    save_ms: Opt[float] = UNSET
    restore_ms: Opt[float] = UNSET


class SlotAction(Struct, kw_only=True):
    """Tokens of a slot that were saved, restored, erased or forked."""

    id_slot: int
    filename: Opt[str] = UNSET
    n_saved: Opt[int] = UNSET
    n_written: Annotated[Opt[int], doc("bytes")] = UNSET
    n_restored: Opt[int] = UNSET
    n_read: Annotated[Opt[int], doc("bytes")] = UNSET
    n_erased: Opt[int] = UNSET
    id_slot_to: Opt[int] = UNSET
    n_forked: Opt[int] = UNSET
    timings: Opt[SlotTimings] = UNSET


class Modalities(Struct, frozen=True):
    """Inputs that the model reads beside text."""

    vision: bool
    audio: bool = False


class DefaultSettings(Struct):
    """Settings of a request that names none."""

    params: GenerationSettings
    n_ctx: Annotated[int, doc("tokens of a slot")]


class EmptySettings(Struct, frozen=True):
    """Settings of a router, which generates nothing."""

    params: dict[str, Any] = {}
    n_ctx: int = 0


class Props(Struct, kw_only=True):
    """Properties of the server and its model."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    model_ftype: Annotated[str, doc("how the weights are quantized")]
    modalities: Modalities
    media_marker: Annotated[str, doc("stands for an image in a prompt")]
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    endpoint_tools: Annotated[bool, doc("the server runs tools: GET /tools")] = False
    ui: bool
    webui: bool
    ui_settings: Annotated[Mapping[str, Any], doc("defaults of pages: --ui-config")] = {}
    webui_settings: Mapping[str, Any] = {}
    chat_template: str
    chat_template_caps: dict[str, Any]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class RouterProps(Struct, kw_only=True):
    """Properties of a router."""

    role: Literal["router"] = "router"
    max_instances: Annotated[int, doc("models that are loaded at once; 0: no limit")]
    models_autoload: bool
    model_alias: str = "logitless"
    model_path: str = "none"
    default_generation_settings: EmptySettings = EmptySettings()
    total_slots: int = 0
    modalities: Modalities = Modalities(False)
    endpoint_slots: bool = False
    endpoint_props: bool = False
    endpoint_metrics: bool = False
    endpoint_tools: bool = False
    ui: bool
    webui: bool
    ui_settings: Mapping[str, Any] = {}
    webui_settings: Mapping[str, Any] = {}
    build_info: str
    is_sleeping: bool = False


class ToolPermissions(Struct):
    """Permissions of a tool."""

    write: Annotated[bool, doc("it may change something")]


class ToolEntry(Struct, kw_only=True):
    """A tool that the server runs."""

    display_name: str
    tool: Annotated[str, doc("its name for POST /tools")]
    type: Literal["server", "mcp"]
    permissions: ToolPermissions
    uses_cwd: bool = False
    definition: Annotated[dict[str, Any], doc("the tool as chat requests have it")]


class ToolAnswer(Struct, kw_only=True, omit_defaults=True):
    """Result of a call: a text, other members, or an error of the tool."""

    plain_text_response: Annotated[Opt[str], doc("the text for the model")] = UNSET
    error: Annotated[Opt[str], doc("why the call failed")] = UNSET
