"""Images through the real port, by the official clients of OpenAI and Anthropic."""

from __future__ import annotations

import base64
import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import BadRequestError

from tests.helpers.paths import MODELS
from tests.helpers.vision_files import SPECS, picture, png, write_projector

MODEL = MODELS / "stories260K.gguf"
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K.gguf beside the checkout")
IMAGE = base64.b64encode(png(picture(40, 24))).decode()
URI = f"data:image/png;base64,{IMAGE}"


@pytest.fixture(scope="module")
def server(serve_here_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    projector = write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", SPECS["mlp"])
    return serve_here_module(MODEL, "--mmproj", str(projector), "-c", "512", "--temp", "0")


def test_openai(server: Any, connect: Any) -> None:
    client = connect(f"{server.url}/v1")
    parts: Any = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": URI}}]
    texts, n_cached = set(), []
    for content in (parts, parts, parts[:1]):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], max_tokens=6
        )
        texts.add(answer.choices[0].message.content)
        n_cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        if content is parts:
            n_prompt = answer.usage.prompt_tokens
    assert len(texts) == 2  # the image changes the answer, the cache does not
    assert n_cached[1] == n_prompt - 1
    response = client.responses.create(
        model="m",
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": URI}],
            }
        ],  # type: ignore[list-item]
        max_output_tokens=6,
    )
    assert response.usage.input_tokens == n_prompt
    bad: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}]
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].image_url.url.*the image is no image"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": bad}])


def test_anthropic(server: Any) -> None:
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        content: Any = [{"type": "text", "text": "See"}, block]
        counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": content}])
        answer = client.messages.create(model="m", max_tokens=6, messages=[{"role": "user", "content": content}])
        text = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "See"}])
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens >= text.input_tokens + 16


def test_native(server: Any) -> None:
    props = server.get("/props")
    assert props["modalities"] == {"vision": True, "audio": False}
    prompt = {"prompt_string": f"Once {props['media_marker']} upon", "multimodal_data": [IMAGE]}
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 4})
    n_text = sum(len(server.post("/tokenize", {"content": text})["tokens"]) for text in ("Once ", " upon"))
    assert answer["tokens_evaluated"] == 1 + n_text + 16
    counted = server.post("/tokenize", {"content": prompt, "add_special": True})["tokens"]
    assert (len(counted), counted.count(-1)) == (1 + n_text + 16, 16)
    shown = server.post("/tokenize", {"content": prompt, "with_pieces": True})["tokens"]
    assert [token["piece"] for token in shown if token["id"] == -1] == [""] * 16
    assert len(shown) == n_text + 16  # without BOS
    plain = {"content": {"prompt_string": "Once ", "multimodal_data": []}}
    assert server.post("/tokenize", plain) == server.post("/tokenize", {"content": "Once "})
    for broken in ({**prompt, "multimodal_data": []}, {**prompt, "multimodal_data": [IMAGE, IMAGE]}):
        if broken["multimodal_data"]:
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post("/completion", {"prompt": broken, "n_predict": 1})
            assert "2 images or sounds and 1 places" in json.loads(refused.value.read())["error"]["message"]


def test_embeddings(server: Any) -> None:
    marker = server.get("/props")["media_marker"]
    prompt = {"prompt_string": f"Once {marker} upon", "multimodal_data": [IMAGE]}
    parts = [
        {"type": "text", "text": "Once "},
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "text", "text": " upon"},
    ]
    other = base64.b64encode(png(picture(40, 24, seed=2))).decode()
    inputs = [prompt, {"content": parts}, {**prompt, "multimodal_data": [other]}, "Once  upon"]
    answer = server.post("/v1/embeddings", {"input": inputs})
    vectors = [item["embedding"] for item in answer["data"]]
    assert vectors[0] == vectors[1]
    assert len({tuple(vector) for vector in vectors}) == 3
    assert answer["usage"]["prompt_tokens"] > 3 * 16
    alone = server.post("/v1/embeddings", {"input": prompt})
    assert alone["data"][0]["embedding"] == vectors[0]
    (rows,) = server.post("/embedding", {"content": prompt})
    assert len(rows["embedding"]) in (1, alone["usage"]["prompt_tokens"])
    parts[1] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/v1/embeddings", {"input": ["a", {"content": parts}]})
    assert "image_url.url': the image is no image" in json.loads(refused.value.read())["error"]["message"]


def test_a_projector_beside_the_model_is_found(serve_here: Any, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(MODEL)
    write_projector(tmp_path / "mmproj-F32.gguf", SPECS["mlp"])
    assert serve_here(tmp_path / "model.gguf").get("/props")["modalities"]["vision"]
    assert not serve_here(tmp_path / "model.gguf", "--no-mmproj").get("/props")["modalities"]["vision"]


def test_through_a_router(serve: Any, connect: Any, tmp_path: Path) -> None:
    """Images reach a child, also as files: of --media-path, and uploaded to the router."""
    folder = tmp_path / "models" / "eye"
    folder.mkdir(parents=True)
    (folder / "m.gguf").symlink_to(MODEL)
    write_projector(folder / "mmproj-F32.gguf", SPECS["mlp"])
    (tmp_path / "models" / "text.gguf").symlink_to(MODEL)
    media = tmp_path / "media"
    media.mkdir()
    (media / "a.png").write_bytes(base64.b64decode(IMAGE))
    flags = ("--models-dir", str(folder.parent), "--media-path", str(media), "--data-dir", str(tmp_path / "data"))
    router = serve(None, *flags, "-c", "512", "-t", "1")

    def modalities() -> dict[str, list[str]]:
        return {model["id"]: model["architecture"]["input_modalities"] for model in router.get("/v1/models")["data"]}

    known = {"eye": ["text", "image"], "text": ["text"]}
    assert modalities() == known  # before any is loaded
    client = connect(f"{router.url}/v1")
    uploaded = client.files.create(file=("a.png", base64.b64decode(IMAGE)), purpose="vision")
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image_url", "image_url": {"url": "file://a.png"}},
        {"type": "file", "file": {"file_id": uploaded.id}},
    ]
    answers = []
    for part in parts:
        content: Any = [{"type": "text", "text": "See"}, part]
        answer = client.chat.completions.create(
            model="eye", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
        )
        answers.append((answer.usage.prompt_tokens, answer.choices[0].message.content))
    assert answers[0][0] > 16
    assert answers == [answers[0]] * 3
    assert modalities() == known
    assert router.get("/props?model=eye")["modalities"]["vision"]
    with pytest.raises(BadRequestError, match=r"'messages\[0\].content\[0\].image_url.url': .*--media-urls"):
        client.chat.completions.create(
            model="eye",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
        )
