"""Table of image accuracy (docs/models.md): distance from llama.cpp for every projector.

Text, images, and images from the cache, on the CPU and on devices. `--image-table` measures and
writes it; otherwise the test checks that it is complete."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from logitless.graph.backend import Backend
from tests.helpers.vision_files import SPECS, picture, png, write_projector, write_text_model
from tests.helpers.vision_requests import Runs
from tests.models.vision.test_llama_cpp_images import theirs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
HEAD = "| weights | text | one image | two images | cached | OpenCL | Vulkan |\n|---|---|---|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"((?:\|.*\n)*)")
FAR = 0.05  # nats: a fault, and not other rounding
IMAGES = [png(picture(50, 30)), png(picture(16, 16, seed=5))]
PROMPTS = [  # (column, text, images)
    (column, text, IMAGES[:n])
    for n, column in enumerate(("text", "one image", "two images"))
    for text in ("h" + "<image>" * n + "g", "so" + "<image>" * n + " a long")
]


def test_the_table_has_every_projector_and_no_large_difference() -> None:
    (rows,) = TABLE.findall(PAGE.read_text(encoding="utf-8"))
    entries = {
        cells[0]: cells[1:] for cells in ([c.strip() for c in row[1:-1].split("|")] for row in rows.splitlines())
    }
    assert list(entries) == [f"`{name}`" for name in SPECS]
    assert all(len(values) == 6 and max(map(float, values)) < FAR for values in entries.values())


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_every_cell_of_the_table(
    request: pytest.FixtureRequest, shared_data: Path, tmp_path: Path, open_device: Callable[[str], Backend]
) -> None:
    """Minutes: every device compiles its kernels for every projector."""
    if not request.config.getoption("--image-table"):
        pytest.skip("no --image-table")
    for device in ("opencl:0", "vulkan:0"):
        open_device(device)  # or skip
    stories = shared_data / "models" / "stories260K.gguf"
    files = {
        name: (write_text_model(tmp_path / f"{name}.gguf", spec, stories), write_projector(tmp_path / name, spec))
        for name, spec in SPECS.items()
    }
    asked = [(text, [base64.b64encode(image).decode() for image in images]) for _, text, images in PROMPTS]
    answers = theirs([(str(model), str(projector), asked) for model, projector in files.values()])
    lines = []
    for (name, pair), expected in zip(files.items(), answers, strict=True):
        result: dict[str, float] = {}
        for where in (("cpu",), ("opencl:0", "cpu"), ("vulkan:0", "cpu")):
            for column, difference in differences(pair, where, expected):
                result[column] = max(result.get(column, 0.0), difference)
        lines.append("| " + " | ".join([f"`{name}`", *(f"{result[column]:.3f}" for column in COLUMNS)]) + " |\n")
        assert max(result.values()) < FAR, lines[-1]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: HEAD + "".join(lines), page), encoding="utf-8")


COLUMNS = ("text", "one image", "two images", "cached", "OpenCL", "Vulkan")
DEVICES = {"opencl:0": "OpenCL", "vulkan:0": "Vulkan"}


def differences(files: tuple[Path, Path], devices: tuple[str, ...], expected: list[Any]) -> Iterator[tuple[str, float]]:
    """(column, largest difference of the likeliest tokens) of each prompt."""
    with Runs(*files, devices=devices) as runs:
        for (column, text, images), (n_tokens, tops) in zip(PROMPTS, expected, strict=True):
            for cached in (False, True):
                asked = runs.request(text, images, cache_prompt=cached)
                assert len(asked.prompt) == n_tokens
                for _ in range(1 + cached):  # the second request has its prefix from the cache
                    ((prob,),) = runs.run(asked)
                got = dict(prob.top)
                values = [(got[id], value) for id, value in tops or () if value is not None][:3]
                where = DEVICES.get(devices[0], "cached" if cached and images else column)
                if values:
                    yield where, max(abs(ours - value) for ours, value in values)
