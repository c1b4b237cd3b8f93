"""Audio over HTTP with a model that hears and sees: official client, transcriptions, a router, broken files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError

from tests.helpers.audio_files import AUDIO_SPECS, N_CTX, sound, write_audio_projector, write_audio_text_model
from tests.helpers.paths import MODELS
from tests.helpers.sounds import packed, wav
from tests.helpers.vision_files import picture, png

STORIES = MODELS / "stories260K.gguf"
pytestmark = pytest.mark.skipif(not STORIES.exists(), reason="no stories260K.gguf beside the checkout")
SPEC = AUDIO_SPECS["qwen2.5o audio"]
SOUNDS = [wav(sound(1, seed).samples) for seed in range(2)]
HEARD = [base64.b64encode(data).decode() for data in SOUNDS]
SEEN = base64.b64encode(png(picture(40, 24))).decode()


def written(folder: Path) -> Path:
    """A folder with a model that hears and sees, and a sound."""
    folder.mkdir(parents=True, exist_ok=True)
    write_audio_text_model(folder / "m.gguf", SPEC, STORIES)
    write_audio_projector(folder / "mmproj.gguf", SPEC)
    (folder / "speech.wav").write_bytes(SOUNDS[0])
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("audio") / "ear")


@pytest.fixture(scope="module")
def server(serve_here_module: Any, files: Path) -> Any:
    flags = ("-c", str(2 * N_CTX), "-np", "2", "-t", "1", "--temp", "0", "--data-dir", str(files / "data"))
    return serve_here_module(files / "m.gguf", *flags)


def part(data: str, form: str = "wav") -> Any:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def test_the_official_client(server: Any, connect: Any) -> None:
    assert server.get("/props")["modalities"] == {"vision": True, "audio": True}
    (model,) = server.get("/v1/models")["data"]
    assert model["architecture"]["input_modalities"] == ["text", "image", "audio"]
    client = connect(f"{server.url}/v1")
    text: Any = {"type": "text", "text": "Hear"}
    image: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SEEN}"}}
    answers, n_cached, n_prompt = [], [], []
    for content in (
        [text, part(HEARD[0])],
        [text, part(HEARD[0])],
        [text, part(HEARD[1])],
        [text, part(HEARD[0]), image],
    ):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], max_tokens=2, logprobs=True, top_logprobs=2
        )
        answers.append(str(answer.choices[0].logprobs))
        n_prompt.append(answer.usage.prompt_tokens)
        n_cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3  # the sound and the image change the answer, the cache does not
    assert n_cached[1] == n_prompt[0] - 1
    assert n_prompt[0] == n_prompt[2] < n_prompt[3]
    response = client.responses.create(
        model="m",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hear"}, part(HEARD[0])]}],
        max_output_tokens=6,
    )
    assert response.usage.input_tokens == n_prompt[0]
    uploaded = client.files.create(file=("a.wav", SOUNDS[0]), purpose="user_data")
    filed: Any = {"type": "file", "file": {"file_id": uploaded.id}}
    again = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": [text, filed]}], max_tokens=2, logprobs=True, top_logprobs=2
    )
    assert str(again.choices[0].logprobs) == answers[0]
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].input_audio.data.*the audio is no sound"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part("aGVsbG8=")]}])


def test_prompts_with_markers_and_counting(server: Any) -> None:
    marker = server.get("/props")["media_marker"]
    prompt = {"prompt_string": f"Once {marker} upon {marker}", "multimodal_data": [HEARD[0], SEEN]}
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 4})
    counted = server.post("/tokenize", {"content": prompt, "add_special": True})["tokens"]
    assert answer["tokens_evaluated"] == len(counted)
    assert counted.count(-1) > 16
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hear"}, part(HEARD[0])]}]}
    n = server.post("/v1/chat/completions/input_tokens", body)["input_tokens"]
    assert n == server.post("/v1/chat/completions", {**body, "max_tokens": 1})["usage"]["prompt_tokens"]


def test_transcriptions(server: Any, connect: Any) -> None:
    """The text is that of a chat with the same prompt, greedily; a stream has the same."""
    audio = connect(f"{server.url}/v1").audio
    asked: Any = {"file": ("a.wav", SOUNDS[0]), "model": "m", "language": "en", "extra_body": {"max_tokens": 12}}
    whole = audio.transcriptions.create(**asked)
    marker = server.get("/props")["media_marker"]
    chat = [{"role": "user", "content": f"Transcribe audio to text (language: en){marker}"}]
    rendered = server.post("/apply-template", {"messages": chat})["prompt"]
    prompt = {"prompt_string": rendered.removeprefix("<s>"), "multimodal_data": [HEARD[0]]}
    expected = server.post("/completion", {"prompt": prompt, "n_predict": 12})
    assert whole.text == expected["content"]
    assert whole.text
    assert whole.usage.input_tokens == expected["tokens_evaluated"]
    assert whole.usage.input_token_details.audio_tokens > 10
    events = [*audio.transcriptions.create(**asked, stream=True)]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == whole.text
    verbose = audio.transcriptions.create(**asked, response_format="verbose_json")
    assert (verbose.text, verbose.duration) == (whole.text, 1)


def test_formats_have_one_answer(server: Any) -> None:
    """FLAC keeps the samples, and two equal channels are one."""
    pytest.importorskip("soundfile")
    samples = sound(1).samples
    answers = set()
    for data in (SOUNDS[0], packed(samples, 16_000, "FLAC"), wav(np.stack([samples] * 2, 1))):
        prompt = {
            "prompt_string": server.get("/props")["media_marker"],
            "multimodal_data": [base64.b64encode(data).decode()],
        }
        answer = server.post("/completion", {"prompt": prompt, "n_predict": 1, "n_probs": 4, "cache_prompt": False})
        answers.add(json.dumps(answer["completion_probabilities"]))
    assert len(answers) == 1


def test_through_a_router(serve: Any, connect: Any, files: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "ear").symlink_to(files)
    router = serve(None, "--models-dir", str(tmp_path / "models"), "-c", str(N_CTX), "-t", "1")
    client = connect(f"{router.url}/v1")
    text = client.audio.transcriptions.create(file=("a.wav", SOUNDS[0]), model="ear", extra_body={"max_tokens": 6})
    assert text.usage.input_token_details.audio_tokens > 10
    answer = client.chat.completions.create(
        model="ear", messages=[{"role": "user", "content": [part(HEARD[0])]}], max_tokens=1
    )
    assert answer.usage.prompt_tokens > 10
    (model,) = router.get("/v1/models")["data"]
    assert "audio" in model["architecture"]["input_modalities"]
    with pytest.raises(BadRequestError, match="'file': the audio is no sound"):
        client.audio.transcriptions.create(file=("a.wav", b"hello"), model="ear")
