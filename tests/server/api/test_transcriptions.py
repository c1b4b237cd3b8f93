"""Transcriptions and translations: prompts, forms of the answer, streams, and forms that are refused."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import BadRequestError

from tests.helpers.http_fakes import FakeTemplate, Running, running
from tests.helpers.media_fakes import FakeMedia, shown
from tests.helpers.sounds import sine, wav

SOUND = wav(sine(440, 4000))
FILE = ("a.wav", SOUND)
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


class Lfm2Template(FakeTemplate):
    source = "<|tool_list_start|>"


def form(boundary: str = "x", **fields: Any) -> dict[str, Any]:
    """A form's body and header, written by hand."""
    body = b""
    for name, value in fields.items():
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
        body += (value if isinstance(value, bytes) else str(value).encode()) + b"\r\n"
    body += f"--{boundary}--\r\n".encode()
    return {"data": body, "headers": {"Content-Type": f"multipart/form-data; boundary={boundary}"}}


async def test_the_official_client() -> None:
    async with running(media=FakeMedia(audio=True)) as server:
        audio = server.openai.audio
        heard = await audio.transcriptions.create(file=FILE, model="m", prompt="say:hello", language="de")
        assert heard.text == "hello (language: de){0.25s}"
        assert heard.usage is not None
        assert heard.usage.type == "tokens"
        assert heard.usage.output_tokens == len(" (language: de){0.25s}") + 1 + 1  # a token for hello, and the end's
        assert heard.usage.total_tokens == heard.usage.input_tokens + heard.usage.output_tokens
        text: Any = await audio.transcriptions.create(file=FILE, model="m", prompt="say:hi", response_format="text")
        assert text == "hi{0.25s}"
        verbose = await audio.transcriptions.create(
            file=FILE, model="m", prompt="say:hi", response_format="verbose_json", language="en"
        )
        assert (verbose.text, verbose.duration, verbose.language) == ("hi (language: en){0.25s}", 0.25, "en")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer clients say so of translations
            english = await audio.translations.create(file=FILE, model="m", prompt="say:hi")
        assert english.text == "hi{0.25s}"
        stream = await audio.transcriptions.create(file=FILE, model="m", prompt="say:abc", stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
        assert "".join(event.delta for event in events[:-1] if event.type == "transcript.text.delta") == "abc{0.25s}"
        done = events[-1]
        assert done.type == "transcript.text.done"
        assert done.text == "abc{0.25s}"
        assert done.usage is not None


async def test_prompts_are_llama_servers() -> None:
    async with running(media=FakeMedia(audio=True)) as server:
        for path, fields, prompt in (
            (PATHS[0], {}, "Transcribe audio to text{0.25s}"),
            (PATHS[0], {"language": "fr"}, "Transcribe audio to text (language: fr){0.25s}"),
            (PATHS[0], {"prompt": "Write it"}, "Write it{0.25s}"),
            (PATHS[1], {}, "Translate audio to English text{0.25s}"),
        ):
            assert (await server.post(path, None, **form(file=SOUND, max_tokens=1, **fields)))[0] == 200
            assert shown(server).endswith(f"[user]{prompt}[/][assistant]")
            request = server.scheduler.requests[-1]
            assert (request.sampling.temperature, request.n_predict) == (0, 1)
        sampled = form(file=SOUND, temperature="0.7", seed="3", top_p="0.5", max_completion_tokens="2")
        assert (await server.post(PATHS[0], None, **sampled))[0] == 200
        request = server.scheduler.requests[-1]
        assert request.sampling.temperature == pytest.approx(0.7)
        assert (request.sampling.seed, request.sampling.top_p, request.n_predict) == (3, 0.5, 2)
    async with running(media=FakeMedia(audio=True), template=Lfm2Template()) as server:
        assert (await server.post(PATHS[0], None, **form(file=SOUND, max_tokens=1)))[0] == 200
        assert shown(server).endswith("[system]Perform ASR.[/][user]{0.25s}[/][assistant]")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "field 'file': is required"),
    ({"file": b""}, "field 'file': is required"),
    ({"file": b"hello, this is no sound"}, "field 'file': the audio is no sound of a known format"),
    ({"file": SOUND[:-1]}, "field 'file': the audio is cut off"),
    ({"file": SOUND, "response_format": "srt"}, "field 'response_format': srt needs times"),
    ({"file": SOUND, "response_format": "vtt"}, "field 'response_format': vtt needs times"),
    ({"file": SOUND, "response_format": "xml"}, "field 'response_format': must be one of json, text, verbose_json"),
    ({"file": SOUND, "timestamp_granularities[]": "word"}, "field 'timestamp_granularities': 'word' is not there"),
    ({"file": SOUND, "include[]": "logprobs"}, "field 'include': 'logprobs' is not there"),
    ({"file": SOUND, "temperature": "warm"}, "field 'temperature': expected a number, got 'warm'"),
    ({"file": SOUND, "temperature": "nan"}, "field 'temperature': expected a number, got 'nan'"),
    ({"file": SOUND, "temperature": "1_0"}, "field 'temperature': expected a number, got '1_0'"),
    ({"file": SOUND, "seed": "٣"}, "field 'seed': expected an integer, got '٣'"),
    ({"file": SOUND, "max_tokens": "1.5"}, "field 'max_tokens': expected an integer, got '1.5'"),
    ({"file": SOUND, "stream": "maybe"}, "field 'stream': must be true or false"),
    ({"file": SOUND, "stream": "true", "response_format": "text"}, "field 'stream': is not there with"),
    ({"file": SOUND, "prompt": "x" * 70_000}, "field 'prompt': has more than 65536 bytes"),
    ({f"f{i}": "" for i in range(101)}, "the body is not a multipart form: it has more than 100 parts"),
]  # fmt: skip


