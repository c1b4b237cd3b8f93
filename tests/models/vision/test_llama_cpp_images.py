"""llama.cpp as the oracle of images: every projector type, one and two images, resized and tiled.

Weights are random."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from PIL.Image import Resampling

from logitless.models.media.media_input import MediaInput
from tests.helpers.vision_files import SPECS, picture, png, resampler, with_tokens, write_projector, write_text_model
from tests.helpers.vision_requests import Runs

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
SIZES = ((16, 16), (50, 30), (24, 72))
LLAMA_CPP = """
import json, sys, urllib.request, xllamacpp
for model, projector, prompts, most, n_ctx, exact in json.load(sys.stdin):
    p = xllamacpp.CommonParams()
    p.model.path, p.mmproj.path, p.mmproj_use_gpu, p.n_ctx, p.n_parallel = model, projector, False, n_ctx, 1
    p.image_max_tokens = most or -1
    if "cogvlm" in model:  # its logits are those of a step's first token
        p.n_ubatch = 1
    if exact:
        p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    p.warmup, p.fit_params, p.verbosity, p.cpuparams.n_threads = False, False, -1, 1
    server = xllamacpp.Server(p)
    def ask(path, body=None):
        request = urllib.request.Request(server.listening_address + path, body and json.dumps(body).encode())
        return json.loads(urllib.request.urlopen(request).read())
    marker, found = ask("/props")["media_marker"], []
    for text, images in prompts:
        prompt = {"prompt_string": text.replace("<image>", marker), "multimodal_data": images}
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 5, "cache_prompt": False}
        told = ask("/completion", {**body, "ignore_eos": True})
        tops = told.get("completion_probabilities")  # missing where the token is half a character
        found.append([told["tokens_evaluated"], tops and [(t["id"], t["logprob"]) for t in tops[0]["top_logprobs"]]])
    print(json.dumps(found))
"""


def theirs(
    cases: list[tuple[str, str, list[tuple[str, list[str]]]]], most: int = 0, n_ctx: int = 1024, *, exact: bool = False
) -> list[Any]:
    """Answers to (model, projector, prompts). `most`: rows of an image at most; 0: the projector's own limit.
    `exact`: attention in f32, and not by halves."""
    asked = json.dumps([(*case, most, n_ctx, exact) for case in cases])
    done = subprocess.run([sys.executable, "-c", LLAMA_CPP], input=asked, capture_output=True, text=True, timeout=120)
    if done.returncode == -signal.SIGILL:
        pytest.skip("the package of llama.cpp is not built for this processor")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_projector_answers_as_llama_cpp(
    shared_data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The tallest images with --long, too."""
    stories = shared_data / "models" / "stories260K.gguf"
    prompts = []
    for size in SIZES if request.config.getoption("--long") else SIZES[:2]:
        # no transposed pair: llama.cpp mistakes Gemma 4's images of as many rows for equal shapes
        images = [png(picture(*size)), png(picture(size[1] + 8, size[0], seed=5))]
        prompts += [("h<image>g", images[:1]), ("h<image><image>g", images)]
    encoded = [(text, [base64.b64encode(image).decode() for image in images]) for text, images in prompts]
    files = {}
    for name, spec in SPECS.items():
        model = write_text_model(tmp_path / f"{name}.gguf", spec, stories)
        files[name] = model, write_projector(tmp_path / f"{name}.mm.gguf", spec)
    n_prompts = {"deepseekocr": 2}  # whose overview has a thousand pixels a side
    cases = [(str(model), str(projector), encoded[: n_prompts.get(name)]) for name, (model, projector) in files.items()]
    answers = theirs(cases)
    for (name, (model, projector)), case, expected in zip(files.items(), cases, answers, strict=True):
        if sum(value is not None for _, tops in expected for _, value in (tops or [])[:3]) < 6:
            expected = theirs([case])[0]  # llama.cpp reads memory that models before it left behind
        n_compared = 0
        with Runs(model, projector) as runs:
            assert isinstance(runs.input, MediaInput)
            for (text, images), (n_tokens, tops) in zip(prompts, expected, strict=name not in n_prompts):
                n, got = runs.first(text, images)
                assert n == n_tokens, (name, text)
                for id, value in [top for top in tops or () if top[1] is not None][:3]:  # null: NaN in llama.cpp
                    assert got[id] == pytest.approx(value, abs=0.04), (name, text)
                    n_compared += 1
        assert n_compared >= 6, name


