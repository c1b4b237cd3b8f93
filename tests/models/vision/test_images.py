"""Image files of every format and fault, and their tiles."""

from __future__ import annotations

import io
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.media import media_input
from logitless.models.media.encoders import Encoders
from logitless.models.media.params import read_media_params
from logitless.models.vision import images
from logitless.models.vision.images import ImageError, decode_image
from logitless.models.vision.params import VisionParams, read_params
from logitless.models.vision.preprocess import dynamic_size, enlarged_size, fullest_grid, pieces_of
from tests.helpers.vision_files import SPECS, Fill, picture, png, write_projector, write_text_model
from tests.helpers.vision_requests import Runs


def test_formats_and_modes_become_rgb() -> None:
    plain = picture(20, 12)
    for form in ("PNG", "BMP", "GIF", "WEBP", "JPEG", "PPM", "TGA"):
        image = decode_image(png(plain, form))
        assert image.mode == "RGB"
        assert image.size == (20, 12)
    assert np.array_equal(np.asarray(decode_image(png(plain))), np.asarray(plain))
    for mode in ("L", "1"):
        for form in ("PPM", "TGA"):
            assert np.array_equal(
                np.asarray(decode_image(png(plain.convert(mode), form))),
                np.asarray(decode_image(png(plain.convert(mode)))),
            )
    rows = np.asarray(plain).reshape(-1).tolist()
    text = b"P3 # a comment\n20 12\n255\n" + " ".join(map(str, rows)).encode()
    assert np.array_equal(np.asarray(decode_image(text)), np.asarray(plain))
    assert np.asarray(decode_image(b"P5 1 1 65535 \x80\xff"))[0, 0].tolist() == [128, 128, 128]
    for mode in ("L", "P", "1", "CMYK"):
        data = png(plain.convert(mode), "JPEG" if mode == "CMYK" else "PNG")
        assert decode_image(data).mode == "RGB"
    deep = Image.fromarray(np.full((4, 4), 0x80FF, np.uint16))
    assert np.asarray(decode_image(png(deep)))[0, 0].tolist() == [128, 128, 128]


def test_transparency_is_white_and_exif_turns() -> None:
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert np.asarray(decode_image(png(clear)))[0, 0].tolist() == [255, 255, 255]
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    out = io.BytesIO()
    picture(20, 12).save(out, "JPEG", exif=exif)
    assert decode_image(out.getvalue()).size == (12, 20)


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(decode_image(out.getvalue()))[0, 0].tolist() == [255, 0, 0]


def test_faults_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = png(picture(40, 40))
    for data in (b"", b"no image", whole[:60], whole[:-30], png(picture(8, 8), "TIFF")):
        with pytest.raises(ImageError) as refused:
            decode_image(data)
        assert "\n" not in str(refused.value)
    with pytest.raises(ImageError, match="known format"):  # floats
        decode_image(b"Pf\n2 2\n-1\n" + bytes(16))
    runs = b"BM" + struct.pack("<I4xI", 1 << 20, 58) + struct.pack("<IiiHHII16x", 40, 9, 9, 1, 8, 1, 99) + bytes(4)
    for slow in (b"P2 9 9 255 ", b"P6 9 9 100 ", b"P5 9 9 4095 ", runs):  # decoded in Python
        with pytest.raises(ImageError, match="has 2097164 bytes in an encoding that is slow to read"):
            decode_image(slow.ljust((2 << 20) + 12))
    for kind, most, n in ((b"P6", 255, 3), (b"P5", 65535, 2), (b"P5", 255, 1)):
        large = b"%b 1500 1500 %d " % (kind, most)
        assert decode_image(large + bytes(1500 * 1500 * n)).size == (1500, 1500)
    header, scan = png(picture(16, 16), "JPEG").split(b"\xff\xda")
    with pytest.raises(ImageError, match="more than 64 scans"):
        decode_image(b"\xff\xda".join([header, *[scan] * 65]))
    monkeypatch.setattr(images, "MAX_PIXELS", 99)
    with pytest.raises(ImageError, match="10 x 10 pixels"):
        decode_image(png(picture(10, 10)))


