"""Answers of transcriptions and translations, whole and as events of a stream."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from logitless.frontend.answers import doc


class InputTokenDetails(Struct):
    """Tokens of a prompt by their kind."""

    text_tokens: int
    audio_tokens: int


class SpokenTokens(Struct):
    """Token counts of a transcription."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails
    type: Literal["tokens"] = "tokens"


class SpokenText(Struct):
    """The text of a sound."""

    text: str
    usage: SpokenTokens


class VerboseText(Struct):
    """The text of a sound with its length; of response_format verbose_json."""

    task: Annotated[str, doc("transcribe or translate")]
    language: Annotated[str, doc("as the request names it")]
    duration: Annotated[float, doc("seconds")]
    text: str


class SpokenDelta(Struct, tag_field="type", tag="transcript.text.delta"):
    """More of the text."""

    delta: str


class SpokenDone(Struct, tag_field="type", tag="transcript.text.done"):
    """The whole text."""

    text: str
    usage: SpokenTokens