# MiniCPM-V 2.5 has its own texts around slices, more queries here than a tile has patches, and today's names
OLD = replace(
    SPECS["resampler"],
    extra=lambda fill, n: resampler(fill, n, 40),
    keys={"clip.minicpmv_version": np.int32(2), "clip.minicpmv_query_num": 40},
    swapped=False,
)
TILED = {name: SPECS[name] for name in ("idefics3", "internvl", "llama4", "resampler")} | {"resampler 2.5": OLD}
_GRIDS = [16, 32, 32, 16, 32, 32, 48, 16]
TILED["llava 1.6"] = replace(SPECS["mlp"], keys={"clip.vision.image_grid_pinpoints": _GRIDS})


@pytest.mark.parametrize("name", TILED)
def test_tiles_of_odd_sizes_are_as_in_llama_cpp(name: str, shared_data: Path, tmp_path: Path) -> None:
    """Shorter sides that become 32.4, 16.4 and 45.4 of 48 pixels; a grid that another fits as well in f64."""
    model = write_text_model(tmp_path / "t.gguf", TILED[name], shared_data / "models" / "stories260K.gguf")
    projector = write_projector(tmp_path / "p.gguf", TILED[name])
    images = [png(picture(*size)) for size in ((46, 31), (88, 30), (104, 110), (47, 48))]
    asked = [("h<image>g", [base64.b64encode(image).decode()]) for image in images]
    (answers,) = theirs([(str(model), str(projector), asked)])
    with Runs(model, projector) as runs:
        for image, (n_tokens, tops) in zip(images, answers, strict=True):
            n, got = runs.first("h<image>g", [image])
            assert n == n_tokens
            for id, value in [top for top in tops or () if top[1] is not None][:3]:
                assert got[id] == pytest.approx(value, abs=0.04)


def test_a_large_map_is_pooled_as_in_llama_cpp(tmp_path: Path) -> None:
    """Gemma 3n: maps of 32 × 32 and 16 × 16 become 16 × 16 rows."""
    spec = replace(SPECS["gemma3nv"], image=512)
    model = write_text_model(tmp_path / "t.gguf", spec, tmp_path)
    projector, image = write_projector(tmp_path / "p.gguf", spec), png(picture(50, 30))
    ((answer,),) = theirs([(str(model), str(projector), [("h<image>g", [base64.b64encode(image).decode()])])])
    with Runs(model, projector) as runs:
        n, got = runs.first("h<image>g", [image])
    assert n == answer[0]
    assert [got[id] for id, _ in answer[1][:3]] == pytest.approx([value for _, value in answer[1][:3]], abs=0.04)


def test_rows_of_squares_are_as_in_llama_cpp(tmp_path: Path) -> None:
    """DeepSeek-OCR, but for the transformer's positions, which llama.cpp resizes along another axis for squares."""
    spec = SPECS["deepseekocr"]
    model = write_text_model(tmp_path / "t.gguf", spec, tmp_path)
    projector = write_projector(tmp_path / "p.gguf", spec)
    reader = GGUFReader(projector, "r+")
    next(t for t in reader.tensors if t.name == "v.position_embd.weight").data[1:] = 0
    reader.data.flush()
    image = png(picture(12, 9).resize((700, 1500), Resampling.NEAREST))
    ((answer,),) = theirs([(str(model), str(projector), [("h<image>g", [base64.b64encode(image).decode()])])])
    with Runs(model, projector) as runs:
        n, got = runs.first("h<image>g", [image])
    assert n == answer[0]
    assert [got[id] for id, _ in answer[1][:3]] == pytest.approx([value for _, value in answer[1][:3]], abs=0.01)


def test_a_large_image_is_padded_before_it_is_cut(shared_data: Path, tmp_path: Path) -> None:
    """LFM2-VL: four tiles with bars above and below, and a thumbnail without; an image whose sides are rounded down
    from 10.5 and up from 12.5 units is not large."""
    spec = replace(SPECS["lfm2"], patch=32, image=256, positions=64)
    tokens = ["<|img_thumbnail|>", *(f"<|img_row_{y}_col_{x}|>" for y in (1, 2) for x in (1, 2))]
    model = with_tokens(shared_data / "models" / "stories260K.gguf", tmp_path / "t.gguf", tokens)
    projector = write_projector(tmp_path / "p.gguf", spec)
    images = [png(picture(12, 9).resize(size, Resampling.NEAREST)) for size in ((840, 630), (672, 800))]
    asked = [("h<image>g", [base64.b64encode(image).decode()]) for image in images]
    (answers,) = theirs([(str(model), str(projector), asked)], most=64)
    with Runs(model, projector, image_tokens=(0, 64)) as runs:
        for image, (n_tokens, tops) in zip(images, answers, strict=True):
            n, got = runs.first("h<image>g", [image])
            assert n == n_tokens
            assert [got[id] for id, _ in tops] == pytest.approx([value for _, value in tops], abs=0.04)
