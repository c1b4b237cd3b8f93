"""Transcriptions and translations of OpenAI's API: a form → the chat request that asks for them.

The prompt is llama-server's: the client's or a preset, the language in brackets, then the sound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Struct

from logitless.engine.sampling.params import INT_MAX, Param
from logitless.frontend.chat.chat import parse_chat
from logitless.frontend.fields import MAX_FORM_TEXT, bad_request, read
from logitless.frontend.media.media import Medium
from logitless.frontend.parser import GenerationJob, RequestParser
from logitless.models.chat.template import ChatTemplate

TRANSCRIBE: Final = "transcribe"
TRANSLATE: Final = "translate"
PROMPTS = {TRANSCRIBE: "Transcribe audio to text", TRANSLATE: "Translate audio to English text"}
_LFM2, _LFM2_PROMPT = "<|tool_list_start|>", "Perform ASR."  # a system message of this family, as in llama.cpp
FORMATS = ("json", "text", "verbose_json")
_TIMED = ("srt", "vtt", "diarized_json")


class TranslationForm(Struct, frozen=True, kw_only=True):
    """POST /v1/audio/translations, a multipart form."""

    file: Annotated[bytes, Param("the sound: WAV; MP3, FLAC or Ogg with the extra audio")]
    model: Annotated[str, Param("the model's name")] = ""
    prompt: Annotated[str, Param("what the model is asked, instead of the preset")] = ""
    response_format: Annotated[str, Param("form of the answer", choices=FORMATS)] = "json"
    temperature: Annotated[float, Param("temperature; 0: greedy", 0, 100)] = 0.0
    top_p: Annotated[float | None, Param("nucleus sampling", 0, 1)] = None
    seed: Annotated[int | None, Param("random seed")] = None
    max_tokens: Annotated[
        int | None, Param("most tokens of the text", -1, INT_MAX, aliases=("max_completion_tokens",))
    ] = None
    stream: Annotated[bool, Param("send the text as it comes (json)")] = False


class TranscriptionForm(TranslationForm, frozen=True, kw_only=True):
    """POST /v1/audio/transcriptions, a multipart form."""

    language: Annotated[str, Param("language of the sound, which the prompt then names")] = ""


@dataclass(frozen=True, slots=True)
class Spoken:
    """A request for a transcription: task, response format, language and length of the sound."""

    job: GenerationJob
    task: str
    response_format: str
    language: str
    seconds: float


def parse_spoken(fields: Mapping[str, bytes], parser: RequestParser, task: str) -> Spoken:
    """The chat request of a form."""
    values = _values(fields)
    if values.get("response_format") in _TIMED:
        bad_request("response_format", f"{values['response_format']} needs times, which these models do not tell")
    for name in ("timestamp_granularities", "include", "chunking_strategy", "known_speaker_names"):
        if value := values.get(name, values.get(f"{name}[]")):
            bad_request(name, f"{value[:32]!r} is not there")
    data = fields.get("file", b"")
    body = read(TranscriptionForm if task == TRANSCRIBE else TranslationForm, {**values, "file": ""})
    if body.stream and body.response_format != "json":
        bad_request("stream", f"is not there with response_format {body.response_format}")
    if not data:
        bad_request("file", "is required")
    result: list[Medium] = []
    marker = parser.media.file("file", data, result)
    language = getattr(body, "language", "")
    chat = {name: getattr(body, name) for name in ("model", "temperature", "top_p", "seed", "max_tokens", "stream")}
    chat["messages"] = _messages(body.prompt, language, parser.template, task, marker)
    job = parse_chat(chat, parser, result)
    return Spoken(job, task, body.response_format, language, parser.media.seconds(data))


def _messages(
    prompt: str, language: str, template: ChatTemplate | None, task: str, marker: str
) -> list[dict[str, str]]:
    messages = []
    if task == TRANSCRIBE and template is not None and _LFM2 in template.source:
        messages.append({"role": "system", "content": _LFM2_PROMPT})
    elif not prompt:
        prompt = PROMPTS[task]
    if language:
        prompt += f" (language: {language})"
    return [*messages, {"role": "user", "content": prompt + marker}]


_FLOATS, _INTEGERS = ("temperature", "top_p"), ("seed", "max_tokens", "max_completion_tokens")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _values(fields: Mapping[str, bytes]) -> dict[str, Any]:
    """The fields of a form beside its file, as JSON would have them."""
    values: dict[str, Any] = {}
    for name, raw in fields.items():
        if name == "file":
            continue
        if len(raw) > MAX_FORM_TEXT:
            bad_request(name[:64], f"has more than {MAX_FORM_TEXT} bytes")
        text = raw.decode("utf-8", "replace")
        if name in _FLOATS or name in _INTEGERS:
            if not (_INTEGER if name in _INTEGERS else _FLOAT).fullmatch(text.strip()):
                bad_request(name, f"expected {'an integer' if name in _INTEGERS else 'a number'}, got {text[:32]!r}")
            values[name] = int(text) if name in _INTEGERS else float(text)
        elif name == "stream":
            if text.lower() not in _BOOLEANS:
                bad_request(name, f"must be true or false, not {text[:32]!r}")
            values[name] = _BOOLEANS[text.lower()]
        else:
            values[name] = text
    return values
