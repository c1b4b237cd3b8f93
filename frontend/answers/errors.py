"""Answers to requests that are refused or fail, as each API shows them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from logitless.frontend.answers import UNSET, Opt, doc


class ErrorDetail(Struct, kw_only=True):
    """The reason, and the sizes of a prompt that does not fit."""

    code: Annotated[int, doc("the HTTP status")]
    message: Annotated[str, doc("one line that names the field")]
    type: str
    param: Annotated[Opt[str], doc("the field that names no model")] = UNSET
    n_prompt_tokens: Annotated[Opt[int], doc("of a prompt that is too long")] = UNSET
    n_ctx: Annotated[Opt[int], doc("tokens that a request may have")] = UNSET


class Error(Struct):
    """An error of OpenAI's and llama-server's endpoints."""

    error: ErrorDetail


class AnthropicError(Struct, kw_only=True):
    """An error of the Messages API."""

    type: Literal["error"] = "error"
    error: ErrorDetail


class OllamaError(Struct):
    """An error of Ollama's endpoints."""

    error: Annotated[str, doc("one line that names the field")]