@pytest.mark.parametrize("form", ["PNG", "GIF", "BMP", "WEBP", "JPEG", "PPM", "TGA"])
def test_a_bomb_is_refused_by_its_header(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is decoded."""
    bomb = png(Image.new("L", (101, 100)), form)
    monkeypatch.setattr(Image.Image, "load", None)
    monkeypatch.setattr(images, "MAX_PIXELS", 10_000)
    with pytest.raises(ImageError, match="has 101 x 100 pixels, at most 10000 are possible"):
        decode_image(bomb)


def test_mutated_images_are_decoded_or_refused() -> None:
    """200 mutations of each format."""
    r = random.Random(0)
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM", "TGA"):
        whole = png(picture(24, 24), form)
        for _ in range(200):
            data = bytearray(whole)
            for _ in range(r.randint(1, 8)):
                data[r.randrange(len(data))] = r.randrange(256)
            try:
                mode = decode_image(bytes(data[: r.randint(1, len(data))])).mode
            except ImageError:
                continue
            assert mode == "RGB"


@pytest.fixture
def params(tmp_path: Path) -> dict[str, VisionParams]:
    result = {}
    for name, spec in SPECS.items():
        with GGUFFile.open(write_projector(tmp_path / f"{name}.gguf", spec)) as gguf:
            result[name] = read_params(gguf)
    return result


def test_tiles_are_whole_units_within_the_limits(params: dict[str, VisionParams]) -> None:
    for p in params.values():
        for size in ((1, 1), (3, 200), (200, 3), (16, 16), (97, 41)):
            tiles = [piece for piece in pieces_of(picture(*size), p) if not isinstance(piece, str)]
            assert tiles
            for tile in tiles:
                height, width, colours = tile.shape
                assert (height % p.unit, width % p.unit, colours) == (0, 0, 3)
    p = replace(params["qwen2vl"], tokens=(4, 20))
    for size in ((5, 5), (400, 300), (1000, 20), (20, 1000), (33, 33)):
        width, height = dynamic_size(*size, p)
        assert 4 <= (width // p.unit) * (height // p.unit) <= 20 + 1000 // p.unit
    for n in (1, 2, 24, 40):  # tokens of a step, into which a bidirectional image must fit
        p = replace(params["gemma4v"], tokens=(n, n))
        for size in ((5, 5), (5, 6), (400, 300), (1000, 20), (20, 1000), (97, 41)):
            width, height = dynamic_size(*size, p)
            assert n // 2 <= p.n_rows(height, width) <= n
    grids = [(x, y) for x in range(1, 7) for y in range(1, 1 + 6 // x)]
    for size, side, grid in (((300, 100), 100, (3, 1)), ((100, 100), 100, (1, 1)), ((47, 48), 16, (2, 2))):
        assert fullest_grid(*size, side, grids) == grid  # of the last (2, 3) shows as much in f32
    for size, expected in (((46, 31), (48, 32)), ((30, 88), (16, 48)), ((110, 104), (48, 46)), ((200, 1), (48, 1))):
        assert enlarged_size(*size, 48) == expected


def test_very_narrow_images_become_tiles_within_the_limits(params: dict[str, VisionParams]) -> None:
    for name, p in params.items():
        for size in ((1, 300), (3, 5000), (9000, 1), (1, 70_000)):
            tiles = [piece for piece in pieces_of(Image.new("RGB", size), p) if not isinstance(piece, str)]
            assert tiles, name
            for tile in tiles:
                height, width, _ = tile.shape
                assert (height % p.unit, width % p.unit) == (0, 0)
                most = p.narrow_rows if p.causal else p.tokens[1]
                assert height * width <= max(most * p.unit**2, p.image_size**2, 512**2), name


def test_a_position_table_that_no_tile_fits_is_refused_by_name(tmp_path: Path, shared_data: Path) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    for name, positions in (("mlp", 15), ("internvl", 16), ("lfm2", 10), ("kimivl", 63)):
        path = write_projector(tmp_path / f"{name}.gguf", replace(SPECS[name], positions=positions))
        with pytest.raises(ModelFileError, match="position_embd"), Runs(model, path):
            pass


def ocr_with(key: str, value: int) -> dict[str, Any]:
    spec = SPECS["deepseekocr"]
    return vars(spec) | {"keys": spec.keys | {f"clip.vision.{key}": value}}


def test_projector_files_are_refused_by_name(tmp_path: Path, shared_data: Path) -> None:
    with (
        GGUFFile.open(shared_data / "models" / "stories260K.gguf") as gguf,
        pytest.raises(ModelFileError, match="clip"),
    ):
        read_params(gguf)
    mobilenet = SPECS["gemma3nv"]
    for changed, named in (
        (vars(mobilenet) | {"image": 384}, "image_size"),
        (vars(mobilenet) | {"extra": lambda fill, n: fill("v.conv_stem.bn.weight", 8)}, "no blocks of 4 stages"),
        ({"kind": "resampler9"}, "resampler9"),
        ({"n_head": 5}, "head_count"),
        ({"image": 18}, "image_size"),
        (vars(SPECS["resampler"]) | {"image": 18}, "image_size"),
        (ocr_with("window_size", 1), "window_size"),
        (ocr_with("sam.head_count", 5), "sam.head_count"),
        (vars(SPECS["resampler"]) | {"keys": {"clip.minicpmv_version": np.int32(7)}}, "minicpmv_version' is 7; known"),
        (vars(SPECS["resampler"]) | {"keys": {"clip.minicpmv_query_num": 9}}, "resampler.query' of 8 rows"),
    ):
        path = write_projector(tmp_path / "p.gguf", replace(SPECS["mlp"], **changed))
        with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=named):
            read_params(gguf)


def test_a_resampler_for_a_text_model_of_another_width_is_refused(tmp_path: Path) -> None:
    with GGUFFile.open(write_projector(tmp_path / "p.gguf", SPECS["resampler"])) as gguf:
        p = read_media_params(gguf)
        with pytest.raises(ModelFileError, match="heads of 128 numbers, the text model vectors of 64"):
            Encoders.check(gguf, p, 64)
        with pytest.raises(ModelFileError, match=r"tensor 'resampler.query' has shape \(8, 128\), expected \(8, 256\)"):
            Encoders.check(gguf, p, 256)


def test_a_bidirectional_image_fits_into_a_step(tmp_path: Path) -> None:
    with GGUFFile.open(write_projector(tmp_path / "p.gguf", SPECS["gemma4v"])) as gguf:
        assert read_params(gguf, n_ubatch=512).tokens == (70, 512)
        assert read_params(gguf, n_ubatch=16).tokens == (16, 16)
        assert read_params(gguf, (0, 600), n_ubatch=512).tokens == (70, 600)  # refused when an image is so large
        assert read_params(gguf, causal=True, n_ubatch=512).tokens == (70, 1120)


def test_images_that_were_read_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their files' bytes, up to a number of bytes of pixels."""
    monkeypatch.setattr(media_input, "CACHE_NBYTES", 2 * 16 * 16 * 3)
    with GGUFFile.open(write_projector(tmp_path / "p.gguf", SPECS["mlp"])) as file:
        reads = media_input.MediaInput(read_media_params(file), cast(Any, None), mrope=False)
    files = [png(picture(20, 16, seed=seed)) for seed in range(3)]
    first, second, third = (reads.image(file) for file in files)
    assert reads.image(files[1]) == second  # tiles are equal only to themselves
    assert reads.image(files[2]) == third
    assert reads.image(files[0]) != first
    assert reads.image(files[1]) != second


def test_bounds_of_products_are_one_number_each(tmp_path: Path, shared_data: Path) -> None:
    model = write_text_model(tmp_path / "t.gguf", SPECS["gemma4v"], shared_data)
    for value, named in ((np.zeros(2), "one number"), (np.array([np.nan]), "not a number")):

        def extra(fill: Fill, n: int, value: np.ndarray[Any, Any] = value) -> None:
            SPECS["gemma4v"].extra(fill, n)
            fill("v.blk.0.attn_q.input_max", values=value)

        path = write_projector(tmp_path / "p.gguf", replace(SPECS["gemma4v"], extra=extra))
        with pytest.raises(ModelFileError, match=f"attn_q.input_max.*{named}"), Runs(model, path):
            pass


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_strips_of_a_transparent_image_make_the_whole_image(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = np.random.default_rng(3)
    given = Image.fromarray(r.integers(0, 256, (37, 23, 4), dtype=np.uint8), "RGBA").convert(mode)
    out = io.BytesIO()
    given.save(out, "PNG", **({"transparency": 3} if mode == "P" else {}))
    rgba = Image.open(io.BytesIO(out.getvalue())).convert("RGBA")
    target = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    monkeypatch.setattr(images, "STRIP", 10)
    assert np.array_equal(np.asarray(decode_image(out.getvalue())), np.asarray(target))


def test_a_large_photo_is_decoded_at_half_its_size_and_other_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_DECODED", 60 * 60)
    photo = picture(64, 64)
    assert decode_image(png(photo, "JPEG")).size == (32, 32)
    assert decode_image(png(picture(60, 60), "JPEG")).size == (60, 60)
    with pytest.raises(ImageError, match="has 64 x 64 pixels, at most 3600 are possible, but in a JPEG file"):
        decode_image(png(photo))
