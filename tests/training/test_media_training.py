"""Training on rows with images and sounds: losses of requests, gradients of float64, refusals by line and part."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.graph.execution.session import Session
from logitless.graph.order import toposort
from logitless.graph.testing.evaluate import evaluate
from logitless.models.audio.waveform import Waveform
from logitless.models.chat.template import of_file
from logitless.training.config import TrainingConfig
from logitless.training.data.packing import Groups, PackedExamples
from logitless.training.data.run_media import RunMedia
from logitless.training.errors import TrainingError
from logitless.training.run import FineTuning
from logitless.training.trainer import Encoding, Event, Finished, Trainer
from tests.helpers.audio_files import AUDIO_SPECS, sound, wav, write_audio_projector, write_audio_text_model
from tests.helpers.vision_files import SPECS, picture, png, write_projector, write_text_model
from tests.helpers.vision_requests import Runs

IMAGES = [png(picture(40, 24)), png(picture(24, 40, seed=2))]
SOUNDS = [sound(1), sound(0.5, seed=1)]
ANSWER = "cd"
TEXTS = (["x"], ["h", "<image>", "g", "<image>"], ["k", "<image>"])


def uri(medium: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(medium).decode()


def part_of(part: str | bytes | Waveform) -> dict[str, Any]:
    """A part of a message: a text, an image or a sound."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Waveform):
        data = base64.b64encode(wav(part)).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": uri(part)}}


def row(*content: str | bytes | Waveform, answer: str = ANSWER) -> dict[str, Any]:
    """A conversation about texts, images and sounds."""
    parts = [part_of(part) for part in content]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


Files = Callable[[str], tuple[Path, Path]]


@pytest.fixture
def files(tmp_path: Path, shared_data: Path) -> Files:
    """The model and the projector of a spec."""

    def write(name: str) -> tuple[Path, Path]:
        stories = shared_data / "models" / "stories260K.gguf"
        if name in AUDIO_SPECS:
            heard = AUDIO_SPECS[name]
            model = write_audio_text_model(tmp_path / "m.gguf", heard, stories)
            return model, write_audio_projector(tmp_path / "p.gguf", heard)
        spec = SPECS[name]
        model = write_text_model(tmp_path / "m.gguf", spec, stories)
        return model, write_projector(tmp_path / "p.gguf", spec)

    return write


def encoded(trainer: Trainer) -> RunMedia:
    """The run's images, encoded."""
    for _ in trainer.steps.encode():
        pass
    assert trainer.steps.media is not None
    return trainer.steps.media


