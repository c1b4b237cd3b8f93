"""Fine-tuning on images through the real port and the command line: a model learns to name colours."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from logitless.cli.main import main
from tests.helpers.paths import MODELS
from tests.helpers.vision_files import SPECS, png, write_projector
from tests.integration.test_fine_tuning import wait

MODEL = MODELS / "stories260K.gguf"
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K.gguf beside the checkout")
SQUARES = {color: png(Image.new("RGB", (16, 16), color)) for color in ("red", "blue")}


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def by_uri(color: str) -> dict[str, Any]:
    uri = "data:image/png;base64," + base64.b64encode(SQUARES[color]).decode()
    return {"type": "image_url", "image_url": {"url": uri}}


def row(part: dict[str, Any], color: str) -> str:
    return json.dumps({"messages": [*asked(part), {"role": "assistant", "content": color}]}) + "\n"


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", SPECS["mlp"])


def answers(api: openai.OpenAI, model: str, parts: list[dict[str, Any]]) -> list[str]:
    """The first three letters of each answer."""
    texts = []
    for part in parts:
        answer = api.chat.completions.create(model=model, messages=asked(part), max_tokens=8, temperature=0)  # type: ignore[arg-type]
        texts.append((answer.choices[0].message.content or "")[:3])
    return texts


def test_a_job_learns_to_answer_by_images(serve_here: Any, connect: Any, projector: Path, tmp_path: Path) -> None:
    """Data URIs and uploaded files are the same images; each is encoded once."""
    server = serve_here(MODEL, "--mmproj", str(projector), "--data-dir", str(tmp_path), "-c", "512", "-t", "1")
    api = connect(f"{server.url}/v1")
    uploaded = api.files.create(file=("red.png", SQUARES["red"]), purpose="vision")
    of_file = {"type": "file", "file": {"file_id": uploaded.id}}
    rows = [row(by_uri("red"), "red"), row(by_uri("blue"), "blue"), row(of_file, "red"), row(by_uri("blue"), "blue")]
    file = api.files.create(file=("rows.jsonl", "".join(rows * 2).encode()), purpose="fine-tune")
    hyperparameters: Any = {"n_epochs": 12, "batch_size": 4, "learning_rate_multiplier": 5.0, "warmup_steps": 2}
    base = api.models.list().data[0].id
    job = api.fine_tuning.jobs.create(model=base, training_file=file.id, hyperparameters=hyperparameters)
    messages = [event["message"] for event in wait(api, server.url, job.id)]
    assert "2 images and sounds are encoded" in messages
    tuned = api.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert tuned is not None, messages
    parts = [by_uri("red"), by_uri("blue"), of_file]
    assert answers(api, tuned, parts) == ["red", "blu", "red"]
    assert "red" not in answers(api, base, parts)
    gone = api.files.create(
        file=("rows.jsonl", row({"type": "file", "file": {"file_id": "file-0"}}, "red").encode()), purpose="fine-tune"
    )
    failed = api.fine_tuning.jobs.create(model=base, training_file=gone.id)
    wait(api, server.url, failed.id)
    error = api.fine_tuning.jobs.retrieve(failed.id).error
    assert error is not None
    assert error.message == (f"{gone.id}: line 1: messages[0].content[0].file.file_id: the image does not exist")


def test_uploads_that_no_job_can_learn_are_refused(
    serve_here: Any, connect: Any, projector: Path, tmp_path: Path
) -> None:
    flags = ("--data-dir", str(tmp_path), "-c", "128", "-t", "1")
    text = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    for more, part, message in (
        (("--no-mmproj",), by_uri("red"), "image_url.url: an image or a sound needs a projector.*--mmproj"),
        (("--mmproj", str(projector)), broken, "image_url.url: the image is no image of a known format"),
    ):
        server = serve_here(MODEL, *flags, *more)
        with pytest.raises(openai.BadRequestError, match=rf"line 2: messages\[0\]\.content\[0\]\.{message}"):
            connect(f"{server.url}/v1").files.create(
                file=("rows.jsonl", f"{json.dumps(text)}\n{row(part, 'red')}".encode()), purpose="fine-tune"
            )


def test_the_command_line(
    serve_here: Any, connect: Any, projector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files beside the rows; the adapter serves afterwards; memory and refusals are told before a run."""
    rows = tmp_path / "rows.jsonl"
    for color, data in SQUARES.items():
        (tmp_path / f"{color}.png").write_bytes(data)
    parts = {color: {"type": "image_url", "image_url": {"url": f"{color}.png"}} for color in SQUARES}
    rows.write_text("".join(row(part, color) for color, part in parts.items()) * 4)
    data = ("-m", str(MODEL), "-f", str(rows), "-t", "1")
    adapter = tmp_path / "adapter.gguf"
    run = (*data, "--lora-out", str(adapter), "-b", "4", "-epochs", "24", "--adam-alpha", "5e-3", "-val-split", "0")
    assert main(["finetune", *run, "--no-mmproj"]) == 1
    assert capsys.readouterr().err.endswith(
        f"{rows}: line 1: messages[0].content[0].image_url.url: "
        "an image or a sound needs a projector that reads it (--mmproj)\n"
    )
    assert main(["plan", "finetune", *data, "--mmproj", str(projector), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["plan", "finetune", "-m", str(MODEL), "-t", "1", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert planned["devices"][0]["weights"] > plain["devices"][0]["weights"]
    assert main(["finetune", *run, "--mmproj", str(projector)]) == 0
    assert "images and sounds: 2/2 are encoded" in capsys.readouterr().err
    server = serve_here(MODEL, "--mmproj", str(projector), "--lora", str(adapter), "-c", "512", "-t", "1")
    api = connect(f"{server.url}/v1")
    assert answers(api, "any", [by_uri("red"), by_uri("blue")]) == ["red", "blu"]
