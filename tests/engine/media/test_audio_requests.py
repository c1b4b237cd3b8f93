"""Requests with sounds: the same bits alone, in a batch and from the cache; one encoding of a sound; devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from logitless.engine.errors import ExceedsContext, InvalidRequest
from logitless.graph.backend import Backend
from tests.helpers.audio_files import AUDIO_SPECS, N_CTX, sound, write_audio_projector, write_audio_text_model
from tests.helpers.vision_files import SPECS, picture, png
from tests.helpers.vision_requests import Runs


def made(name: str, folder: Path, shared_data: Path, **sizes: int) -> tuple[Path, Path]:
    spec = replace(AUDIO_SPECS[name], **sizes)  # type: ignore[arg-type]
    model = write_audio_text_model(folder / "m.gguf", spec, shared_data / "models" / "stories260K.gguf")
    return model, write_audio_projector(folder / "mm.gguf", spec)


@pytest.mark.parametrize("name", ["qwen2.5o audio", "gemma4a", "qwen3a", "granite_speech"])
def test_a_request_has_the_same_bits_whatever_shares_its_batch(name: str, tmp_path: Path, shared_data: Path) -> None:
    """With a sound and an image, or two sounds."""
    media = [sound(1), png(picture(40, 24)) if name == "qwen2.5o audio" else sound(0.5)]
    with Runs(*made(name, tmp_path, shared_data), n_ctx=N_CTX, n_ubatch=128) as runs:
        encoder = runs.runner.media
        assert encoder is not None
        asked = runs.request("h<image>g<image>ab", media, 4)
        (alone,) = runs.run(asked)
        assert encoder.n_encoded == 2
        (cached,) = runs.run(asked)  # keys and values come from the prefix cache
        fresh = runs.request("h<image>g<image>ab", media, 4, cache_prompt=False)
        others = runs.request("some text", [], 6), runs.request("x<image>", media[1:], 6, cache_prompt=False)
        first, _, _ = runs.run(fresh, *others)
        assert encoder.n_encoded == 2
        encoder.clear()
        (again,) = runs.run(fresh)
        assert encoder.n_encoded == 4
        assert alone == cached == first == again


def test_a_sound_of_two_requests_is_encoded_once(tmp_path: Path, shared_data: Path) -> None:
    """And two sounds are one run, with the bits that each has alone."""
    sounds = [sound(1), sound(2, seed=1)]
    with Runs(*made("ultravox", tmp_path, shared_data), n_ctx=N_CTX) as runs:
        encoder = runs.runner.media
        assert encoder is not None
        asked = [
            runs.request(f"{text}<image>g", [sounds[i]], 3, cache_prompt=False) for text, i in (("h", 0), ("a", 0))
        ]
        together = runs.run(*asked)
        assert encoder.n_encoded == 1
        assert [runs.run(request)[0] for request in asked] == together
        other = runs.request("b<image>g", sounds[1:], 3, cache_prompt=False)
        (expected,) = runs.run(other)
        encoder.clear()
        assert runs.run(asked[0], other) == [together[0], expected]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param("ultravox", "opencl:0", marks=pytest.mark.long),
        ("gemma4a", "vulkan:0"),
        ("granite_speech", "vulkan:0"),
        pytest.param("qwen3a", "vulkan:0", marks=pytest.mark.long),
    ],
)
def test_sounds_on_devices(
    name: str, device: str, tmp_path: Path, shared_data: Path, open_device: Callable[[str], Backend]
) -> None:
    open_device(device)  # or skip
    files = made(name, tmp_path, shared_data, n_layer=1, n_head=1, n_embd=20, n_ff=16)
    with Runs(*files, n_ctx=N_CTX) as runs:
        _, expected = runs.first("h<image>g", [sound(1)])
    with Runs(*files, n_ctx=N_CTX, devices=(device, "cpu")) as runs:
        _, got = runs.first("h<image>g", [sound(1)])
    top = max(expected, key=lambda id: expected[id])
    assert got[top] == pytest.approx(expected[top], abs=5e-3)


def test_sounds_beside_bidirectional_images_may_be_longer_than_a_step(tmp_path: Path, shared_data: Path) -> None:
    """Which images may not: the sound of 125 tokens is computed in steps of 96."""
    spec = replace(AUDIO_SPECS["gemma4a"], vision=SPECS["gemma4v"])
    model = write_audio_text_model(tmp_path / "m.gguf", spec, shared_data / "models" / "stories260K.gguf")
    image = png(picture(40, 24))
    with Runs(model, write_audio_projector(tmp_path / "mm.gguf", spec), n_ctx=N_CTX, n_ubatch=96) as runs:
        alone = runs.request("h<image>g", [sound(5)], 3)
        both = runs.request("h<image>g<image>", [image, sound(5)], 3)
        assert alone.media is not None
        assert both.media is not None
        assert (alone.media.causal, both.media.causal) == (True, False)
        assert [span.tile.n_rows for span in both.media.spans][1] == 125
        assert [len(tokens) for tokens in runs.run(alone, both)] == [3, 3]
        large = runs.request("<image>", [image])
        assert large.media is not None
        runs.scheduler.n_ubatch = 4
        with pytest.raises(InvalidRequest, match=r"an image has \d+ tokens, at most 4 .*; --ubatch-size is 4"):
            runs.scheduler.submit(large)


def test_too_long_sound_or_image_for_audio_model_is_refused(tmp_path: Path, shared_data: Path) -> None:
    """A sound of more tokens than the device keeps; an image for a model of sounds."""
    with Runs(*made("ultravox", tmp_path, shared_data)) as runs:
        assert runs.input is not None
        assert (runs.input.reads_images, runs.input.reads_audio) == (False, True)
        with pytest.raises(ValueError, match="needs a model that reads images, which this is not"):
            runs.input.image(png(picture(16, 16)))
        with pytest.raises(ExceedsContext, match="exceeds the available context size"):
            runs.scheduler.submit(runs.request("h<image>", [sound(200)]))