FAMILIES = ["mlp", "gemma3", "gemma4v", "gemma4v E2B", "qwen2.5vl", "qwen3vl", "mistral3", "hunyuanvl", "idefics3"]
FAMILIES += ["cogvlm", "ultravox"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_of_an_answer_is_that_of_requests(name: str, session: Session, files: Files) -> None:
    """Whatever stands beside it in the window: a text before it, and an example with another image."""
    model, projector = files(name)
    given: list[Any] = SOUNDS if name in AUDIO_SPECS else IMAGES
    media = iter([*given, given[1]])
    rows = [row(*(next(media) if text == "<image>" else text for text in texts)) for texts in TEXTS]
    with FineTuning(session, model, rows, TrainingConfig(mmproj=str(projector), ctx_size=480, batch_size=1)) as run:
        encoded(run.trainer)
        result: list[tuple[list[int], list[float]]] = []  # the learned tokens of each row, and their losses
        dataset = run.trainer.order.dataset
        for window in (dataset.sample(i, np.random.default_rng(0)) for i in range(len(dataset))):
            losses = run.trainer.steps.evaluate([window]).losses
            for start, stop in pairwise([*window.starts, len(losses)]):
                where = start + np.flatnonzero(window.weights[start:stop])
                result.append((window.labels[where].tolist(), losses[where].tolist()))
    with Runs(model, projector, type_k="f32", type_v="f32") as runs:
        template = of_file(runs.runner.gguf.metadata, runs.words)
        for texts, media, (ids, losses) in zip(TEXTS, ([], given, given[1:]), filter(any, result), strict=True):
            content = template.between_parts.join(texts)
            request = runs.request(template.render([{"role": "user", "content": content}]), media)
            expected = []
            for k, id in enumerate(ids):
                ((prob,),) = runs.run(replace(request, prompt=(*request.prompt, *ids[:k])))
                expected.append(-dict(prob.top)[id])
            assert len(ids) > 2
            np.testing.assert_allclose(losses, expected, atol=3e-4)


@pytest.mark.parametrize("name", ["mlp", "gemma3", "qwen3vl", "cogvlm"])
def test_gradients_of_an_adapter_are_those_of_float64_differences(name: str, session: Session, files: Files) -> None:
    """By a few numbers of each LoRA matrix; an image changes them."""
    model, projector = files(name)
    rows = [row("h", IMAGES[0], "g")]
    got: dict[str, Any] = {}

    def keep(gradients: dict[str, np.ndarray[Any, Any]]) -> None:
        got.update(gradients)

    with FineTuning(
        session,
        model,
        rows,
        TrainingConfig(mmproj=str(projector), lora_r=2, ctx_size=128, batch_size=1, iterations=1, warmup=9),
        on_gradients=keep,
    ) as run:
        trainer, r = run.trainer, np.random.default_rng(4)
        for p in trainer.trainable.params:
            session.write(p.name, r.normal(size=p.shape).astype(np.float32) * 0.1)  # B is 0 otherwise
        values = trainer.trainable.read()
        window = trainer.order.dataset.sample(0, np.random.default_rng(0))
        run.fit()
        media = trainer.steps.media
        assert media is not None
        feeds = trainer.steps.feeds([window], float(window.weights.sum()))
        outputs = trainer.steps._evaluate()
        weights = {t.name: session.read(t.name) for t in toposort(outputs) if t.op == "variable"}
        named = dict(zip(trainer.trainable.names, trainer.trainable.params, strict=True))

    def loss() -> float:
        result = evaluate(outputs, feeds, weights)
        return float((np.concatenate(result[::2]) * feeds["weight"].astype(np.float64)).sum())

    for key in ("blk.0.attn_q.weight.lora_a", "blk.0.attn_v.weight.lora_b", "blk.1.ffn_down.weight.lora_a"):
        array = weights[named[key].name] = values[key].astype(np.float64)
        at = tuple(int(r.integers(n)) for n in array.shape)
        h = 1e-5
        before = array[at]
        array[at] = before + h
        above = loss()
        array[at] = before - h
        below = loss()
        array[at] = before
        assert got[key][at] == pytest.approx((above - below) / (2 * h), rel=2e-3, abs=1e-5)


@pytest.fixture
def run_of(session: Session, files: Files) -> Callable[..., FineTuning]:
    """A run on the smallest model."""

    def make(rows: Any, name: str = "mlp", **more: Any) -> FineTuning:
        model, projector = files(name)
        fields = {"mmproj": str(projector), "ctx_size": 128, "batch_size": 1, "iterations": 2} | more
        return FineTuning(session, model, rows, TrainingConfig(**fields))

    return make


def test_each_image_is_encoded_once_before_the_first_step(run_of: Callable[..., FineTuning], session: Session) -> None:
    """Its encoder is gone then, with its weights."""
    events: list[Event] = []
    with run_of([row("a", IMAGES[0]), row("b", *IMAGES), row("c", IMAGES[0])]) as run:
        before = {name for name in session._variables if name.startswith(("v.", "mm.", "vision."))}
        assert run.fit(events.append).reason
        after = {name for name in session._variables if name.startswith(("v.", "mm.", "vision."))}
    assert [event for event in events if isinstance(event, Encoding)] == [Encoding(1, 2), Encoding(2, 2)]
    assert before == after == set()


def test_rows_of_images_are_not_learned(run_of: Callable[..., FineTuning]) -> None:
    with run_of([row("h", IMAGES[0], "g")]) as run:
        window = run.trainer.order.dataset.sample(0, np.random.default_rng(0))
        ((at, media),) = window.media
        of_image = at + np.flatnonzero(media.rows)
    assert len(of_image) == 16
    assert not window.weights[of_image].any()
    assert not window.weights[of_image - 1].any()  # nor is the first row predicted


def test_a_row_beyond_the_context_keeps_whole_images(run_of: Callable[..., FineTuning]) -> None:
    """Its rest is left out, and told with its images."""
    long = row("h", IMAGES[0], "g", IMAGES[1])
    long["messages"] += row("again", IMAGES[0], IMAGES[1])["messages"]
    with run_of([long, row("k", answer="l" * 200)], iterations=1) as run:
        dataset = run.trainer.order.dataset
        assert isinstance(dataset, PackedExamples)
        of_texts, of_images = run.warnings
        n_media_tokens = dataset.beyond_media.n_media_tokens
        spans = [
            media.spans for i in range(len(dataset)) for _, media in dataset.sample(i, np.random.default_rng(0)).media
        ]
    assert of_texts.endswith("do not see the beginning")
    assert of_images.startswith(
        "1 of 1 examples with images are longer than the context of 128 tokens (the longest has "
    )
    assert of_images.endswith(f" tokens beyond it, {n_media_tokens} of them of images, are left out")
    assert n_media_tokens % 16 == 0
    assert n_media_tokens
    ((*kept,),) = spans
    assert all(stop - start == 16 for start, stop in kept)
    assert 16 * (4 - len(kept)) == n_media_tokens


def test_pairs_with_images_are_learned(run_of: Callable[..., FineTuning]) -> None:
    """The prompt's images are in both answers' rows."""
    rows = [
        {
            "prompt": row("h", medium)["messages"][:1],
            "chosen": [{"role": "assistant", "content": "cd"}],
            "rejected": [{"role": "assistant", "content": "ef"}],
        }
        for medium in IMAGES
    ]
    with run_of(rows, method="dpo") as run:
        assert isinstance(run.fit(), Finished)
        dataset = run.trainer.order.dataset
        assert isinstance(dataset, Groups)
        assert len(dataset._media) == 4
        assert run.trainer.steps.media is not None
        assert run.trainer.steps.media.n_tiles == 2


def test_a_file_of_rows_names_files_below_its_folder(
    run_of: Callable[..., FineTuning], session: Session, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(IMAGES[0])
    (tmp_path / "out.png").write_bytes(IMAGES[0])

    def write(name: str) -> Path:
        part = {"type": "image_url", "image_url": {"url": name}}
        messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}]
        path = tmp_path / "in" / "rows.jsonl"
        path.write_text(json.dumps({"messages": messages}))
        return path

    for name in ("a b.png", "./a b.png", "file:a%20b.png", f"file://{tmp_path}/in/a%20b.png"):
        with run_of(write(name)) as run:
            assert run.trainer.steps.media is not None
            assert run.trainer.steps.media.n_tiles == 1
        session.release()
    for name in ("../out.png", "none.png", f"{tmp_path}/out.png"):
        with pytest.raises(
            TrainingError, match=r"line 1: messages\[0\]\.content\[0\]\.image_url\.url: the image is no file below "
        ):
            run_of(write(name))
    with pytest.raises(TrainingError, match=r"image_url\.url: the image is at an address, and none is fetched"):
        run_of(write("https://example.com/a.png"))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}},
            r"content\[1\]\.image_url\.url: the image is no image of a known format",
        ),
        (
            {"type": "image_url", "image_url": {"url": uri(IMAGES[0])[:200]}},
            r"content\[1\]\.image_url\.url: the image ",
        ),
        (
            {"type": "image_url", "image_url": "data:image/png,x"},
            r"content\[1\]\.image_url: the image must be a data URI in base64",
        ),
        ({"type": "image_url"}, r"content\[1\]: field 'image_url' must be a non-empty string"),
        (
            {"type": "image_url", "image_url": "cat.png"},
            r"content\[1\]\.image_url: the image must be a data URI or an uploaded file",
        ),
        (
            {"type": "file", "file": {"file_id": "file-1"}},
            r"content\[1\]\.file\.file_id: the image is an uploaded file",
        ),
        ({"type": "input_audio", "input_audio": {}}, r"content\[1\]: field 'input_audio\.data' must be a non-empty"),
        ({"type": "audio_url"}, r"content\[1\]: field 'audio_url' must be a non-empty string"),
        (
            {"type": "input_audio", "input_audio": {"data": "*"}},
            r"content\[1\]\.input_audio\.data: the sound is not valid base64",
        ),
        (part_of(SOUNDS[0]), r"content\[1\]\.input_audio\.data: the sound needs a projector that reads it"),
        ({"type": "video_url"}, r"content\[1\]: must be a part of type text, image_url or input_audio"),
    ],
)
def test_an_image_at_fault_is_named_by_line_and_part(
    run_of: Callable[..., FineTuning], part: Any, message: str
) -> None:
    bad = row("h", IMAGES[0])
    bad["messages"][0]["content"][1] = part
    with pytest.raises(TrainingError, match=rf"^rows: line 2: messages\[0\]\.{message}") as refused:
        run_of([row("a", IMAGES[0]), bad])
    assert "\n" not in str(refused.value)


def test_images_that_cannot_be_learned_are_refused(run_of: Callable[..., FineTuning]) -> None:
    with pytest.raises(
        TrainingError, match=r"rows: line 1: messages\[0\]\.content\[1\]\.image_url\.url: an image or .*--mmproj"
    ):
        run_of([row("a", IMAGES[0])], mmproj=None)
    of_assistant = row("a", answer="b")
    of_assistant["messages"][1]["content"] = row("c", IMAGES[0])["messages"][0]["content"]
    with pytest.raises(TrainingError, match=r"messages\[1\]\.content\[1\]: is an image of the assistant"):
        run_of([of_assistant])
    with pytest.raises(TrainingError, match=r"content\[64\]\.image_url\.url: a row has at most 64 images"):
        run_of([row(*[IMAGES[0]] * 65)])
