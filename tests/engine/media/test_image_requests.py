"""Requests with images: the same bits alone, in a batch, from the cache, in chunks, on every device.

Also after the pool has evicted the image rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from logitless.cli.commands.planning.plan import projector_of
from logitless.engine.errors import InvalidRequest
from logitless.engine.media import media_encoder
from logitless.engine.runner import model_runner
from logitless.engine.runner.placement import PlacementOptions
from logitless.graph.backend import Backend
from tests.helpers.op_cases import ONE_GPU
from tests.helpers.vision_files import SPECS, picture, png, write_projector, write_text_model
from tests.helpers.vision_requests import Runs


def made(name: str, folder: Path, shared_data: Path) -> tuple[Path, Path]:
    spec = SPECS[name]
    model = write_text_model(folder / f"{name}.gguf", spec, shared_data / "models" / "stories260K.gguf")
    return model, write_projector(folder / f"{name}.mm.gguf", spec)


@pytest.mark.parametrize("name", ["mlp", "gemma3", "qwen3vl", "resampler", "cogvlm"])
def test_a_request_has_the_same_bits_whatever_shares_its_batch(name: str, tmp_path: Path, shared_data: Path) -> None:
    images = [png(picture(40, 24)), png(picture(24, 40, seed=2))]
    with Runs(*made(name, tmp_path, shared_data), n_ubatch=64) as runs:
        assert runs.runner.media is not None
        asked = runs.request("h<image>g<image>ab", images, 6)
        (alone,) = runs.run(asked)
        n_encoded = runs.runner.media.n_encoded
        (cached,) = runs.run(asked)  # keys and values come from the prefix cache
        assert runs.runner.media.n_encoded == n_encoded
        fresh = runs.request("h<image>g<image>ab", images, 6, cache_prompt=False)
        others = runs.request("some text", [], 9), runs.request("x<image>", images[1:], 9, cache_prompt=False)
        first, _, _ = runs.run(fresh, *others)
        runs.runner.media.clear()
        (again,) = runs.run(fresh)
        assert runs.runner.media.n_encoded > n_encoded
        assert alone == cached == first == again


def test_images_of_several_requests_are_one_run(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits that each has alone."""
    images = [png(picture(16, 16, seed=i)) for i in range(3)]
    with Runs(*made("qwen2.5vl", tmp_path, shared_data)) as runs:
        vision = runs.runner.media
        assert vision is not None
        sizes: list[int] = []
        encode = vision.encode
        monkeypatch.setattr(vision, "encode", lambda tiles: sizes.append(len(tiles)) or encode(tiles))
        asked = [
            runs.request(f"{text}<image>g", [image], 4, cache_prompt=False)
            for text, image in zip("hab", images, strict=True)
        ]
        alone = []
        for request in asked:
            vision.clear()
            alone += runs.run(request)
        assert sizes == [1, 1, 1]
        vision.clear()
        assert runs.run(*asked) == alone
        assert sizes[3:] == [3]
        assert runs.run(*asked) == alone
        assert sizes[4:] == []  # their rows are still there


def test_rows_that_do_not_fit_are_encoded_again(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [png(picture(16, 16, seed=i)) for i in range(5)]
    model, projector = made("mlp", tmp_path, shared_data)
    text = "h" + "<image>" * 5
    with Runs(model, projector) as runs:
        (expected,) = runs.run(runs.request(text, images, 3))
    monkeypatch.setattr(media_encoder, "LEAST_ROWS", 1)
    monkeypatch.setattr(model_runner, "MOST_MEDIA_ROWS", 40)  # room for two of five tiles
    with Runs(model, projector, n_ubatch=32) as runs:
        got, _ = runs.run(runs.request(text, images, 3), runs.request(text, images[::-1], 3))
        assert got == expected


@pytest.mark.parametrize("device", ONE_GPU)
def test_images_on_devices(
    device: str, tmp_path: Path, shared_data: Path, open_device: Callable[[str], Backend]
) -> None:
    open_device(device)  # or skip
    images = [png(picture(40, 24))]
    files = made("qwen2.5vl", tmp_path, shared_data)
    with Runs(*files) as runs:
        _, expected = runs.first("h<image>g", images)
    with Runs(*files, devices=(device, "cpu")) as runs:
        _, got = runs.first("h<image>g", images)
    top = max(expected, key=lambda id: expected[id])
    assert got[top] == pytest.approx(expected[top], abs=5e-3)


@pytest.mark.parametrize(
    ("on_cpu", "n_gpu_layers", "encoder", "text"),
    [(False, None, 0, {0}), (True, None, 1, {0}), (False, 0, 0, {1}), (True, 99, 1, {0}), (False, 2, 0, {0, 1})],
)
def test_where_the_encoder_runs(
    on_cpu: bool,
    n_gpu_layers: int | None,
    encoder: int,
    text: set[int],
    tmp_path: Path,
    shared_data: Path,
    open_device: Callable[[str], Backend],
) -> None:
    """On the device unless --no-mmproj-offload; it may have more layers than the text model."""
    open_device("opencl:0")  # or skip
    spec = replace(SPECS["mlp"], n_layer=9)
    model = write_text_model(tmp_path / "m.gguf", spec, shared_data / "models" / "stories260K.gguf")
    placement = PlacementOptions(n_gpu_layers)
    files = model, write_projector(tmp_path / "mm.gguf", spec)
    device = "cpu" if on_cpu else ""
    with Runs(*files, devices=("opencl:0", "cpu"), placement=placement, projector_device=device) as runs:
        assert runs.runner.media is not None
        result, _ = runs.runner.session.measure(runs.runner.media.largest[0])
        of = {leaf.name: result.backend_of[node] for node in result.order for leaf in node.src if leaf.op == "variable"}
        assert {backend for name, backend in of.items() if name.startswith(("v.", "mm."))} == {encoder}
        told = projector_of(runs.runner, ["opencl:0", "cpu"])
        assert told == {"file": str(files[1]), "type": "mlp", "devices": [("opencl:0", "cpu")[encoder]]}
        result, _ = runs.runner.measure()
        of = {leaf.name: result.backend_of[node] for node in result.order for leaf in node.src if leaf.op == "variable"}
        assert {backend for name, backend in of.items() if name.startswith("blk.")} == text
        if n_gpu_layers == 0 or on_cpu:
            return
        _, probs = runs.first("h<image>g", [png(picture(16, 16))])
    with Runs(*files) as runs:
        _, expected = runs.first("h<image>g", [png(picture(16, 16))])
    top = max(expected, key=lambda id: expected[id])
    assert probs[top] == pytest.approx(expected[top], abs=5e-3)


def test_image_without_room_or_encoder_is_refused(tmp_path: Path, shared_data: Path) -> None:
    image = png(picture(32, 32))
    with Runs(*made("gemma3", tmp_path, shared_data), n_ubatch=8) as runs:
        with pytest.raises(InvalidRequest, match="ubatch-size"):
            runs.scheduler.submit(runs.request("h<image>", [image]))
        runs.runner.media = None
        with pytest.raises(InvalidRequest, match="--mmproj"):
            runs.scheduler.submit(runs.request("h<image>", [image]))