async def refusal(server: Running, status: int = 400, path: str = PATHS[0], **sent: Any) -> str:
    got, reply = await server.post(path, None, **sent)
    assert got == status, reply
    return str(reply["error"]["message"])


async def test_forms_are_refused_in_one_line() -> None:
    async with running(media=FakeMedia(audio=True), audio_max_seconds=1) as server:
        for fields, message in REFUSED:
            assert (await refusal(server, **form(**fields))).startswith(message), fields
        long = wav(sine(440, 20_000))
        assert "the audio is longer than 1 seconds" in await refusal(server, **form(file=long))
        whole = form(file=SOUND)
        for data, reason in (
            (whole["data"][:-8], "it does not end with its boundary"),
            (b"", "it does not end with its boundary"),
            (b"--x\r\nno headers", "a part of it has no headers"),
            (b"--x\r\n" + b"a" * 9000 + b"\r\n\r\n--x--", "a part of it has no headers"),
        ):
            message = await refusal(server, data=data, headers=whole["headers"])
            assert message == f"the body is not a multipart form: {reason}"
        headers = {"Content-Type": "multipart/form-data"}
        assert (await refusal(server, data=whole["data"], headers=headers)).endswith("its header has no boundary")
        message = await refusal(server, data=b"{}", headers={"Content-Type": "application/json"})
        assert message.startswith("the body must be a multipart form with the fields 'file'")
        assert not server.bodies._taken


async def test_models_without_audio() -> None:
    for media, reason in (
        (None, "this server was started without --mmproj"),
        (FakeMedia(), "the projector of --mmproj reads images only"),
    ):
        async with running(media=media) as server:
            for path in PATHS:
                message = await refusal(server, path=path, **form(file=SOUND))
                assert message == f"field 'file': audio needs a model that reads it: {reason}"
            with pytest.raises(BadRequestError):
                await server.openai.audio.transcriptions.create(file=FILE, model="m")


async def test_large_uploads_are_refused_before_they_are_read() -> None:
    async with running(media=FakeMedia(audio=True), max_body=10_000) as server:
        assert "larger than 10000 bytes" in await refusal(server, 413, **form(file=bytes(20_000)))

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield bytes(10_000)

        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        assert "larger than 10000 bytes" in await refusal(server, 413, data=chunks(), headers=headers)
        assert (await server.post(PATHS[0], None, **form(file=SOUND, max_tokens=1)))[0] == 200


async def test_a_boundary_may_be_odd_and_a_file_may_have_it() -> None:
    async with running(media=FakeMedia(audio=True)) as server:
        sent = form("a'b-c", file=SOUND, prompt="say:--a'b-c--")
        sent["headers"]["Content-Type"] = 'multipart/form-data; boundary="a\'b-c"; charset=utf-8'
        status, reply = await server.post(PATHS[0], None, **sent)
        assert (status, reply["text"]) == (200, "--a'b-c--{0.25s}")
        sent["data"] = b"before it\r\n" + sent["data"] + b"after it"
        assert (await server.post(PATHS[0], None, **sent))[0] == 200
